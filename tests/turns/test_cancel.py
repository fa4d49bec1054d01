"""A cancel through any replica stops the agent where it runs."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
from a2a.types.a2a_pb2 import CancelTaskRequest, SubscribeToTaskRequest
from a2a.utils.errors import TaskNotCancelableError
from sqlalchemy import JSON, column, table, update

from a2a_lease.model import LeaseState
from a2a_lease.stores.database import DatabaseLeaseStore
from support.inprocess import (
    CANCELED,
    COMPLETED,
    INPUT_REQUIRED,
    SETTINGS,
    WORKING,
    Desk,
    ScriptedAgent,
    call,
    message,
    slow_replica,
    stubbornly,
    until,
)


if TYPE_CHECKING:
    from support.databases import Database
    from support.inprocess import InProcessReplica, Service


async def _start(replica: InProcessReplica):
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )

    return await replica.working(), sending


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
        await stubbornly(release)
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


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_an_idle_task_is_canceled_and_pushed_once(
    service: Service, where: str
):
    """Its replica holds the lease, but nobody works on it."""

    async def returns(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)

    idle = await service.replica(returns)
    other = await service.replica(returns)
    task = await idle.handler.on_message_send(message(), call())

    async def is_idle():
        lease = await idle.lease(task.id)
        return lease is not None and lease.state is LeaseState.IDLE

    await until(is_idle)
    through = idle if where == 'here' else other
    canceled = await through.handler.on_cancel_task(
        CancelTaskRequest(id=task.id), call()
    )
    assert canceled.status.state == CANCELED
    await _nothing_left(service)
    assert through.pushes.states(task.id).count(CANCELED) == 1


async def test_of_many_who_cancel_one_pushes(
    database: Database, service: Service
):
    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    # None is given up while its save is under way.
    settings = dataclasses.replace(SETTINGS, stop_timeout=30)
    replicas = [await service.replica(ask, settings=settings) for _ in range(3)]
    task = await replicas[0].handler.on_message_send(message(), call())
    canceled = await asyncio.gather(
        *(
            replica.handler.on_cancel_task(
                CancelTaskRequest(id=task.id), call()
            )
            for replica in replicas
        ),
        return_exceptions=True,
    )
    # Whoever comes late may be told that it is over.
    for result in canceled:
        if isinstance(result, Exception):
            assert isinstance(result, TaskNotCancelableError)
        else:
            assert result.status.state == CANCELED
    await _nothing_left(service)

    async def pushed():
        return [
            state
            for replica in replicas
            for state in replica.pushes.states(task.id)
            if state == CANCELED
        ]

    await until(pushed)
    # On SQLite the SDK reads before it locks, so that several may save.
    most = 3 if database.kind == 'sqlite' else 1
    assert len(await pushed()) <= most


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_a_cancel_as_the_turn_pauses_is_pushed(
    service: Service, where: str
):
    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    pauses = await service.replica(ask)
    other = await service.replica(ask)
    through = pauses if where == 'here' else other
    tasks = []
    for number in range(12):
        task = await pauses.handler.on_message_send(message(), call())
        tasks.append(task.id)
        await asyncio.sleep(number / 2000)
        canceled = await through.handler.on_cancel_task(
            CancelTaskRequest(id=task.id), call()
        )
        assert canceled.status.state == CANCELED
    await _nothing_left(service)

    async def all_pushed():
        return all(
            CANCELED
            in pauses.pushes.states(task_id) + other.pushes.states(task_id)
            for task_id in tasks
        )

    await until(all_pushed)


async def test_the_lease_of_a_canceled_task_goes_after_its_push(
    service: Service,
):
    """If its replica dies before, recovery pushes."""
    runs = await service.replica(_works)
    cancels = await service.replica(_works)
    pushing, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(task_id: str, event: object) -> None:
        if getattr(event, 'status', None) and event.status.state == CANCELED:
            pushing.set()
            await go_on.wait()

    runs.pushes.before_send = slowly
    task, sending = await _start(runs)
    await cancels.handler.on_cancel_task(CancelTaskRequest(id=task.id), call())
    async with asyncio.timeout(20):
        await pushing.wait()
    await service.beats(runs, 4)
    assert await runs.lease(task.id)
    go_on.set()
    await _nothing_left(service)
    assert runs.pushes.states(task.id).count(CANCELED) == 1
    await asyncio.wait({sending})


@pytest.mark.parametrize('how', ['send', 'subscribe'])
async def test_a_stream_ends_with_a_cancel_of_the_version_that_it_has_seen(
    service: Service, how: str
):
    """On SQLite, a cancel and another save may make the same version."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.artifact('half')
        await asyncio.Event().wait()

    replica = await service.replica(agent)
    stream = replica.handler.on_message_send_stream(message(), call())
    task = await anext(stream)
    assert (await anext(stream)).artifact.parts[0].text == 'half'
    if how == 'subscribe':
        stream = replica.handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=task.id), call()
        )
        assert (await anext(stream)).artifacts
    tasks = table('tasks', column('id'), column('status', JSON))
    async with service.engine.begin() as connection:
        await connection.execute(
            update(tasks)
            .where(tasks.c.id == task.id)
            .values(status={'state': 'TASK_STATE_CANCELED'})
        )
    assert await service.leases.request_cancel('agent', task.id)
    async with asyncio.timeout(20):
        told = [event async for event in stream]
    assert told[-1].status.state == CANCELED
    await _nothing_left(service)


async def test_a_cancel_that_meets_the_last_words_leaves_no_lease(
    service: Service,
):
    """The agent has returned, and what it said is not yet saved."""

    async def complete(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.status(COMPLETED)

    runs, slow = await slow_replica(service, complete, COMPLETED)
    sending = asyncio.ensure_future(
        runs.handler.on_message_send(message(), call())
    )
    async with asyncio.timeout(20):
        await slow.entered.wait()
    [lease] = await service.leases.leases()

    async def returned():
        turn = runs.handler._turns.of(lease.task_id)
        return turn.agent is not None and turn.agent.done()

    await until(returned)
    canceling = asyncio.ensure_future(
        runs.handler.on_cancel_task(CancelTaskRequest(id=lease.task_id), call())
    )
    await service.beats(runs, 2)
    slow.go_on.set()
    await asyncio.wait({sending, canceling}, timeout=20)
    assert canceling.done()
    assert await runs.state(lease.task_id) in (COMPLETED, CANCELED)
    if canceling.exception() is not None:
        assert isinstance(canceling.exception(), TaskNotCancelableError)
    await _nothing_left(service)


class StumblesAtCancels(DatabaseLeaseStore):
    """The connection breaks before it can say that a task was canceled."""

    stumbled = False

    async def request_cancel(self, *args):
        if not self.stumbled:
            self.stumbled = True
            raise ConnectionResetError('before it was done')
        return await super().request_cancel(*args)


async def test_a_cancel_is_told_through_an_outage(service: Service):
    """It is saved by then, so nobody would do it again."""

    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    runs = await service.replica(ask)
    leases = StumblesAtCancels(service.engine)
    cancels = await service.replica(ask, leases=leases)
    task = await runs.handler.on_message_send(message(), call())
    canceled = await cancels.handler.on_cancel_task(
        CancelTaskRequest(id=task.id), call()
    )
    assert canceled.status.state == CANCELED
    assert leases.stumbled
    told = [*runs.pushes.states(task.id), *cancels.pushes.states(task.id)]
    assert told.count(CANCELED) == 1
    await _nothing_left(service)
