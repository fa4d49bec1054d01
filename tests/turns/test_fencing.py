"""Whoever lost a lease saves nothing more, and the task is never undone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from a2a.types.a2a_pb2 import (
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import TaskNotFoundError

from a2a_lease import current_lease
from a2a_lease.model import SessionState
from a2a_lease.stores.database import DatabaseLeaseStore
from support.inprocess import (
    COMPLETED,
    FAILED,
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


async def _fence(service: Service, session_id: str) -> None:
    """Declares a replica dead that lives, as a long partition would."""

    async def fenced():
        for session in await service.leases.sessions():
            if session.id == session_id:
                return await service.leases.fence(session_id, beat=session.beat)
        return False

    await until(fenced)


@pytest.mark.parametrize('ending', ['completes', 'raises', 'goes on'])
async def test_a_zombie_lands_nothing_after_the_takeover(
    service: Service, ending: str
):
    wake = asyncio.Event()

    async def zombie(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await stubbornly(wake)
        await desk.artifact('late')
        await desk.status(COMPLETED)
        if ending == 'raises':
            raise RuntimeError('late')

    old = await service.replica(zombie)
    new = await service.replica(zombie)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await old.working()
    [lease] = await service.leases.leases()
    await _fence(service, lease.session_id)

    async def failed():
        return await new.state(lease.task_id) == FAILED

    await until(failed)
    wake.set()
    task = await sending
    assert task.status.state == FAILED

    async def stopped():
        return old.agent.running == 0

    await until(stopped)
    stored = await new.stored(lease.task_id)
    assert stored.status.state == FAILED
    assert not stored.artifacts
    details = stored.metadata['a2a_lease']
    assert details['reason'] == 'replica_lost'
    assert details['attempt'] == 1
    assert details['session'] == lease.session_id

    async def pushed():
        told = [s for r in (old, new) for s in r.pushes.states(lease.task_id)]
        return told if FAILED in told else None

    told = await until(pushed)
    assert told.count(FAILED) == 1
    assert COMPLETED not in told


async def test_a_fenced_replica_lives_on_under_a_new_session(
    service: Service,
):
    begun, lost = asyncio.Event(), asyncio.Event()

    async def first(desk: Desk) -> None:
        await desk.task()
        begun.set()
        await current_lease().lost.wait()
        lost.set()

    async def second(desk: Desk) -> None:
        await desk.task()
        await desk.status(COMPLETED)

    replica = await service.replica(ScriptedAgent(first, second))
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    await begun.wait()
    [lease] = await service.leases.leases()
    await until(lambda: replica.stored(lease.task_id))
    await _fence(service, lease.session_id)
    task = await sending
    assert task.status.state == FAILED
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == COMPLETED
    states = {s.id: s.state for s in await service.leases.sessions()}
    assert states.pop(lease.session_id) is SessionState.FENCED
    assert list(states.values()) == [SessionState.OPEN]


async def test_a_client_is_answered_though_its_task_never_was(
    service: Service,
):
    """The SDK hides the cancellation of its wait, and waits on for a task."""
    begun = asyncio.Event()

    async def silent(desk: Desk) -> None:
        begun.set()
        await asyncio.Event().wait()

    old = await service.replica(silent)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await begun.wait()
    [lease] = await service.leases.leases()
    await _fence(service, lease.session_id)
    with pytest.raises(TaskNotFoundError):
        await asyncio.wait_for(sending, 30)


async def test_the_streams_of_a_fenced_replica_end_with_the_outcome(
    service: Service,
):
    begun = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.artifact('one')
        begun.set()
        await asyncio.Event().wait()

    old = await service.replica(agent)
    await service.replica(agent)
    seen: list = []
    subscribed: list = []

    async def stream() -> None:
        async for event in old.handler.on_message_send_stream(
            message(), call()
        ):
            seen.append(event)

    async def subscribe(task_id: str) -> None:
        async for event in old.handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=task_id), call()
        ):
            subscribed.append(event)

    streaming = asyncio.ensure_future(stream())
    await begun.wait()
    [lease] = await service.leases.leases()

    async def artifact_seen():
        return any(isinstance(e, TaskArtifactUpdateEvent) for e in seen)

    await until(artifact_seen)
    subscribing = asyncio.ensure_future(subscribe(lease.task_id))

    async def attached():
        return subscribed

    await until(attached)
    await _fence(service, lease.session_id)
    await streaming
    await subscribing
    for events in (seen, subscribed):
        assert isinstance(events[-1], TaskStatusUpdateEvent)
        assert [_state(e) for e in events].count(FAILED) == 1
    texts = [e for e in seen if isinstance(e, TaskArtifactUpdateEvent)]
    assert len(texts) == 1


async def test_a_blocked_loop_is_not_death(service: Service):
    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        time.sleep(2 * service_ttl)
        await desk.status(COMPLETED)

    replica = await service.replica(agent)
    service_ttl = replica.handler.settings.ttl
    # The one who would judge has a loop of its own in its heartbeat.
    await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == COMPLETED
    sessions = await service.leases.sessions()
    assert [s.state for s in sessions] == [SessionState.OPEN] * 2


def _state(event) -> int | None:
    return (
        event.status.state
        if isinstance(event, Task | TaskStatusUpdateEvent)
        else None
    )


async def test_an_agent_does_not_begin_before_its_replica_is_sure_to_live(
    service: Service,
):
    """The process was paused between the acquire and the run."""
    fresh: list[bool] = []

    class Pauses(DatabaseLeaseStore):
        async def acquire(self, request):
            lease = await super().acquire(request)
            replica.handler._replica.session.confirm(sent_at=float('-inf'))
            return lease

    async def agent(desk: Desk) -> None:
        fresh.append(replica.handler._replica.session.fresh())
        await desk.task()
        await desk.status(COMPLETED)

    replica = await service.replica(agent, leases=Pauses(service.engine))
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == COMPLETED
    assert fresh == [True]
