"""A lease is there before the first save, and goes after the last."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from a2a.types.a2a_pb2 import Message, Task
from a2a.utils.errors import A2AError

from a2a_lease import LeaseError, current_lease
from a2a_lease.model import LeaseState
from support.inprocess import (
    AUTH_REQUIRED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    SETTINGS,
    WORKING,
    Desk,
    ScriptedAgent,
    call,
    message,
    slow_replica,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import Service


async def _gone(replica, task_id):
    async def gone():
        return await replica.lease(task_id) is None

    await until(gone)


async def _in_state(replica, task_id, state):
    async def reached():
        lease = await replica.lease(task_id)
        return lease if lease is not None and lease.state is state else None

    return await until(reached)


async def test_the_lease_is_held_before_anything_is_saved(service: Service):
    seen = {}

    async def agent(desk: Desk) -> None:
        seen['lease'] = await replica.lease(desk.task_id)
        seen['task'] = await replica.stored(desk.task_id)
        seen['current'] = current_lease()
        await desk.task()
        await desk.status(COMPLETED)

    replica = await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())

    assert isinstance(task, Task)
    assert task.status.state == COMPLETED
    assert seen['task'] is None
    assert seen['lease'].state is LeaseState.RUNNING
    assert seen['lease'].owner == 'ada'
    assert seen['lease'].before is None
    assert seen['current'].token == seen['lease'].token == 1
    assert seen['current'].attempt == 1
    assert seen['current'].task_id == task.id
    assert not seen['current'].lost.is_set()
    await _gone(replica, task.id)


async def test_outside_a_turn_there_is_no_current_lease():
    with pytest.raises(LeaseError, match='within'):
        current_lease()


async def test_the_lease_stays_until_the_outcome_was_pushed(service: Service):
    pushing, go_on = asyncio.Event(), asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(COMPLETED)

    async def hold_up(task_id, event):
        if event.status.state == COMPLETED:
            pushing.set()
            await go_on.wait()

    replica = await service.replica(agent)
    replica.pushes.before_send = hold_up
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    await pushing.wait()
    [lease] = await service.leases.leases()
    assert await replica.state(lease.task_id) == COMPLETED
    assert lease.state is LeaseState.RUNNING
    go_on.set()
    await sending
    await _gone(replica, lease.task_id)
    assert replica.pushes.states(lease.task_id)[-1] == COMPLETED


async def test_the_lease_stays_until_the_agent_has_ended(service: Service):
    go_on = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(COMPLETED)
        await go_on.wait()

    replica = await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == COMPLETED
    lease = await replica.lease(task.id)
    assert lease.state is LeaseState.RUNNING
    go_on.set()
    await _gone(replica, task.id)


async def test_a_pause_keeps_the_token_for_the_next_turn(service: Service):
    tokens = []

    async def ask(desk: Desk) -> None:
        tokens.append(current_lease().token)
        if desk.context.current_task is None:
            await desk.task()
        await desk.status(INPUT_REQUIRED)

    async def finish(desk: Desk) -> None:
        tokens.append(current_lease().token)
        await desk.status(COMPLETED)

    replica = await service.replica(ScriptedAgent(ask, ask, finish))
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == INPUT_REQUIRED
    free = await _in_state(replica, task.id, LeaseState.FREE)
    assert free.session_id is None

    task = await replica.handler.on_message_send(message(task=task), call())
    assert task.status.state == INPUT_REQUIRED
    await _in_state(replica, task.id, LeaseState.FREE)

    task = await replica.handler.on_message_send(message(task=task), call())
    assert task.status.state == COMPLETED
    assert tokens == [1, 2, 3]
    await _gone(replica, task.id)


async def test_a_turn_that_goes_on_after_a_pause_is_parked_meanwhile(
    service: Service,
):
    granted, worked, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(AUTH_REQUIRED)
        await granted.wait()
        await desk.status(WORKING)
        worked.set()
        await finish.wait()
        await desk.status(COMPLETED)

    replica = await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == AUTH_REQUIRED
    parked = await _in_state(replica, task.id, LeaseState.PARKED)
    assert parked.session_id is not None

    granted.set()
    await worked.wait()

    async def works():
        return await replica.state(task.id) == WORKING

    await until(works)
    running = await replica.lease(task.id)
    assert running.state is LeaseState.RUNNING
    assert running.token == parked.token
    finish.set()
    await _gone(replica, task.id)
    assert await replica.state(task.id) == COMPLETED


async def test_a_lease_is_parked_once_the_pause_is_pushed(service: Service):
    """If the replica dies before the push, recovery pushes."""
    seen: list[LeaseState] = []

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(AUTH_REQUIRED)
        await asyncio.Event().wait()

    replica = await service.replica(agent)

    async def look(task_id: str, event: Any) -> None:
        if event.status.state == AUTH_REQUIRED:
            # Enough for what a save has begun beside.
            await service.beats(replica, 2)
            seen.append((await replica.lease(task_id)).state)

    replica.pushes.before_send = look
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )

    async def parked():
        return [
            lease
            for lease in await service.leases.leases()
            if lease.state is LeaseState.PARKED
        ]

    await until(parked)
    assert seen == [LeaseState.RUNNING]
    await sending


async def test_a_plain_answer_leaves_nothing_behind(service: Service):
    async def agent(desk: Desk) -> None:
        await desk.reply('hi')

    replica = await service.replica(agent)
    answer = await replica.handler.on_message_send(message(), call())
    assert isinstance(answer, Message)

    async def none_left():
        return not await service.leases.leases()

    await until(none_left)


async def test_a_plain_answer_to_a_paused_task_leaves_it_paused(
    service: Service,
):
    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    async def answer(desk: Desk) -> None:
        await desk.reply('not yet')

    paused = await service.replica(ask)
    # On the replica that paused it, the SDK takes no plain answer any more.
    replica = await service.replica(answer)
    task = await paused.handler.on_message_send(message(), call())
    await _in_state(replica, task.id, LeaseState.FREE)
    reply = await replica.handler.on_message_send(message(task=task), call())
    assert isinstance(reply, Message)
    lease = await _in_state(replica, task.id, LeaseState.FREE)
    assert lease.token == 2
    assert await replica.state(task.id) == INPUT_REQUIRED


async def test_an_agent_that_settles_nothing_leaves_an_idle_lease(
    service: Service, caplog
):
    async def begin(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)

    async def finish(desk: Desk) -> None:
        await desk.status(COMPLETED)

    replica = await service.replica(ScriptedAgent(begin, finish))
    task = await replica.handler.on_message_send(message(), call())
    await _in_state(replica, task.id, LeaseState.IDLE)
    [warning] = [r for r in caplog.records if 'returned from' in r.message]
    assert warning.task_id == task.id

    task = await replica.handler.on_message_send(message(task=task), call())
    assert task.status.state == COMPLETED
    await _gone(replica, task.id)


async def test_an_exception_of_the_agent_is_pushed_as_failed(
    service: Service,
):
    async def agent(desk: Desk) -> None:
        await desk.task()
        raise RuntimeError('boom')

    replica = await service.replica(agent)
    with pytest.raises(RuntimeError, match='boom'):
        await replica.handler.on_message_send(message(), call())

    async def failed():
        return [task for task in replica.pushes.sent if _failed(task)]

    [(task_id, _)] = await until(failed)
    assert await replica.state(task_id) == FAILED
    await _gone(replica, task_id)
    assert replica.pushes.states(task_id).count(FAILED) == 1


async def test_an_exception_before_any_event_is_pushed_as_failed(
    service: Service,
):
    async def agent(desk: Desk) -> None:
        raise RuntimeError('boom')

    replica = await service.replica(agent)
    with pytest.raises(RuntimeError, match='boom'):
        await replica.handler.on_message_send(message(), call())

    async def none_left():
        return not await service.leases.leases()

    await until(none_left)
    [(task_id, event)] = replica.pushes.sent
    assert event.status.state == FAILED
    assert await replica.state(task_id) == FAILED


async def test_an_exception_just_after_a_pause_is_pushed_as_failed(
    service: Service,
):
    """The SDK closes the queue before it has saved what is in it."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(AUTH_REQUIRED)
        await desk.status(WORKING)
        raise RuntimeError('boom')

    replica = await service.replica(agent)
    with contextlib.suppress(RuntimeError):
        await replica.handler.on_message_send(message(), call())

    async def none_left():
        return not await service.leases.leases()

    await until(none_left)
    task_id, event = replica.pushes.sent[-1]
    assert event.status.state == FAILED
    assert await replica.state(task_id) == FAILED


async def test_no_lease_waits_for_what_is_never_saved(service: Service):
    """The SDK ends at an event that is not of its task, whatever follows."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        own, desk.task_id = desk.task_id, 'another'
        await desk.artifact('one')
        desk.task_id = own
        await desk.artifact('two')
        raise RuntimeError('boom')

    replica = await service.replica(
        agent, settings=dataclasses.replace(SETTINGS, stop_timeout=0.2)
    )
    with pytest.raises(A2AError):
        await replica.handler.on_message_send(message(), call())

    async def none_left():
        return not await service.leases.leases()

    await until(none_left)
    assert await replica.state(replica.pushes.sent[0][0]) == FAILED


class Slow:
    """One call that a part of the server makes takes long."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.armed = False
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def wait(self, *_: object) -> None:
        if self.armed:
            self.entered.set()
            await self.go_on.wait()

    def wrap(self, inner: Any) -> Any:
        call_inner = getattr(inner, self.method)

        async def call_slowly(*args: Any, **options: Any) -> Any:
            await self.wait()
            return await call_inner(*args, **options)

        setattr(inner, self.method, call_slowly)
        return inner


@pytest.mark.parametrize('method', ['save', 'publish', 'push'])
async def test_an_exception_is_told_however_slow_the_surroundings(
    service: Service, method: str
):
    """The turn did not die: the SDK is not done with what came before."""
    slow = Slow(method)

    async def agent(desk: Desk) -> None:
        if desk.context.current_task is None:
            await desk.task()
            await desk.status(INPUT_REQUIRED)
            return
        await desk.status(WORKING)
        slow.armed = True
        await desk.artifact('half')
        raise RuntimeError('boom')

    wraps: dict[str, Any] = {}
    if method == 'save':
        wraps['wrap_tasks'] = slow.wrap
    elif method == 'publish':
        wraps['wrap_events'] = slow.wrap
    replica = await service.replica(
        agent,
        settings=dataclasses.replace(SETTINGS, stop_timeout=0.2),
        **wraps,
    )
    if method == 'push':
        replica.pushes.before_send = slow.wait
    task = await replica.handler.on_message_send(message(), call())
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(task=task), call())
    )
    async with asyncio.timeout(20):
        await slow.entered.wait()
    await service.beats(replica, 6)
    slow.go_on.set()
    with pytest.raises(RuntimeError, match='boom'):
        await sending
    await _gone(replica, task.id)
    stored = await replica.stored(task.id)
    assert stored.status.state == FAILED
    assert not stored.status.HasField('message')
    assert [a.parts[0].text for a in stored.artifacts] == ['half']


@pytest.mark.parametrize('state', [INPUT_REQUIRED, AUTH_REQUIRED])
async def test_a_slow_pause_that_goes_on_keeps_its_lease_for_the_exception(
    service: Service, state: int
):
    """When the pause is saved, the agent has left and the queue is closed."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(state)
        await desk.status(WORKING)
        raise RuntimeError('boom')

    replica, slow = await slow_replica(service, agent, holds=state)
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    async with asyncio.timeout(20):
        await slow.entered.wait()
    await service.beats(replica, 2)
    slow.go_on.set()
    with contextlib.suppress(RuntimeError):
        await sending
    task_id = replica.pushes.sent[0][0]
    await _gone(replica, task_id)
    assert await replica.state(task_id) == FAILED
    assert replica.pushes.states(task_id)[-1] == FAILED


async def test_a_checkpoint_is_stored_after_what_it_stands_for(
    service: Service,
):
    """A crash between the two must not leave a checkpoint for nothing."""
    slow = Slow('save')

    async def agent(desk: Desk) -> None:
        await desk.task()
        await current_lease().save_checkpoint(0)
        slow.armed = True
        await desk.artifact('half')
        await current_lease().save_checkpoint(1)
        await desk.status(INPUT_REQUIRED)
        await desk.artifact('the other half')
        await current_lease().save_checkpoint(2)
        await desk.status(COMPLETED)

    async def stored() -> bytes | None:
        [lease] = await service.leases.leases()
        kept = await service.leases.stored_turn(
            'agent', lease.task_id, token=lease.token
        )
        return kept.checkpoint if kept is not None else None

    replica = await service.replica(agent, wrap_tasks=slow.wrap)
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    async with asyncio.timeout(20):
        await slow.entered.wait()
    await service.beats(replica, 4)
    assert await stored() == b'0'
    slow.go_on.set()
    task = await sending
    assert task.artifacts[0].parts[0].text == 'half'
    await _gone(replica, task.id)
    assert (await replica.stored(task.id)).status.state == COMPLETED


async def test_nothing_is_saved_after_a_terminal_state(service: Service):
    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(COMPLETED)
        await desk.status(FAILED)
        await desk.artifact('late')

    replica = await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())
    await _gone(replica, task.id)
    stored = await replica.stored(task.id)
    assert stored.status.state == COMPLETED
    assert not stored.artifacts


async def test_pauses_that_look_alike_can_be_told_apart(service: Service):
    async def ask(desk: Desk) -> None:
        if desk.context.current_task is None:
            await desk.task()
        # An agent with a clock of its own, or none.
        await desk.status(INPUT_REQUIRED, timestamp_seconds=1)

    replica = await service.replica(ScriptedAgent(ask))
    task = await replica.handler.on_message_send(message(), call())
    first = await replica.stored(task.id)
    await replica.handler.on_message_send(message(task=task), call())
    second = await replica.stored(task.id)
    assert second.status.timestamp != first.status.timestamp


async def test_a_pause_without_a_timestamp_gets_one(service: Service):
    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    replica = await service.replica(ask)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.HasField('timestamp')
    assert (await replica.stored(task.id)).status.HasField('timestamp')


def _failed(sent) -> bool:
    _, event = sent
    return hasattr(event, 'status') and event.status.state == FAILED
