"""The thread that beats: what stops it, and what does not."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from a2a_lease import InMemoryLeaseStore, LeaseSettings, LeaseStore
from a2a_lease.model import LeaseState, SessionState
from a2a_lease.replica.replica import Replica
from a2a_lease.testing.conformance import SERVICE, acquire, open_session


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


SETTINGS = LeaseSettings(
    ttl=1.0, heartbeat_interval=0.1, sweep_interval=0.1, stop_timeout=1.0
)


class Ears:
    """Hears the heartbeat, on its thread."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.canceled: list[str] = []
        self.ended: set[str] = set()
        self.threads: set[str] = set()

    def session_lost(self, session) -> None:
        self.threads.add(threading.current_thread().name)
        self.lost.append(session.id)

    def turns_canceled(self, leases) -> None:
        self.canceled += [lease.task_id for lease in leases]

    def sessions_ended(self, sessions) -> None:
        self.ended |= {session.id for session in sessions}
        raise RuntimeError('A listener that fails stops nothing.')


class Troubled:
    """A store that behaves until it is told not to; shared by its copies."""

    def __new__(cls, inner: LeaseStore) -> Any:
        def delegate(name: str):
            async def method(self, *args, **kwargs):
                trouble = self.state['trouble'].get(name)
                if trouble is not None:
                    await trouble()
                return await getattr(inner, name)(*args, **kwargs)

            return method

        methods: dict[str, Any] = {
            name: delegate(name)
            for name in LeaseStore.__abstractmethods__ - {'detached'}
        }
        state: dict[str, Any] = {'trouble': {}, 'detached': 0}

        def detached(self):
            state['detached'] += 1
            return made_of()

        kind = type(
            'Troubled', (LeaseStore,), {**methods, 'detached': detached}
        )

        def made_of():
            made = kind()
            made.state = state
            return made

        return made_of()


async def until(condition: Callable[[], Any | Awaitable[Any]]) -> Any:
    async with asyncio.timeout(20):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.01)


async def state_of(store: LeaseStore, session_id: str) -> SessionState:
    return {s.id: s.state for s in await store.sessions()}[session_id]


async def beat_of(store: LeaseStore, session_id: str) -> int:
    return {s.id: s.beat for s in await store.sessions()}[session_id]


async def beats_on(store: LeaseStore, session_id: str) -> None:
    before = await beat_of(store, session_id)

    async def on():
        return await beat_of(store, session_id) > before + 1

    await until(on)


@pytest.fixture
def store() -> InMemoryLeaseStore:
    return InMemoryLeaseStore()


@pytest.fixture
async def start():
    replicas = []

    async def start(store: LeaseStore, ears: Ears | None = None) -> Replica:
        replica = Replica(store, SETTINGS, SERVICE, listener=ears or Ears())
        await replica.start()
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        await replica.close(timeout=5)


async def test_it_beats_from_start_to_close(store, start):
    replica = await start(store)
    session = replica.session
    assert session.fresh()
    assert await beat_of(store, session.id) >= 1
    await replica.start()
    assert replica.session is session
    await beats_on(store, session.id)
    await replica.close(timeout=5)
    assert session.ended
    assert not session.fresh()
    assert await state_of(store, session.id) is SessionState.CLOSED
    assert not replica.started
    await replica.close(timeout=5)


async def test_a_blocked_loop_does_not_stop_it(store, start):
    one, two = await start(store), await start(store)
    before = await beat_of(store, one.session.id)
    time.sleep(2 * SETTINGS.ttl)
    assert await beat_of(store, one.session.id) > before
    for replica in (one, two):
        assert await state_of(store, replica.session.id) is SessionState.OPEN


async def test_it_does_not_start_without_a_store(store):
    troubled = Troubled(store)

    async def refuse():
        raise ConnectionRefusedError('no database')

    troubled.state['trouble']['open_session'] = refuse
    replica = Replica(troubled, SETTINGS, SERVICE, listener=Ears())
    with pytest.raises(ConnectionRefusedError, match='no database'):
        await replica.start()
    assert not replica.started
    del troubled.state['trouble']['open_session']
    await replica.start()
    await replica.close(timeout=5)


@pytest.mark.parametrize('call', ['open_session', 'renew'])
async def test_it_starts_on_a_busy_store_with_one_session(store, call):
    """Whether the first try landed is unknown; the same session is tried."""
    troubled = Troubled(store)
    tries = []

    async def trouble():
        tries.append(call)
        if len(tries) == 1:
            await asyncio.Event().wait()
        if len(tries) == 2:
            raise ConnectionResetError('lost')

    troubled.state['trouble'][call] = trouble
    replica = Replica(troubled, SETTINGS, SERVICE, listener=Ears())
    await replica.start()
    assert len(tries) >= 3
    assert [s.id for s in await store.sessions()] == [replica.session.id]
    await replica.close(timeout=5)


@pytest.mark.parametrize('call', ['renew', 'look'])
async def test_a_call_without_an_answer_is_given_up(store, start, call):
    troubled = Troubled(store)
    replica = await start(troubled)
    session = replica.session
    hung = threading.Event()

    async def hang():
        hung.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue  # As a driver that cannot be stopped.

    detached = troubled.state['detached']
    troubled.state['trouble'][call] = hang
    await until(hung.is_set)
    await until(lambda: troubled.state['detached'] > detached)
    del troubled.state['trouble'][call]
    await beats_on(store, session.id)
    assert not session.ended
    assert replica.session is session


async def test_a_beat_that_fails_changes_nothing(store, start, caplog):
    troubled = Troubled(store)
    ears = Ears()
    replica = await start(troubled, ears)
    session = replica.session
    failures = 0

    async def fail():
        nonlocal failures
        failures += 1
        raise OSError('connection reset')

    troubled.state['trouble']['renew'] = fail
    await until(lambda: failures >= 4)
    await until(lambda: not session.fresh())
    assert not session.ended
    del troubled.state['trouble']['renew']
    await until(session.fresh)
    assert replica.session is session
    assert not ears.lost
    assert 'connection reset' in caplog.text


async def test_nobody_is_judged_without_an_own_beat(store, start):
    """A database that takes no writes makes everybody silent."""
    troubled = Troubled(store)
    judge = await start(troubled)
    silent = await open_session(store, 'f' * 32)
    looked = 0

    async def count():
        nonlocal looked
        looked += 1

    failed = 0

    async def fail():
        nonlocal failed
        failed += 1
        raise OSError('read-only')

    troubled.state['trouble'] = {'renew': fail, 'look': count}
    await until(lambda: failed > 2)
    looked = 0
    before = failed
    await until(lambda: failed > before + 8)
    assert looked == 0
    assert await state_of(store, silent) is SessionState.OPEN
    del troubled.state['trouble']['renew']
    await until(lambda: looked)
    assert not judge.session.ended


async def test_silence_is_fenced_and_told(store, start):
    ears = Ears()
    await start(store, ears)
    # Short-lived itself, so that the judge's own time to live counts.
    await store.open_session(
        session_id='silent',
        service=SERVICE,
        ttl=0.1,
        heartbeat_interval=0.05,
        label='x',
    )
    await acquire(store, 'silent')
    await until(lambda: 'silent' in ears.ended)
    assert await state_of(store, 'silent') is SessionState.FENCED


async def test_whoever_was_fenced_goes_on_under_a_new_session(
    store, start, caplog
):
    ears = Ears()
    replica = await start(store, ears)
    session = replica.session

    async def fence():
        beat = await beat_of(store, session.id)
        return await store.fence(session.id, beat=beat)

    await until(fence)
    await until(lambda: ears.lost)
    assert ears.lost == [session.id]
    assert ears.threads == {'a2a-lease-heartbeat'}
    assert session.ended
    assert not session.fresh()
    new = await replica.open_session(timeout=10)
    assert new.id != session.id
    assert new.fresh()
    await beats_on(store, new.id)
    assert 'declared dead by others' in caplog.text


async def test_a_cancel_is_told_within_a_beat(store, start):
    troubled = Troubled(store)
    ears = Ears()
    replica = await start(troubled, ears)
    lease = await acquire(store, replica.session.id)

    async def fail():
        raise OSError('not now')

    troubled.state['trouble']['cancel_requests'] = fail
    await store.request_cancel(SERVICE, 'task')
    await beats_on(store, replica.session.id)
    assert not ears.canceled
    del troubled.state['trouble']['cancel_requests']
    await until(lambda: ears.canceled)
    assert ears.canceled[0] == 'task'
    assert lease.state is LeaseState.RUNNING


async def test_closing_is_bounded_when_the_database_hangs(store, caplog):
    troubled = Troubled(store)
    replica = Replica(troubled, SETTINGS, SERVICE, listener=Ears())
    await replica.start()
    release = threading.Event()

    async def hang():
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    troubled.state['trouble'] = {'renew': hang, 'close_session': hang}
    async with asyncio.timeout(20):
        await replica.close(timeout=0.2)
    release.set()
    assert 'gave no answer for 0.2 s' in caplog.text


def stumbling(left: int) -> Callable[[], Awaitable[None]]:
    """Returns a trouble that passes after so many calls."""

    async def stumble() -> None:
        nonlocal left
        if left:
            left -= 1
            raise OSError('connection lost')

    return stumble


async def test_a_session_is_closed_though_the_database_stumbles(store):
    """Others would wait for the time to live, and count an attempt."""
    troubled = Troubled(store)
    replica = Replica(troubled, SETTINGS, SERVICE, listener=Ears())
    await replica.start()
    session = replica.session
    troubled.state['trouble']['close_session'] = stumbling(2)
    await replica.close(timeout=10)
    assert await state_of(store, session.id) is SessionState.CLOSED


async def test_a_hand_over_lands_though_the_database_stumbles(store, start):
    troubled = Troubled(store)
    replica = await start(troubled)
    lease = await acquire(store, replica.session.id)
    troubled.state['trouble']['hand_over'] = stumbling(2)
    await replica.hand_over({lease.task_id: lease.token}, timeout=10)
    handed = await store.get(SERVICE, lease.task_id)
    assert await state_of(store, handed.session_id) is SessionState.CLOSED


async def test_a_hand_over_that_cannot_land_is_told(store, start):
    troubled = Troubled(store)
    replica = await start(troubled)

    async def fail():
        raise OSError('connection lost')

    troubled.state['trouble']['hand_over'] = fail
    with pytest.raises(OSError, match='connection lost'):
        await replica.hand_over({'task': 1}, timeout=0.1)


async def test_a_fork_takes_no_heartbeat_along(database):
    """In a process of its own, which forks in the middle of a statement."""
    import subprocess
    import sys

    code = """
import asyncio, os, sys, threading, time
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from a2a_lease import DatabaseLeaseStore, LeaseSettings
from a2a_lease.replica.replica import Replica

class Ears:
    def session_lost(self, session): pass
    def turns_canceled(self, leases): pass
    def sessions_ended(self, sessions): pass

settings = LeaseSettings(ttl=20, heartbeat_interval=.1, sweep_interval=.1)
engine = create_async_engine(sys.argv[1])
store = DatabaseLeaseStore(engine)
replica = Replica(store, settings, 'forked', listener=Ears())
armed, steps, inside = threading.Event(), [], threading.Event()

def step():
    if armed.is_set() and not inside.is_set():
        steps.append(1)
        if len(steps) == 6:  # By then a statement has taken its lock.
            inside.set()
            time.sleep(0.5)

@event.listens_for(engine.sync_engine, 'connect')
def connected(connection, record):
    if engine.dialect.name == 'sqlite':
        connection.run_async(lambda c: c.set_progress_handler(step, 1))
    else:
        inside.set()

async def parent():
    await store.initialize()
    await replica.start()
    await engine.dispose()
    mine = replica.session.id
    armed.set()
    assert await asyncio.to_thread(inside.wait, 30)
    pid = os.fork()
    if pid == 0:
        os._exit(run_child(mine))
    status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert status[1] == 0, status
    assert not replica.session.ended
    sessions = {s.id: s.state for s in await store.sessions()}
    assert len(sessions) == 2, sessions
    assert sessions[mine] == 'open', sessions
    await replica.close(timeout=5)
    await engine.dispose()

def run_child(parents):
    async def child():
        assert not replica.started
        await replica.start()
        assert replica.session.id != parents
        await replica.close(timeout=5)
        await engine.dispose()
    asyncio.events._set_running_loop(None)
    try:
        asyncio.run(child())
    except BaseException:
        import traceback
        traceback.print_exc()
        return 1
    return 0

asyncio.run(parent())
"""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, '-c', code, database.url],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def test_a_store_that_cannot_be_detached_is_said():
    class Attached(InMemoryLeaseStore):
        def detached(self):
            raise RuntimeError('cannot be detached')

    replica = Replica(Attached(), SETTINGS, SERVICE, listener=Ears())
    with pytest.raises(RuntimeError, match='cannot be detached'):
        await asyncio.wait_for(replica.start(), 10)
