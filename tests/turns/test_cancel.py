"""A cancel through any replica stops the agent where it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from a2a.types.a2a_pb2 import CancelTaskRequest
from a2a.utils.errors import TaskNotCancelableError

from support.inprocess import (
    CANCELED,
    INPUT_REQUIRED,
    WORKING,
    Desk,
    ScriptedAgent,
    call,
    message,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import InProcessReplica, Service


async def _start(replica: InProcessReplica):
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )

    async def working():
        for lease in await replica.leases.leases():
            task = await replica.stored(lease.task_id)
            if task is not None and task.status.state == WORKING:
                return task
        return None

    return await until(working), sending


async def _nothing_left(service: Service) -> None:
    async def none_left():
        return not await service.leases.leases()

    await until(none_left)


async def _works(desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await asyncio.Event().wait()


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
@pytest.mark.parametrize('tells', [True, False])
async def test_a_cancel_stops_the_agent_and_is_pushed_once(
    service: Service, where: str, tells: bool
):
    agent = ScriptedAgent(_works)
    if tells:
        agent.on_cancel = lambda desk: desk.status(CANCELED)
    runs = await service.replica(agent)
    other = await service.replica(_works)
    task, sending = await _start(runs)
    through = runs if where == 'here' else other
    canceled = await through.handler.on_cancel_task(
        CancelTaskRequest(id=task.id), call()
    )
    assert canceled.status.state == CANCELED
    assert (await sending).status.state == CANCELED
    await _nothing_left(service)
    assert agent.running == 0
    assert agent.canceled == [task.id]

    async def pushed():
        return runs.pushes.states(task.id) + other.pushes.states(task.id)

    async def pushed_canceled():
        return CANCELED in await pushed()

    await until(pushed_canceled)
    assert (await pushed()).count(CANCELED) == 1
    assert await runs.state(task.id) == CANCELED


async def test_a_cancel_returns_though_the_agent_ignores_it(service: Service):
    release = asyncio.Event()

    async def stubborn(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        await desk.artifact('late')

    replica = await service.replica(stubborn)
    task, sending = await _start(replica)
    try:
        async with asyncio.timeout(15):
            canceled = await replica.handler.on_cancel_task(
                CancelTaskRequest(id=task.id), call()
            )
    except TimeoutError:
        release.set()
        raise
    assert canceled.status.state == CANCELED
    assert (await sending).status.state == CANCELED

    async def pushed():
        return CANCELED in replica.pushes.states(task.id)

    await until(pushed)
    # It still runs, so its lease stays.
    assert await replica.lease(task.id) is not None
    release.set()
    await _nothing_left(service)
    assert replica.pushes.states(task.id).count(CANCELED) == 1
    stored = await replica.stored(task.id)
    assert stored.status.state == CANCELED
    assert not stored.artifacts


async def test_a_cancel_returns_though_cancel_hangs(service: Service):
    agent = ScriptedAgent(_works)

    async def hang(desk: Desk) -> None:
        await asyncio.Event().wait()

    agent.on_cancel = hang
    replica = await service.replica(agent)
    task, sending = await _start(replica)
    canceled = await replica.handler.on_cancel_task(
        CancelTaskRequest(id=task.id), call()
    )
    assert canceled.status.state == CANCELED
    await sending
    await _nothing_left(service)
    assert agent.running == 0


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_a_paused_task_is_canceled_and_pushed(
    service: Service, where: str
):
    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    paused = await service.replica(ask)
    other = await service.replica(ask)
    task = await paused.handler.on_message_send(message(), call())
    through = paused if where == 'here' else other

    async def free():
        lease = await paused.lease(task.id)
        return lease.session_id is None

    await until(free)
    canceled = await through.handler.on_cancel_task(
        CancelTaskRequest(id=task.id), call()
    )
    assert canceled.status.state == CANCELED
    assert through.pushes.states(task.id).count(CANCELED) == 1
    await _nothing_left(service)
    with pytest.raises(TaskNotCancelableError):
        await through.handler.on_cancel_task(
            CancelTaskRequest(id=task.id), call()
        )
