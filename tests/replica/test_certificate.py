"""A process that dies lets go of its lock: what that proves, and to whom."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from a2a_lease import InMemoryLeaseStore, LeaseSettings
from a2a_lease.model import LivenessLock, SessionState
from a2a_lease.replica.replica import Replica
from a2a_lease.testing.conformance import SERVICE, acquire
from replica.test_heartbeat import Ears, until


if TYPE_CHECKING:
    from collections.abc import AsyncIterator


SETTINGS = LeaseSettings(
    ttl=60.0, heartbeat_interval=0.05, sweep_interval=0.05, stop_timeout=1.0
)
"""Nobody dies by silence while a test lasts."""
MANY = 30
"""Looks in which it would have shown."""


class Locked(InMemoryLeaseStore):
    """Has locks, and tells who looked at them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        self.server = 'one'
        self.of_connection = True
        self.looks = 0
        self.refuses = 0
        self.fails = 0

    async def take_liveness_lock(self, session_id, *, number):
        if self.refuses:
            self.refuses -= 1
            raise OSError('too many connections')
        self.held.add(session_id)
        return LivenessLock(
            server=self.server,
            number=number,
            of_connection=self.of_connection,
        )

    async def renew(self, session_id, *, lock=None):
        if self.fails:
            self.fails -= 1
            raise OSError('database is locked')
        if lock is not None and session_id not in self.held:
            raise OSError('connection reset')
        return await super().renew(session_id, lock=lock)

    async def look(self, *arguments, **options):
        self.looks += 1
        return await super().look(*arguments, **options)

    async def released_locks(self, sessions):
        return {session.id for session in sessions} - self.held

    async def lock_of(self, session_id: str) -> LivenessLock | None:
        return {s.id: s.lock for s in await self.sessions()}[session_id]

    async def looks_on(self) -> None:
        before = self.looks
        await until(lambda: self.looks >= before + MANY)


@pytest.fixture
def store() -> Locked:
    return Locked()


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
async def judge(store: Locked, ears: Ears) -> AsyncIterator[Replica]:
    judge = Replica(store, SETTINGS, SERVICE, listener=ears)
    await judge.start()

    async def locked():
        return await store.lock_of(judge.session.id)

    await until(locked)
    yield judge
    await judge.close(timeout=5)


async def _silent(store: Locked, *, server: str = 'one') -> str:
    """Returns a session that beat once, with a lock."""
    session_id = uuid.uuid4().hex
    await store.open_session(
        session_id=session_id,
        service=SERVICE,
        ttl=SETTINGS.ttl,
        heartbeat_interval=SETTINGS.heartbeat_interval,
        label='silent',
    )
    await acquire(store, session_id)
    store.held.add(session_id)
    lock = LivenessLock(server=server, number=1)
    assert await store.renew(session_id, lock=lock)
    return session_id


async def _state(store: Locked, session_id: str) -> SessionState:
    return {s.id: s.state for s in await store.sessions()}[session_id]


async def test_whoever_lets_go_is_dead_before_the_silence_says_so(
    store: Locked, judge: Replica, ears: Ears
):
    silent = await _silent(store)
    await store.looks_on()
    # It is silent, and holds its lock.
    assert await _state(store, silent) is SessionState.OPEN
    store.held.discard(silent)
    await until(lambda: silent in ears.ended)
    assert await _state(store, silent) is SessionState.FENCED


async def test_whoever_beats_with_another_lock_lives(
    store: Locked, judge: Replica
):
    other = await _silent(store)
    store.held.discard(other)
    for number in range(2, 10):
        before = store.looks
        await until(lambda before=before: store.looks > before)
        store.held.add(other)
        lock = LivenessLock(server='one', number=number)
        assert await store.renew(other, lock=lock)
        store.held.discard(other)
    assert await _state(store, other) is SessionState.OPEN


async def test_a_lock_of_another_server_proves_nothing(
    store: Locked, judge: Replica
):
    silent = await _silent(store, server='two')
    store.held.discard(silent)
    await store.looks_on()
    assert await _state(store, silent) is SessionState.OPEN


async def test_whose_own_lock_broke_believes_none(
    store: Locked, judge: Replica
):
    """What broke its connection may have broken all."""
    silent = await _silent(store)
    me = judge.session.id
    store.held.clear()

    async def locked_again():
        lock = await store.lock_of(me)
        return lock is not None and lock.number > 1

    await until(locked_again)
    await store.looks_on()
    assert await _state(store, silent) is SessionState.OPEN
    assert judge.session.id == me


async def test_a_lock_of_the_process_outlasts_a_beat_that_fails(
    store: Locked, ears: Ears
):
    """As one on a file: what breaks no connection of others is no doubt."""
    store.of_connection = False
    replica = Replica(store, SETTINGS, SERVICE, listener=ears)
    await replica.start()
    session = replica.session

    async def locked():
        return await store.lock_of(session.id)

    await until(locked)
    silent = await _silent(store)
    store.fails = 3
    await until(lambda: not store.fails)
    store.held.discard(silent)
    await until(lambda: silent in ears.ended)
    lock = await store.lock_of(session.id)
    assert lock is not None
    assert lock.number == 1
    await replica.close(timeout=5)


async def test_whoever_gets_no_lock_beats_on(store: Locked, ears: Ears):
    store.refuses = 3
    replica = Replica(store, SETTINGS, SERVICE, listener=ears)
    await replica.start()
    silent = await _silent(store)
    store.held.discard(silent)

    async def locked():
        return await store.lock_of(replica.session.id)

    assert not await locked()
    # It believes no lock without one of its own, and tries to get one.
    await until(locked)
    await until(lambda: silent in ears.ended)
    await replica.close(timeout=5)


async def test_locks_can_be_left_alone(store: Locked, ears: Ears):
    settings = dataclasses.replace(SETTINGS, liveness_lock=False)
    replica = Replica(store, settings, SERVICE, listener=ears)
    await replica.start()
    silent = await _silent(store)
    store.held.discard(silent)
    await store.looks_on()
    assert await store.lock_of(replica.session.id) is None
    assert await _state(store, silent) is SessionState.OPEN
    await replica.close(timeout=5)


class Lines(Locked):
    """One that has connections, of which the first can lose its answers."""

    def __init__(self, lines: list[Lines] | None = None) -> None:
        super().__init__()
        self.lines = [] if lines is None else lines
        self.number = len(self.lines)
        self.unanswered: set[str] = set()
        """Calls of the first connection that wait."""
        self.order: list[str] = []
        """What became of connections."""
        self.asked: set[str] = set()
        self.takes: dict[str, float] = {}
        """Seconds for a beat of a session."""
        self.landed: Counter[str] = Counter()

    def detached(self):
        line = Lines(self.lines)
        line.__dict__ = self.__dict__ | {'number': len(self.lines)}
        self.lines.append(line)
        self.order.append('new')
        return line

    async def answer(self, call: str) -> None:
        while not self.number and call in self.unanswered:
            self.asked.add(call)
            await asyncio.sleep(0.01)

    async def renew(self, session_id, *, lock=None):
        await self.answer('renew')
        await asyncio.sleep(self.takes.get(session_id, 0.0))
        renewal = await super().renew(session_id, lock=lock)
        self.landed[session_id] += 1
        if 'renew' in self.asked and not self.number:
            self.order.append('late beat')
        else:
            self.order.append('beat' if lock is None else 'beat with a lock')
        return renewal

    async def look(self, *arguments, **options):
        await self.answer('look')
        return await super().look(*arguments, **options)

    async def released_locks(self, sessions):
        await self.answer('released_locks')
        return await super().released_locks(sessions)

    async def cancel_requests(self, *arguments):
        await self.answer('cancel_requests')
        return await super().cancel_requests(*arguments)

    async def close(self) -> None:
        self.order.append(f'close {self.number}')


PATIENT = LeaseSettings(
    ttl=600.0, heartbeat_interval=0.1, sweep_interval=0.1, stop_timeout=1.0
)
"""Nothing is given up while a test lasts."""


@pytest.fixture
async def lines(ears: Ears) -> AsyncIterator[tuple[Lines, Replica]]:
    store = Lines()
    replica = Replica(store, PATIENT, SERVICE, listener=ears)
    await replica.start()

    async def locked():
        return await store.lock_of(replica.session.id)

    await until(locked)
    store.order.clear()
    yield store, replica
    await replica.close(timeout=0.1)


async def test_a_beat_without_an_answer_is_sent_again(lines):
    """The server may have freed the lock, and nothing is heard of it here."""
    store, replica = lines
    session = replica.session
    store.unanswered.add('renew')

    async def has_another_lock():
        lock = await store.lock_of(session.id)
        return lock is not None and lock.number == 2

    await until(has_another_lock)
    assert replica.session is session
    assert not session.ended
    # Another connection tells that there is no lock before one is taken. The
    # old one is kept: the beat that it has may land yet, and tell of its lock.
    after = store.order[store.order.index('new') :]
    assert after[:2] == ['new', 'beat']
    assert 'close 0' not in store.order
    store.unanswered.clear()
    await until(lambda: 'close 0' in store.order)
    late = store.order.index('late beat')
    assert store.order.index('close 0') > late + 1


@pytest.mark.parametrize('call', ['look', 'released_locks', 'cancel_requests'])
async def test_no_beat_waits_for_another_call(lines, call: str):
    """Others would see a lock that is free, and no beat."""
    store, replica = lines
    session = replica.session
    await acquire(store, session.id, task_id='mine')
    await _silent(store)
    store.unanswered.add(call)
    await store.request_cancel(SERVICE, 'mine')
    await until(lambda: call in store.asked)
    store.order.clear()
    await until(lambda: len(store.order) > MANY)
    assert set(store.order) == {'beat with a lock'}
    assert not session.ended


async def test_a_beat_that_is_given_up_keeps_its_lock_until_the_next(
    ears: Ears,
):
    """Others would see it free before they see a beat without it."""
    store = Lines()
    settings = LeaseSettings(
        ttl=0.4, heartbeat_interval=0.1, sweep_interval=0.1, stop_timeout=1.0
    )
    replica = Replica(store, settings, SERVICE, listener=ears)
    await replica.start()

    async def locked():
        return await store.lock_of(replica.session.id)

    await until(locked)
    store.order.clear()
    store.unanswered.add('look')
    await until(lambda: 'close 0' in store.order)
    after = store.order[store.order.index('new') :]
    assert 'beat' in after[: after.index('close 0')]
    await replica.close(timeout=5)


async def test_a_beat_that_was_given_up_counts_when_it_lands(ears: Ears):
    """A process that gets little time is slow to connect, each time anew."""
    settings = LeaseSettings(
        ttl=1.0, heartbeat_interval=0.1, sweep_interval=0.1, stop_timeout=1.0
    )
    store = Lines()
    judge = Replica(store, settings, SERVICE, listener=ears)
    await judge.start()
    replica = Replica(store, settings, SERVICE, listener=Ears())
    await replica.start()
    session = replica.session
    # Longer than until it is given up, shorter than until others fence it.
    store.takes[session.id] = 1.5 * settings.beat_timeout

    async def beats():
        return store.landed[session.id]

    before = await beats()

    async def goes_on():
        return await beats() > before + 5

    await until(goes_on)
    assert replica.session is session
    assert not session.ended
    store.takes.clear()
    for each in (judge, replica):
        await each.close(timeout=5)
