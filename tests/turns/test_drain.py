"""`handler.drain()`, as a preStop hook or a gRPC server calls it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
from a2a.utils.errors import InternalError

from a2a_lease import LeaseError
from a2a_lease.model import SessionState
from support.inprocess import (
    COMPLETED,
    FAILED,
    SETTINGS,
    WORKING,
    Desk,
    ScriptedAgent,
    call,
    message,
    stubbornly,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import Service


async def test_a_replica_that_drains_refuses_and_says_why(service: Service):
    works, go_on = asyncio.Event(), asyncio.Event()

    async def long(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        works.set()
        await go_on.wait()
        await desk.status(COMPLETED)

    replica = await service.replica(long)
    running = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    await works.wait()
    draining = asyncio.ensure_future(replica.handler.drain(timeout=60))
    again = asyncio.ensure_future(replica.handler.drain(timeout=0))
    with pytest.raises(InternalError, match='another replica will take it'):
        # The drain begins as soon as the loop runs it.
        await asyncio.sleep(0)
        await replica.handler.on_message_send(message(), call())
    with pytest.raises(InternalError, match='another replica will take it'):
        await anext(replica.handler.on_message_send_stream(message(), call()))
    assert not draining.done()
    go_on.set()
    assert (await running).status.state == COMPLETED
    await asyncio.gather(draining, again)
    assert replica.agent.turns == 1
    [session] = await service.leases.sessions()
    assert session.state is SessionState.CLOSED
    assert not await service.leases.leases()


async def test_a_drain_without_patience_hands_over(service: Service):
    task_ids = []

    async def endless(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        task_ids.append(desk.task_id)
        await asyncio.Event().wait()

    leaves = await service.replica(endless)
    stays = await service.replica(endless)
    running = asyncio.ensure_future(
        leaves.handler.on_message_send(message(), call())
    )

    async def stored(state: int) -> bool:
        return bool(task_ids) and await stays.state(task_ids[0]) == state

    await until(lambda: stored(WORKING))
    await leaves.handler.drain(timeout=0)
    # It is told so, unless the other replica was faster.
    [result] = await asyncio.gather(running, return_exceptions=True)
    if isinstance(result, InternalError):
        assert 'another replica takes over' in result.message
    else:
        assert result.status.state == FAILED
    await until(lambda: stored(FAILED))
    states = {s.state for s in await service.leases.sessions()}
    assert states == {SessionState.CLOSED, SessionState.OPEN}


async def test_an_agent_that_does_not_stop_does_not_hold_up_the_close(
    service: Service, caplog: pytest.LogCaptureFixture
):
    runs, release = asyncio.Event(), asyncio.Event()

    async def stubborn(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        runs.set()
        await stubbornly(release)

    replica = await service.replica(
        stubborn, settings=dataclasses.replace(SETTINGS, stop_timeout=0.2)
    )
    running = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    await runs.wait()
    [lease] = await service.leases.leases()
    await replica.handler.drain(timeout=0)
    try:
        async with asyncio.timeout(20):
            await replica.handler.aclose()
        assert 'ignores its cancellation' in caplog.text
        # Its session lives on while it runs, so that nobody runs it too.
        [session] = await service.leases.sessions()
        assert session.id == lease.session_id
        assert session.state is SessionState.OPEN
    finally:
        release.set()
        await asyncio.wait({running})
        running.exception()
        await replica.handler._replica.close(timeout=5)


async def test_a_handler_that_was_drained_starts_no_second_life(
    service: Service,
):
    replica = await service.replica(ScriptedAgent(), start=False)
    await replica.handler.start()
    await replica.handler.aclose()
    with pytest.raises(LeaseError, match='Make a new one'):
        async with replica.handler:
            pass
    with pytest.raises(InternalError, match='shutting down'):
        await replica.handler.on_message_send(message(), call())
