"""What every lease store must do, as tests for pytest.

Subclass it, provide the fixture `store`, and run it with pytest and
pytest-asyncio in its auto mode:

    class TestMyStore(LeaseStoreConformance):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)
            await store.initialize()
            yield store
            await store.close()
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from a2a_lease.errors import LeaseConflictError, SessionEndedError
from a2a_lease.model import (
    LeaseRequest,
    LeaseState,
    SessionState,
    TaskMark,
)


if TYPE_CHECKING:
    from a2a_lease.model import TaskLease
    from a2a_lease.stores.lease_store import LeaseStore


SERVICE = 'conformance'
PAUSED = TaskMark(state='TASK_STATE_INPUT_REQUIRED', timestamp='17')


async def open_session(
    store: LeaseStore, session_id: str | None = None, *, service: str = SERVICE
) -> str:
    """Opens a session with a random id, or the given one."""
    session_id = session_id or uuid.uuid4().hex
    await store.open_session(
        session_id=session_id,
        service=service,
        ttl=20.0,
        heartbeat_interval=1.0,
        label='host:1',
    )
    return session_id


async def acquire(
    store: LeaseStore,
    session_id: str,
    task_id: str = 'task',
    *,
    expected_token: int | None = None,
    **changes: Any,  # noqa: ANN401
) -> TaskLease:
    """Acquires a lease with values that tell fields apart."""
    values: dict[str, Any] = {
        'service': SERVICE,
        'task_id': task_id,
        'context_id': f'context of {task_id}',
        'owner': 'ada',
        'session_id': session_id,
        'acquire_id': uuid.uuid4().hex,
        'expected_token': expected_token,
        'before': None,
        'call_context': b'\0\xff call context',
        **changes,
    }
    return await store.acquire(LeaseRequest(**values))


class LeaseStoreConformance:
    """Tests of the whole `LeaseStore` interface."""

    # Sessions

    async def test_a_session_is_open_and_renewed(
        self, store: LeaseStore
    ) -> None:
        """A beat raises the counter by a write of its own."""
        session_id = await open_session(store)
        await open_session(store, session_id)  # An answer was lost.
        first = await store.renew(session_id)
        second = await store.renew(session_id)
        assert first is not None
        assert second is not None
        assert second.beat == first.beat + 1
        assert second.notices == first.notices
        [session] = await store.sessions(SERVICE)
        assert session.id == session_id
        assert session.service == SERVICE
        assert session.state is SessionState.OPEN
        assert session.beat == second.beat
        assert session.ttl == 20.0  # noqa: PLR2004
        assert session.label == 'host:1'
        assert session.started_at <= session.renewed_at < session.expires_at
        assert session.ended_at is None

    async def test_a_session_ends_once(self, store: LeaseStore) -> None:
        """Closed and fenced are for good."""
        closed, fenced = await open_session(store), await open_session(store)
        assert await store.close_session(closed)
        assert await store.fence(fenced, beat=0)
        for session_id in (closed, fenced):
            assert not await store.close_session(session_id)
            assert not await store.fence(session_id, beat=0)
            assert await store.renew(session_id) is None
            await open_session(store, session_id)
            assert await store.renew(session_id) is None
        states = {s.id: s.state for s in await store.sessions(SERVICE)}
        assert states == {
            closed: SessionState.CLOSED,
            fenced: SessionState.FENCED,
        }
        for session in await store.sessions(SERVICE):
            assert session.ended_at is not None

    async def test_a_missing_session_is_not_made_by_a_beat(
        self, store: LeaseStore
    ) -> None:
        """A beat for a row that is gone tells so."""
        assert await store.renew('never opened') is None
        assert not await store.close_session('never opened')
        assert not await store.fence('never opened', beat=0)
        assert not await store.sessions()

    async def test_whoever_beat_meanwhile_is_not_fenced(
        self, store: LeaseStore
    ) -> None:
        """Fencing compares the very counter that was seen."""
        session_id = await open_session(store)
        renewal = await store.renew(session_id)
        assert renewal is not None
        assert not await store.fence(session_id, beat=renewal.beat - 1)
        assert not await store.fence(session_id, beat=renewal.beat + 1)
        assert await store.renew(session_id) is not None
        assert not await store.fence(session_id, beat=renewal.beat)

    async def test_only_one_of_many_fences(self, store: LeaseStore) -> None:
        """The one who fenced knows it."""
        session_id = await open_session(store)
        fenced = await asyncio.gather(
            *(store.fence(session_id, beat=0) for _ in range(8))
        )
        # On a busy database some may give up, and all may have to look again.
        if not any(fenced):
            fenced = [await store.fence(session_id, beat=0)]
        assert sum(fenced) == 1

    async def test_a_look_sees_the_next_three_on_the_ring(
        self, store: LeaseStore
    ) -> None:
        """It starts again after the last, and leaves out the looker."""
        for session_id in 'acegi':
            await open_session(store, session_id)
        await open_session(store, 'b', service='another')

        async def seen(session_id: str, **options: Any) -> set[str]:  # noqa: ANN401
            options = {'everyone': False, **options}
            look = await store.look(SERVICE, session_id, **options)
            assert not look.ended
            return {session.id for session in look.open}

        assert await seen('a') == {'c', 'e', 'g'}
        assert await seen('e') == {'g', 'i', 'a'}
        assert await seen('i') == {'a', 'c', 'e'}
        assert await seen('a', also=['i']) == {'c', 'e', 'g', 'i'}
        assert await seen('a', also=['b', 'x']) == {'c', 'e', 'g'}
        assert await seen('a', everyone=True) == {'c', 'e', 'g', 'i'}
        await store.close_session('c')
        look = await store.look(SERVICE, 'a', everyone=False)
        assert {session.id for session in look.open} == {'e', 'g', 'i'}
        assert {session.id for session in look.ended} == {'c'}

    async def test_an_ended_session_is_seen_until_it_holds_nothing(
        self, store: LeaseStore
    ) -> None:
        """Then it is forgotten, and pruned by age."""
        me, dead = await open_session(store), await open_session(store)
        lease = await acquire(store, dead)
        assert not await store.forget_session(dead)
        await store.fence(dead, beat=0)
        assert not await store.forget_session(dead)
        look = await store.look(SERVICE, me, everyone=False)
        assert [session.id for session in look.ended] == [dead]
        assert await store.prune_sessions(SERVICE, older_than=0.0) == 0
        await store.release(SERVICE, 'task', token=lease.token)
        assert await store.forget_session(dead)
        look = await store.look(SERVICE, me, everyone=True)
        assert not look.ended
        assert await store.prune_sessions(SERVICE, older_than=3600.0) == 0
        assert await store.prune_sessions('another', older_than=-1.0) == 0
        assert await store.prune_sessions(SERVICE, older_than=-1.0) == 1
        assert [s.id for s in await store.sessions()] == [me]

    # Leases

    async def test_a_lease_is_taken_whole(self, store: LeaseStore) -> None:
        """What was asked for is what is stored."""
        session_id = await open_session(store)
        taken = await acquire(store, session_id, before=PAUSED)
        assert taken == await store.get(SERVICE, 'task')
        assert taken.context_id == 'context of task'
        assert taken.owner == 'ada'
        assert taken.session_id == session_id
        assert taken.token == 1
        assert taken.attempt == 1
        assert taken.state is LeaseState.RUNNING
        assert taken.before == PAUSED
        assert taken.task_stored
        assert not taken.cancel_requested
        assert taken.call_context == b'\0\xff call context'
        new = await acquire(store, session_id, 'new')
        assert new.before is None
        assert not new.task_stored
        assert await store.get('another', 'task') is None
        assert list(await store.leases(SERVICE)) == [new, taken]
        assert list(await store.leases(limit=1)) == [new]
        assert not await store.leases('another')

    async def test_an_acquire_recognises_itself(
        self, store: LeaseStore
    ) -> None:
        """Its answer may have been lost."""
        session_id = await open_session(store)
        first = await acquire(store, session_id, acquire_id='mine')
        assert await acquire(store, session_id, acquire_id='mine') == first
        with pytest.raises(LeaseConflictError):
            await acquire(store, session_id, acquire_id='other')
        await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        second = await acquire(
            store, session_id, acquire_id='next', expected_token=1
        )
        again = await acquire(
            store, session_id, acquire_id='next', expected_token=1
        )
        assert again == second
        assert second.token == 2  # noqa: PLR2004

    async def test_a_session_that_ended_acquires_nothing(
        self, store: LeaseStore
    ) -> None:
        """Neither a new row nor one that is there."""
        alive, dead = await open_session(store), await open_session(store)
        await acquire(store, alive)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        await store.close_session(dead)
        for session_id in (dead, 'never opened'):
            with pytest.raises(SessionEndedError):
                await acquire(store, session_id, 'new')
            with pytest.raises(SessionEndedError):
                await acquire(store, session_id, expected_token=1)
        assert await store.get(SERVICE, 'new') is None

    async def test_who_may_acquire(self, store: LeaseStore) -> None:
        """Held leases of open sessions are not taken; others are at once."""
        alive, other = await open_session(store), await open_session(store)
        assert await store.holder(SERVICE, 'task') == (None, True)
        lease = await acquire(store, alive)
        for state in (
            LeaseState.RUNNING,
            LeaseState.PARKED,
            LeaseState.RECOVERING,
        ):
            assert await store.move(SERVICE, 'task', token=1, state=state)
            held, may = await store.holder(SERVICE, 'task')
            assert held is not None
            assert held.state is state
            assert not may
            with pytest.raises(LeaseConflictError):
                await acquire(store, other, expected_token=1)
        token = lease.token
        for state in (LeaseState.IDLE, LeaseState.FREE):
            assert await store.move(SERVICE, 'task', token=token, state=state)
            held, may = await store.holder(SERVICE, 'task')
            assert may
            assert held is not None
            assert (held.session_id is None) == (state is LeaseState.FREE)
            token = (await acquire(store, other, expected_token=token)).token
        await store.fence(other, beat=0)
        assert (await store.holder(SERVICE, 'task'))[1]
        taken = await acquire(store, alive, expected_token=token)
        assert taken.token == token + 1
        assert taken.attempt == 1

    async def test_a_token_that_moved_on_is_a_conflict(
        self, store: LeaseStore
    ) -> None:
        """Whoever looked before somebody else acquired must look again."""
        session_id = await open_session(store)
        await acquire(store, session_id)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        await acquire(store, session_id, expected_token=1)
        await store.move(SERVICE, 'task', token=2, state=LeaseState.FREE)
        for stale in (None, 1, 3):
            with pytest.raises(LeaseConflictError):
                await acquire(store, session_id, expected_token=stale)

    async def test_only_one_of_many_acquires(self, store: LeaseStore) -> None:
        """For a new row and for one that is there."""
        sessions = [await open_session(store) for _ in range(6)]
        for expected in (None, 1):
            results = await asyncio.gather(
                *(
                    acquire(store, session_id, expected_token=expected)
                    for session_id in sessions
                ),
                return_exceptions=True,
            )
            won = [r for r in results if not isinstance(r, BaseException)]
            lost = [r for r in results if isinstance(r, BaseException)]
            assert len(won) == 1
            assert all(isinstance(r, LeaseConflictError) for r in lost)
            assert await store.get(SERVICE, 'task') == won[0]
            await store.move(
                SERVICE, 'task', token=won[0].token, state=LeaseState.FREE
            )

    async def test_a_stale_token_changes_nothing(
        self, store: LeaseStore
    ) -> None:
        """Whoever lost a lease cannot touch its successor."""
        session_id = await open_session(store)
        await acquire(store, session_id)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        lease = await acquire(store, session_id, expected_token=1)
        for state in LeaseState:
            assert not await store.move(SERVICE, 'task', token=1, state=state)
        assert not await store.release(SERVICE, 'task', token=1)
        assert (
            await store.reclaim(SERVICE, 'task', token=1, session_id=session_id)
            is None
        )
        await store.note_stored(SERVICE, {'task': 1})
        await store.hand_over(SERVICE, {'task': 1}, session_id='hand-over')
        assert await store.get(SERVICE, 'task') == lease
        assert await store.release(SERVICE, 'task', token=2)
        assert await store.get(SERVICE, 'task') is None
        assert not await store.release(SERVICE, 'task', token=2)

    async def test_a_freed_lease_is_not_taken_up_again(
        self, store: LeaseStore
    ) -> None:
        """It keeps its token, which its late holder still knows."""
        dead, me = await open_session(store), await open_session(store)
        await acquire(store, dead)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.PARKED)
        await store.fence(dead, beat=0)
        await store.claim(SERVICE, session_id=me, limit=9, ended=[dead])
        freed = await store.get(SERVICE, 'task')
        assert freed is not None
        assert freed.state is LeaseState.FREE
        for state in LeaseState:
            moved = await store.move(SERVICE, 'task', token=1, state=state)
            assert moved == (state is LeaseState.FREE)
        assert await store.get(SERVICE, 'task') == freed

    async def test_stored_tasks_are_noted(self, store: LeaseStore) -> None:
        """For many leases at once."""
        session_id = await open_session(store)
        for task_id in ('one', 'two', 'three'):
            await acquire(store, session_id, task_id)
        await store.note_stored(SERVICE, {'one': 1, 'two': 9, 'none': 1})
        stored = {x.task_id: x.task_stored for x in await store.leases()}
        assert stored == {'one': True, 'two': False, 'three': False}

    async def test_a_holder_is_told_of_a_cancel(
        self, store: LeaseStore
    ) -> None:
        """By a counter that its next beat brings along."""
        session_id = await open_session(store)
        assert not await store.request_cancel(SERVICE, 'task')
        await acquire(store, session_id)
        before = await store.renew(session_id)
        assert not await store.cancel_requests(SERVICE, session_id)
        assert await store.request_cancel(SERVICE, 'task')
        after = await store.renew(session_id)
        assert before is not None
        assert after is not None
        assert after.notices > before.notices
        [asked] = await store.cancel_requests(SERVICE, session_id)
        assert asked.task_id == 'task'
        assert asked.cancel_requested
        # It must tell of the cancel before it lets go.
        for state in (LeaseState.FREE, LeaseState.IDLE):
            assert not await store.move(SERVICE, 'task', token=1, state=state)
        assert await store.get(SERVICE, 'task') == asked
        assert await store.release(SERVICE, 'task', token=1)

    @pytest.mark.parametrize('state', [LeaseState.FREE, LeaseState.IDLE])
    async def test_nobody_is_told_of_a_cancel_who_does_not_work(
        self, store: LeaseStore, state: LeaseState
    ) -> None:
        """Whoever cancels must tell of it."""
        session_id = await open_session(store)
        await acquire(store, session_id)
        await store.move(SERVICE, 'task', token=1, state=state)
        assert not await store.request_cancel(SERVICE, 'task')
        again = await acquire(store, session_id, expected_token=1)
        assert not again.cancel_requested

    async def test_a_cancel_that_nobody_told_of_is_claimed(
        self, store: LeaseStore
    ) -> None:
        """Even of a parked lease, which would be dropped otherwise."""
        me, dead = await open_session(store), await open_session(store)
        await acquire(store, dead)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.PARKED)
        assert await store.request_cancel(SERVICE, 'task')
        await store.fence(dead, beat=0)
        [claimed] = await store.claim(
            SERVICE, session_id=me, limit=9, ended=[dead]
        )
        assert claimed.previous_state is LeaseState.PARKED
        assert claimed.lease.state is LeaseState.RECOVERING
        assert claimed.lease.attempt == 1

    # Claims

    async def test_a_claim_takes_what_ended_sessions_left(
        self, store: LeaseStore
    ) -> None:
        """By how the session ended and what the lease was doing."""
        me, alive = await open_session(store), await open_session(store)
        fenced, closed = await open_session(store), await open_session(store)
        for session_id, name in ((fenced, 'f'), (closed, 'c'), (alive, 'a')):
            for state in LeaseState:
                task_id = f'{name} {state.value}'
                await acquire(store, session_id, task_id)
                await store.move(SERVICE, task_id, token=1, state=state)
        await store.fence(fenced, beat=0)
        await store.close_session(closed)
        claimed = await store.claim(
            SERVICE, session_id=me, limit=100, ended=[fenced, closed, alive]
        )
        found = {c.lease.task_id: c for c in claimed}
        sessions = {s.id: s for s in await store.sessions()}
        sessions |= {'f': sessions[fenced], 'c': sessions[closed]}
        assert set(found) == {
            f'{name} {state}'
            for name in 'fc'
            for state in ('running', 'idle', 'recovering')
        }
        for task_id, claim in found.items():
            name, state = task_id.split()
            assert claim.lease == await store.get(SERVICE, task_id)
            assert claim.lease.session_id == me
            assert claim.lease.token == 2  # noqa: PLR2004
            assert claim.lease.state is LeaseState.RECOVERING
            assert claim.previous_state.value == state
            assert claim.previous_session_id == (
                fenced if name == 'f' else closed
            )
            assert claim.previous_session == sessions[name]
            assert claim.previous_closed is (name == 'c')
            crashed = task_id == 'f running'
            assert claim.lease.attempt == (2 if crashed else 1)
        for name in 'fc':
            parked = await store.get(SERVICE, f'{name} parked')
            assert parked is not None
            assert parked.state is LeaseState.FREE
            assert parked.session_id is None
            assert parked.token == 1
        for state in LeaseState:
            lease = await store.get(SERVICE, f'a {state.value}')
            assert lease is not None
            assert lease.state is state
        assert await store.forget_session(fenced)
        assert await store.forget_session(closed)

    async def test_a_claim_without_ids_finds_all_that_is_left(
        self, store: LeaseStore
    ) -> None:
        """Even that of sessions that are missing or were forgotten."""
        me, dead = await open_session(store), await open_session(store)
        late, alive = await open_session(store), await open_session(store)
        await acquire(store, dead, 'left')
        await acquire(store, alive, 'held')
        await store.fence(dead, beat=0)
        await store.fence(late, beat=0)
        assert await store.forget_session(late)
        await store.prune_sessions(SERVICE, older_than=-1.0)
        # Its acquire committed after everybody had looked.
        await store.hand_over(SERVICE, {'held': 1}, session_id='gone')
        claimed = await store.claim(
            SERVICE, session_id=me, limit=100, ended=None
        )
        assert {c.lease.task_id for c in claimed} == {'left', 'held'}
        sessions = {s.id: s for s in await store.sessions()}
        for claim in claimed:
            assert claim.previous_session == sessions[claim.previous_session_id]
        assert not await store.claim(
            SERVICE, session_id=me, limit=100, ended=None
        )

    async def test_a_claim_keeps_to_its_limit_and_service(
        self, store: LeaseStore
    ) -> None:
        """The rest is left to others."""
        me, dead = await open_session(store), await open_session(store)
        other = await open_session(store, service='another')
        for number in range(5):
            await acquire(store, dead, f'task {number}')
        await store.fence(dead, beat=0)
        claimed = await store.claim(
            SERVICE, session_id=me, limit=3, ended=[dead]
        )
        assert len(claimed) == 3  # noqa: PLR2004
        for ended in ([dead], None):
            assert not await store.claim(
                'another', session_id=other, limit=9, ended=ended
            )
        rest = await store.claim(SERVICE, session_id=me, limit=3, ended=[dead])
        assert len(rest) == 2  # noqa: PLR2004
        assert not await store.claim(SERVICE, session_id=me, limit=3, ended=[])

    async def test_a_claimer_that_ended_claims_nothing(
        self, store: LeaseStore
    ) -> None:
        """It must open a new session first."""
        me, dead = await open_session(store), await open_session(store)
        await acquire(store, dead)
        await store.fence(dead, beat=0)
        await store.close_session(me)
        with pytest.raises(SessionEndedError):
            await store.claim(SERVICE, session_id=me, limit=9, ended=[dead])
        lease = await store.get(SERVICE, 'task')
        assert lease is not None
        assert lease.session_id == dead

    async def test_each_lease_is_claimed_by_one(
        self, store: LeaseStore
    ) -> None:
        """However many claim at the same time."""
        dead = await open_session(store)
        count = 30
        for number in range(count):
            await acquire(store, dead, f'task {number:02}')
        claimers = [await open_session(store) for _ in range(5)]
        await store.fence(dead, beat=0)

        async def claim_all(session_id: str) -> list[str]:
            mine: list[str] = []
            empty = 0
            while empty < 2:  # noqa: PLR2004
                claimed = await store.claim(
                    SERVICE, session_id=session_id, limit=4, ended=[dead]
                )
                mine += [c.lease.task_id for c in claimed]
                empty = 0 if claimed else empty + 1
            return mine

        parts = await asyncio.gather(*(claim_all(c) for c in claimers))
        all_claimed = [task_id for part in parts for task_id in part]
        assert sorted(all_claimed) == [f'task {n:02}' for n in range(count)]
        for lease in await store.leases(SERVICE):
            assert lease.token == 2  # noqa: PLR2004
            assert lease.session_id in claimers

    async def test_a_dead_turn_is_reclaimed_by_its_own_replica(
        self, store: LeaseStore
    ) -> None:
        """With a new token, and one attempt more."""
        me, other = await open_session(store), await open_session(store)
        await acquire(store, me)
        assert (
            await store.reclaim(SERVICE, 'task', token=1, session_id=other)
            is None
        )
        lease = await store.reclaim(SERVICE, 'task', token=1, session_id=me)
        assert lease is not None
        assert lease == await store.get(SERVICE, 'task')
        assert lease.token == 2  # noqa: PLR2004
        assert lease.attempt == 2  # noqa: PLR2004
        assert lease.state is LeaseState.RECOVERING
        assert lease.session_id == me
        # As after an answer that was lost.
        again = await store.reclaim(SERVICE, 'task', token=1, session_id=me)
        assert again == lease
        assert (
            await store.reclaim(SERVICE, 'task', token=1, session_id=other)
            is None
        )
        assert await store.get(SERVICE, 'task') == lease

    async def test_a_session_finds_what_it_has_claimed(
        self, store: LeaseStore
    ) -> None:
        """The answer to its claim may have been lost."""
        me, other = await open_session(store), await open_session(store)
        fenced, closed = await open_session(store), await open_session(store)
        await acquire(store, fenced, 'a crashed')
        await acquire(store, closed, 'b idle')
        await store.move(SERVICE, 'b idle', token=1, state=LeaseState.IDLE)
        await store.fence(fenced, beat=0)
        await store.close_session(closed)
        assert not await store.claimed_by(SERVICE, me)
        claimed = await store.claim(
            SERVICE, session_id=me, limit=9, ended=[fenced, closed]
        )
        assert [c.given_back for c in claimed] == [False, True]
        assert list(await store.claimed_by(SERVICE, me)) == [
            dataclasses.replace(c, given_back=False) for c in claimed
        ]
        assert not await store.claimed_by(SERVICE, other)
        assert not await store.claimed_by('another', me)

        await acquire(store, me, 'c died here')
        await store.reclaim(SERVICE, 'c died here', token=1, session_id=me)
        [crashed, idle, died] = await store.claimed_by(SERVICE, me)
        assert died.lease == await store.get(SERVICE, 'c died here')
        assert died.previous_session_id == me
        assert died.previous_state is LeaseState.RUNNING
        assert not died.previous_closed
        assert crashed.previous_session_id == fenced
        assert not crashed.previous_closed
        assert idle.previous_state is LeaseState.IDLE
        assert idle.previous_closed

        await store.move(
            SERVICE, 'a crashed', token=2, state=LeaseState.RUNNING
        )
        await store.release(SERVICE, 'b idle', token=2)
        [still] = await store.claimed_by(SERVICE, me)
        assert still == died

    @pytest.mark.parametrize('given_back', [False, True])
    @pytest.mark.parametrize('forgotten', [False, True])
    async def test_a_recovery_in_between_hides_nothing(
        self, store: LeaseStore, *, forgotten: bool, given_back: bool
    ) -> None:
        """How a turn ended is known though its session is forgotten."""
        me, between = await open_session(store), await open_session(store)
        closed = await open_session(store)
        await acquire(store, closed)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.IDLE)
        await store.close_session(closed)
        ended = [session.id for session in await store.sessions()]
        await store.claim(SERVICE, session_id=between, limit=9, ended=[closed])
        if forgotten:
            assert await store.forget_session(closed)
            await store.prune_sessions(SERVICE, older_than=-1)
        if given_back:
            await store.close_session(between)
        else:
            await store.fence(between, beat=0)
        for find in (store.claim, None):
            [claimed] = (
                await find(SERVICE, session_id=me, limit=9, ended=ended)
                if find is not None
                else await store.claimed_by(SERVICE, me)
            )
            assert claimed.lease == await store.get(SERVICE, 'task')
            assert claimed.lease.attempt == 1
            assert claimed.previous_session_id == closed
            assert claimed.previous_state is LeaseState.IDLE
            assert claimed.previous_closed
            assert (claimed.previous_session is None) is forgotten
            if find is not None:
                assert claimed.given_back is given_back

    async def test_leases_are_handed_over_while_their_session_lives(
        self, store: LeaseStore
    ) -> None:
        """They are claimed at once, and no attempt is counted."""
        me, leaving = await open_session(store), await open_session(store)
        await acquire(store, leaving, 'stopped')
        await acquire(store, leaving, 'stuck')
        for _ in range(2):  # As after an answer that was lost.
            await store.hand_over(
                SERVICE, {'stopped': 1}, session_id='hand-over'
            )
        look = await store.look(SERVICE, me, everyone=True)
        assert [session.id for session in look.ended] == ['hand-over']
        assert [session.id for session in look.open] == [leaving]
        [claimed] = await store.claim(
            SERVICE, session_id=me, limit=9, ended=['hand-over']
        )
        assert claimed.lease.task_id == 'stopped'
        assert claimed.lease.attempt == 1
        assert claimed.previous_session is not None
        assert claimed.previous_session.state is SessionState.CLOSED

    async def test_a_free_lease_is_not_handed_over(
        self, store: LeaseStore
    ) -> None:
        """The session that it went to would never be forgotten."""
        leaving = await open_session(store)
        await acquire(store, leaving)
        await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        await store.hand_over(SERVICE, {'task': 1}, session_id='hand-over')
        lease = await store.get(SERVICE, 'task')
        assert lease is not None
        assert lease.session_id is None
        assert await store.forget_session('hand-over')

    # Another attempt

    async def test_a_turn_is_kept_for_another_attempt(
        self, store: LeaseStore
    ) -> None:
        """With its checkpoint, through claims, for the current token only."""
        dead, me = await open_session(store), await open_session(store)
        none = await acquire(store, me, 'never again')
        kept = await store.stored_turn(SERVICE, 'never again', token=none.token)
        assert kept is not None
        assert kept.turn is None
        assert kept.checkpoint is None
        large = bytes(range(256)) * 1000
        await acquire(store, dead, turn=large)
        for checkpoint in (b'1', b'\0\xff'):
            assert await store.save_checkpoint(
                SERVICE, 'task', token=1, checkpoint=checkpoint
            )
        await store.fence(dead, beat=0)
        await store.claim(SERVICE, session_id=me, limit=9, ended=[dead])
        assert not await store.save_checkpoint(
            SERVICE, 'task', token=1, checkpoint=b'late'
        )
        assert await store.stored_turn(SERVICE, 'task', token=1) is None
        kept = await store.stored_turn(SERVICE, 'task', token=2)
        assert kept is not None
        assert kept.turn == large
        assert kept.checkpoint == b'\0\xff'
        await store.reclaim(SERVICE, 'task', token=2, session_id=me)
        assert await store.stored_turn(SERVICE, 'task', token=3) == kept
        assert await store.stored_turn(SERVICE, 'missing', token=1) is None

    @pytest.mark.parametrize('how', ['moved', 'claimed', 'acquired'])
    async def test_what_is_kept_goes_with_the_turn(
        self, store: LeaseStore, how: str
    ) -> None:
        """A paused task keeps nothing, and the next turn what is its own."""
        dead, me = await open_session(store), await open_session(store)
        await acquire(store, dead, turn=b'said')
        await store.save_checkpoint(SERVICE, 'task', token=1, checkpoint=b'1')
        if how == 'moved':
            await store.move(SERVICE, 'task', token=1, state=LeaseState.FREE)
        else:
            await store.move(SERVICE, 'task', token=1, state=LeaseState.PARKED)
            await store.fence(dead, beat=0)
        token, turn = 1, None
        if how == 'claimed':
            await store.claim(SERVICE, session_id=me, limit=9, ended=[dead])
        if how == 'acquired':
            token, turn = 2, b'next'
            await acquire(store, me, expected_token=1, turn=turn)
        else:
            assert not await store.save_checkpoint(
                SERVICE, 'task', token=1, checkpoint=b'late'
            )
        kept = await store.stored_turn(SERVICE, 'task', token=token)
        assert kept is not None
        assert kept.turn == turn
        assert kept.checkpoint is None

    # Everything else

    async def test_text_of_all_kinds_is_kept(self, store: LeaseStore) -> None:
        """Ids that differ in case only are different ids."""
        session_id = await open_session(store)
        for text in ("o'Neill; --", 'Ünïcode 🦊', 'a' * 255, 'CASE', 'case'):
            lease = await acquire(
                store, session_id, text, owner=text, context_id=text
            )
            assert await store.get(SERVICE, text) == lease
            assert lease.owner == text
        assert len(await store.leases(SERVICE)) == 5  # noqa: PLR2004

    async def test_a_detached_store_works_on_a_thread_of_its_own(
        self, store: LeaseStore
    ) -> None:
        """On the same sessions, with an event loop of its own."""
        session_id = await open_session(store)
        beats: list[int] = []

        async def beat() -> None:
            detached = store.detached()
            try:
                for _ in range(3):
                    renewal = await detached.renew(session_id)
                    assert renewal is not None
                    beats.append(renewal.beat)
            finally:
                await detached.close()

        thread = threading.Thread(target=lambda: asyncio.run(beat()))
        thread.start()
        await asyncio.to_thread(thread.join)
        [session] = await store.sessions(SERVICE)
        assert beats == [1, 2, 3]
        assert session.beat == 3  # noqa: PLR2004
        assert await store.renew(session_id) is not None
