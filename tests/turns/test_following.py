"""What a stream makes of the local one under it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from a2a.server.cluster import ConcurrentTaskModificationError, TaskVersion
from a2a.types.a2a_pb2 import (
    SubscribeToTaskRequest,
    TaskStatusUpdateEvent,
)

from a2a_lease.turns.following import LocalStream
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.shown import Shown
from simulation.loop import VirtualLoop
from support.inprocess import (
    FAILED,
    INPUT_REQUIRED,
    WORKING,
    Desk,
    call,
    message,
    until,
)
from support.log import rebuilt


if TYPE_CHECKING:
    from support.inprocess import Service


EVENT = TaskStatusUpdateEvent(task_id='task')


class _Turn:
    """As much of a turn as a stream looks at."""

    def __init__(self) -> None:
        self.loss: Loss | None = None
        self.never_began = False
        self.shown = Shown()


async def _breaks() -> Any:
    yield EVENT
    raise ConcurrentTaskModificationError('task')


async def test_the_error_of_a_lost_turn_is_not_the_client_s():
    """The save that is refused to a zombie; the stream goes on elsewhere."""
    turn: Any = _Turn()
    turn.loss = Loss.TAKEN_OVER
    stream = LocalStream(_breaks(), turn, asyncio.Event()).events()
    assert [event async for event in stream] == [EVENT]


async def test_the_error_of_a_turn_that_goes_on_is_raised():
    turn: Any = _Turn()
    stream = LocalStream(_breaks(), turn, asyncio.Event()).events()
    assert await anext(stream) == EVENT
    with pytest.raises(ConcurrentTaskModificationError):
        await anext(stream)


async def test_a_subscription_ends_when_its_task_pauses(service: Service):
    """As elsewhere: the answer may come to any replica, which runs it then."""
    go_on = asyncio.Event()

    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()
        await desk.status(INPUT_REQUIRED)

    replica = await service.replica(ask)
    asking = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )

    task = await replica.working()
    states: list[int] = []

    async def listen() -> None:
        async for event in replica.handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=task.id), call()
        ):
            states.append(event.status.state)

    listening = asyncio.ensure_future(listen())
    service.clients.append(listening)

    async def heard():
        return states

    await until(heard)
    go_on.set()
    await asyncio.wait_for(asking, 20)
    await asyncio.wait_for(listening, 20)
    assert states == [WORKING, INPUT_REQUIRED]


@pytest.mark.parametrize('last', [INPUT_REQUIRED, FAILED])
async def test_a_turn_that_ends_as_somebody_subscribes_is_heard_whole(
    service: Service, last: int
):
    """The SDK has read the task, and hears nothing of the turn any more."""
    go_on, read = asyncio.Event(), asyncio.Event()
    slow: list[asyncio.Event] = []

    async def work(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()
        await desk.artifact('one')
        await desk.artifact('two', append=True)
        if last == FAILED:
            raise RuntimeError('boom')
        await desk.status(last)

    def wrap(store: Any) -> Any:
        get = store.get

        async def get_slowly(task_id: str, context: Any) -> Any:
            found = await get(task_id, context)
            if slow:
                gone = slow.pop()
                read.set()
                await gone.wait()
            return found

        store.get = get_slowly
        return store

    replica = await service.replica(work, wrap_tasks=wrap)
    asking = asyncio.ensure_future(
        replica.handler.on_message_send(message(), call())
    )
    task = await replica.working()
    gone = asyncio.Event()
    slow.append(gone)
    events: list[Any] = []

    async def listen() -> None:
        async for event in replica.handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=task.id), call()
        ):
            events.append(event)

    listening = asyncio.ensure_future(listen())
    service.clients.append(listening)
    await asyncio.wait_for(read.wait(), 20)
    go_on.set()
    await asyncio.wait({asking}, timeout=20)
    assert asking.done()
    asking.exception()

    async def over():
        return replica.handler._turns.of(task.id) is None

    await until(over)
    gone.set()

    async def heard():
        return events and events[-1].status.state == last

    await until(heard)
    assert rebuilt(events) == {'a': ['one', 'two']}


async def test_a_slow_reader_gets_all_of_a_turn_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
):
    """And nothing of the next one, which is another stream's to bring."""
    monkeypatch.setattr('a2a_lease.turns.following._LINGER', 0.05)
    turn: Any = _Turn()
    own = [TaskStatusUpdateEvent(task_id=f'{n}') for n in range(4)]
    for number, event in enumerate(own, start=1):
        turn.shown.add(event, TaskVersion(number))

    async def source():
        for event in own:
            yield event
        yield EVENT

    over = asyncio.Event()
    over.set()
    local = LocalStream(source(), turn, over)
    events = []
    async for event in local.events():
        events.append(event)
        await asyncio.sleep(0.1)
    assert events == own
    assert local.seen == TaskVersion(4)


def test_a_stream_is_not_left_while_events_still_come():
    """Each of them begins the wait anew, in virtual time."""
    turn: Any = _Turn()
    own = [TaskStatusUpdateEvent(task_id=f'{n}') for n in range(4)]
    for number, event in enumerate(own, start=1):
        turn.shown.add(event, TaskVersion(number))

    async def source():
        for event in own:
            await asyncio.sleep(0.6)
            yield event
        await asyncio.Event().wait()

    async def listen() -> list[Any]:
        over = asyncio.Event()
        over.set()
        return [e async for e in LocalStream(source(), turn, over).events()]

    loop = VirtualLoop()
    assert loop.run_until_complete(listen()) == own
    loop.end()
