"""A save that was permitted in time and lands too late leaves no orphan."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest

from a2a_lease import current_lease
from a2a_lease.model import LeaseState, SessionState
from support.inprocess import (
    AUTH_REQUIRED,
    COMPLETED,
    FAILED,
    SETTINGS,
    WORKING,
    Desk,
    call,
    message,
    slow_replica,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import InProcessReplica, Service


async def _fence(service: Service, session_id: str) -> None:
    async def fenced():
        beats = {s.id: s.beat for s in await service.leases.sessions()}
        return await service.leases.fence(session_id, beat=beats[session_id])

    await until(fenced)


async def _noticed(replica: InProcessReplica, session_id: str) -> None:
    """Waits until a replica knows that it was declared dead.

    One that is declared dead after its time to live has no fresh beat; one
    that a test declares dead may have.
    """

    async def noticed():
        session = replica.handler._replica.session
        return session is not None and session.id != session_id

    await until(noticed)


async def _work(desk: Desk) -> None:
    await desk.task(WORKING)
    await asyncio.Event().wait()


async def test_a_first_save_that_lands_after_recovery(service: Service):
    """Recovery found no task, and had nothing to write."""
    old, slow = await slow_replica(service, _work, WORKING)
    new = await service.replica(_work)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await slow.entered.wait()
    [lease] = await service.leases.leases()
    await _fence(service, lease.session_id)

    async def recovered():
        return not await service.leases.leases()

    await until(recovered)
    await _noticed(old, lease.session_id)
    slow.go_on.set()

    async def failed():
        return await new.state(lease.task_id) == FAILED

    await until(failed)
    await until(recovered)
    assert (await sending).status.state == FAILED


async def test_a_save_out_of_a_pause_that_lands_after_recovery(
    service: Service,
):
    """Recovery found a paused task, and let it be."""

    async def goes_on(desk: Desk) -> None:
        await desk.task()
        await desk.status(AUTH_REQUIRED)
        await desk.status(WORKING)
        await asyncio.Event().wait()

    old, slow = await slow_replica(service, goes_on, WORKING)
    new = await service.replica(_work)
    paused = await old.handler.on_message_send(message(), call())
    assert paused.status.state == AUTH_REQUIRED
    await slow.entered.wait()
    lease = await old.lease(paused.id)
    await _fence(service, lease.session_id)

    async def freed():
        lease = await old.lease(paused.id)
        return lease is not None and lease.state is LeaseState.FREE

    await until(freed)
    await _noticed(old, lease.session_id)
    slow.go_on.set()

    async def failed():
        return await new.state(paused.id) == FAILED

    await until(failed)


async def test_a_drain_waits_for_a_save_under_way(service: Service):
    old, slow = await slow_replica(
        service,
        _work,
        WORKING,
        settings=dataclasses.replace(SETTINGS, stop_timeout=15),
    )
    new = await service.replica(_work)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await slow.entered.wait()
    [lease] = await service.leases.leases()
    draining = asyncio.ensure_future(old.handler.drain(timeout=0))
    await asyncio.wait({draining}, timeout=0.5)
    assert not draining.done()
    slow.go_on.set()
    await draining

    async def failed():
        return await new.state(lease.task_id) == FAILED

    await until(failed)
    await asyncio.wait({sending})
    sending.exception()


async def test_a_drain_hands_over_nothing_before_a_save_has_ended(
    service: Service, caplog: pytest.LogCaptureFixture
):
    old, slow = await slow_replica(
        service,
        _work,
        WORKING,
        settings=dataclasses.replace(SETTINGS, stop_timeout=0.2),
    )
    await service.replica(_work)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await slow.entered.wait()
    [lease] = await service.leases.leases()
    await old.handler.drain(timeout=0)
    assert 'a save is under way' in caplog.text
    states = {s.id: s.state for s in await service.leases.sessions()}
    assert states[lease.session_id] is SessionState.OPEN
    assert await old.lease(lease.task_id) == lease
    slow.go_on.set()
    await asyncio.wait({sending})
    sending.exception()
    await old.handler._replica.close(timeout=5)


@pytest.mark.parametrize('taken', [True, False])
async def test_what_an_agent_left_running_saves_under_its_lease_only(
    service: Service, taken: bool
):
    """It returned with its task WORKING, and something of it goes on."""
    later, left, lost = asyncio.Event(), [], []
    at_last = asyncio.Event()

    async def returns(desk: Desk) -> None:
        lost.append(current_lease().lost)
        await desk.task()
        await desk.status(WORKING)

        async def work() -> None:
            await later.wait()
            await desk.artifact('late')
            await desk.status(COMPLETED)

        left.append(asyncio.create_task(work()))

    async def waits(desk: Desk) -> None:
        await at_last.wait()

    old = await service.replica(returns)
    new = await service.replica(waits)
    task = await old.handler.on_message_send(message(), call())

    async def idle():
        lease = await old.lease(task.id)
        return lease is not None and lease.state is LeaseState.IDLE

    await until(idle)
    if taken:
        sending = asyncio.ensure_future(
            new.handler.on_message_send(message(task=task), call())
        )

        async def acquired():
            return (await old.lease(task.id)).token == 2

        await until(acquired)
    later.set()
    await left[0]
    if taken:
        async with asyncio.timeout(10):
            await lost[0].wait()
        stored = await new.stored(task.id)
        assert stored.status.state == WORKING
        assert not stored.artifacts
        at_last.set()
        await sending
        return

    async def gone():
        return not await service.leases.leases()

    await until(gone)
    assert await new.state(task.id) == COMPLETED
