"""When a save passes unasked, when it asks, and when it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from a2a.server.cluster import ConcurrentTaskModificationError, TaskVersion

from a2a_lease import InMemoryLeaseStore
from a2a_lease.model import LeaseState
from a2a_lease.replica.session import LiveSession
from a2a_lease.testing.conformance import SERVICE, acquire, open_session
from a2a_lease.turns.hold import Hold, Loss


if TYPE_CHECKING:
    from a2a_lease.model import TaskLease


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class CountingStore(InMemoryLeaseStore):
    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.outages = 0

    async def holder(
        self, service: str, task_id: str
    ) -> tuple[TaskLease | None, bool]:
        self.looks += 1
        if self.outages:
            self.outages -= 1
            raise ConnectionResetError
        return await super().holder(service, task_id)


V1, V2, V3 = (TaskVersion(number) for number in (1, 2, 3))
MISSING = TaskVersion.MISSING


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def hold(store: CountingStore, clock: Clock) -> Hold:
    session_id = await open_session(store)
    session = LiveSession(session_id, trust=2.0, clock=clock)
    session.confirm(sent_at=0.0)
    hold = Hold(store)
    assert not hold.held
    hold.hold(await acquire(store, session_id), session)
    return hold


async def test_a_save_on_an_own_version_asks_nothing_while_beats_are_fresh(
    hold: Hold, store: CountingStore, clock: Clock
):
    await hold.permit(MISSING)
    hold.wrote(V1, terminal=False)
    clock.now = 1.9
    await hold.permit(V1)
    assert store.looks == 0


async def test_a_save_asks_when_the_last_beat_is_old(
    hold: Hold, store: CountingStore, clock: Clock
):
    hold.wrote(V1, terminal=False)
    clock.now = 2.0
    await hold.permit(V1)
    assert store.looks == 1


async def test_a_save_on_a_version_of_another_asks(
    hold: Hold, store: CountingStore
):
    hold.wrote(V1, terminal=False)
    await hold.permit(V2)
    assert store.looks == 1
    # A canceled state skips the check of the version.
    await hold.permit(V1, must_look=True)
    assert store.looks == 2


async def test_what_was_taken_over_is_refused_and_known(
    hold: Hold, store: CountingStore
):
    hold.wrote(V1, terminal=False)
    await store.fence(hold.session.id, beat=0)
    claimer = await open_session(store)
    await store.claim(
        SERVICE, session_id=claimer, limit=1, ended=[hold.session.id]
    )
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V2)
    assert hold.loss is Loss.TAKEN_OVER
    looks = store.looks
    for version in (V1, V3, MISSING):
        with pytest.raises(ConcurrentTaskModificationError):
            await hold.permit(version)
    assert store.looks == looks


async def test_what_nobody_claimed_yet_is_refused_too(
    hold: Hold, store: CountingStore
):
    """Its session is over; whoever claims it reads the task first."""
    hold.wrote(V1, terminal=False)
    await store.fence(hold.session.id, beat=0)
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V2)
    assert hold.loss is Loss.TAKEN_OVER


async def test_what_was_canceled_elsewhere_is_refused(
    hold: Hold, store: CountingStore
):
    await store.request_cancel(SERVICE, 'task')
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V2)
    assert hold.loss is Loss.CANCELED


async def test_what_was_released_is_refused(hold: Hold, store: CountingStore):
    await store.release(SERVICE, 'task', token=1)
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V2)


async def test_a_save_on_a_terminal_version_is_refused(hold: Hold):
    hold.wrote(V1, terminal=True)
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V1)
    hold.read(V3, terminal=True)
    with pytest.raises(ConcurrentTaskModificationError):
        await hold.permit(V3)
    assert hold.loss is None


async def test_a_session_that_ended_is_not_fresh(
    hold: Hold, store: CountingStore
):
    hold.wrote(V1, terminal=False)
    hold.session.ended = True
    await hold.permit(V1)
    assert store.looks == 1


async def test_looking_outlasts_an_outage(hold: Hold, store: CountingStore):
    store.outages = 2
    await hold.permit(V2)
    assert store.looks == 3
    # A parked or idle lease is still its own.
    await store.move(SERVICE, 'task', token=1, state=LeaseState.PARKED)
    await hold.permit(V2)


async def test_nothing_is_held_before_the_acquire(store: CountingStore):
    hold = Hold(store)
    with pytest.raises(RuntimeError, match='No lease'):
        _ = hold.lease
    with pytest.raises(RuntimeError, match='No lease'):
        _ = hold.session
