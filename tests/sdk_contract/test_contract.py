"""What the SDK does and this package leans on.

Each test says what of ours to look at when a new release makes it fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    DatabaseTaskEventStream,
    TaskVersion,
    VersionedDatabaseTaskStore,
    VersionedTaskStore,
)
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.tasks import TaskManager
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    Task,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import UnsupportedOperationError
from sqlalchemy.exc import InterfaceError
from sqlalchemy.ext.asyncio import create_async_engine

from support.inprocess import (
    AUTH_REQUIRED,
    CANCELED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
    Desk,
    Pushes,
    ScriptedAgent,
    call,
    card,
    message,
)


if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Watched(VersionedTaskStore):
    """Records the saves that pass through."""

    def __init__(self, inner: VersionedDatabaseTaskStore, order: list) -> None:
        self.inner = inner
        self.saves: list[dict[str, Any]] = []
        self.order = order
        self.fail_with: Exception | None = None

    async def save(self, task, **rest):
        copy = Task()
        copy.CopyFrom(task)
        self.saves.append({'task': copy, 'object': task, **rest})
        self.order.append(('save', rest['event']))
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        return await self.inner.save(task, **rest)

    async def get(self, task_id, context):
        return await self.inner.get(task_id, context)

    async def list(self, params, context):
        return await self.inner.list(params, context)

    async def delete(self, task_id, context):
        await self.inner.delete(task_id, context)


class WatchedEvents(DatabaseTaskEventStream):
    order: list

    async def publish(self, task_id, event):
        self.order.append(('publish', event.event))


class Plain:
    """A plain handler, and what goes on inside."""

    def __init__(self, engine, *scripts) -> None:
        self.order: list[tuple[str, Any]] = []
        self.inner = VersionedDatabaseTaskStore(engine)
        self.store = Watched(self.inner, self.order)
        self.events = WatchedEvents(engine, poll_interval_s=0.05)
        self.events.order = self.order
        self.pushes = Pushes()
        self.agent = ScriptedAgent(*scripts)

        async def pushing(task_id, event):
            self.order.append(('push', event))

        self.pushes.before_send = pushing
        self.handler = DefaultRequestHandler(
            agent_executor=self.agent,
            agent_card=card(),
            task_store=self.store,
            event_stream=self.events,
            push_sender=self.pushes,
        )

    async def send(self, **rest) -> Any:
        return await asyncio.wait_for(
            self.handler.on_message_send(message(**rest), call()), 20
        )

    async def state(self, task_id: str) -> int:
        return (await self.inner.get(task_id, call())).task.status.state


@pytest.fixture
async def plain(tmp_path) -> AsyncIterator[Any]:
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/x.db')
    made = []

    async def make(*scripts) -> Plain:
        handler = Plain(engine, *scripts)
        await handler.inner.initialize()
        await handler.events.initialize()
        made.append(handler)
        return handler

    yield make
    for each in made:
        with contextlib.suppress(Exception):
            await each.handler.aclose()
    await engine.dispose()


async def _write(desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await desk.status(COMPLETED)


async def _ask(desk: Desk) -> None:
    if desk.context.current_task is None:
        await desk.task()
    await desk.status(INPUT_REQUIRED, timestamp_seconds=7)


async def test_an_event_is_saved_then_pushed_then_published(plain):
    """`Turns.processed`: a publish tells that save and push are done."""
    replica = await plain(_write)
    await replica.send()
    kinds = [kind for kind, _ in replica.order]
    assert kinds == ['save', 'push', 'publish'] * 3


async def test_the_enqueued_object_is_saved_pushed_and_published(plain):
    """`Turn.processed` and `is_from_agent` go by identity; a Task is copied
    for its publish."""
    enqueued = []

    async def agent(desk: Desk) -> None:
        await desk.task()
        status = TaskStatusUpdateEvent(
            task_id=desk.task_id,
            context_id=desk.context_id,
            status=TaskStatus(state=COMPLETED),
        )
        enqueued.append(status)
        await desk.queue.enqueue_event(status)

    replica = await plain(agent)
    await replica.send()
    for number in (3, 4, 5):
        assert replica.order[number][1] is enqueued[0]
    assert isinstance(replica.order[2][1], Task)
    assert replica.order[2][1] is not replica.order[0][1]


async def test_a_task_event_for_a_task_that_exists_is_not_saved(plain):
    """`Turn.drained` waits for a publish, not for a save."""

    async def again(desk: Desk) -> None:
        await desk.task()
        await desk.task()
        await desk.status(COMPLETED)

    replica = await plain(again)
    await replica.send()
    kinds = [kind for kind, _ in replica.order]
    assert kinds == [
        *['save', 'push', 'publish'],
        *['push', 'publish'],
        *['save', 'push', 'publish'],
    ]


async def test_a_plain_answer_is_published_and_never_saved(plain):
    """`Turns.conclude`: a turn that saved nothing leaves nothing."""

    async def agent(desk: Desk) -> None:
        await desk.reply('hi')

    replica = await plain(agent)
    await replica.send()
    assert [kind for kind, _ in replica.order] == ['publish']


async def test_a_resumed_turn_first_saves_the_old_state_again(plain):
    """`TaskMark`, `_tell_apart`, `_is_flush`: the flush of the message."""

    async def go_on(desk: Desk) -> None:
        await desk.status(WORKING)
        await desk.status(COMPLETED)

    replica = await plain(_ask, go_on)
    task = await replica.send()
    replica.order.clear()
    replica.store.saves.clear()
    await replica.send(task=task)
    flush, first = replica.store.saves[:2]
    assert flush['event'] is flush['object']
    assert flush['task'].status.state == INPUT_REQUIRED
    assert flush['task'].status.timestamp.seconds == 7
    assert first['task'].status.state == WORKING
    assert [kind for kind, _ in replica.order][:4] == [
        *['save'],
        *['save', 'push', 'publish'],
    ]


async def test_the_earlier_state_cannot_be_learned_from_prev(plain):
    """`Turn.status` keeps a copy of what was saved."""
    replica = await plain(_write)
    await replica.send()
    for save in replica.store.saves[1:]:
        assert save['prev'] is save['object']


async def test_saves_come_with_the_call_context_of_the_request(plain):
    """`with_hold`: the turn travels in the state of the call context."""
    replica = await plain(_write)
    context = call(mark='here')
    await replica.handler.on_message_send(message(), context)
    for save in replica.store.saves:
        assert save['context'].state['mark'] == 'here'


async def test_execute_may_return_before_anything_is_saved(plain):
    """`LeasedExecutor`: nothing is let go when execute() returns."""
    saved = []

    async def agent(desk: Desk) -> None:
        await _write(desk)
        saved.append(len(replica.store.saves))

    replica = await plain(agent)
    await replica.send()
    assert saved == [0]


async def test_a_conflict_applies_the_same_event_once_more(plain):
    """`Hold.permit` refuses the retry too, not the first try only."""
    replica = await plain(_write)
    replica.store.fail_with = None
    tries = []
    save = replica.store.inner.save

    async def conflict(task, **rest):
        event = rest['event']
        if isinstance(event, TaskStatusUpdateEvent):
            tries.append(event)
            if len(tries) <= 2:
                raise ConcurrentTaskModificationError(task.id)
        return await save(task, **rest)

    replica.store.inner.save = conflict
    with pytest.raises(Exception, match='modified concurrently'):
        await replica.send()
    assert tries[0] is tries[1]
    # And FAILED on a freshly loaded version.
    assert tries[2] is not tries[0]
    assert tries[2].status.state == FAILED


async def test_an_event_after_the_end_changes_a_terminal_state(plain):
    """`Hold._refuse_if_over`."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(COMPLETED)
        await desk.status(FAILED)

    replica = await plain(agent)
    task = await replica.send()
    async with asyncio.timeout(10):
        while await replica.state(task.id) != FAILED:
            await asyncio.sleep(0.01)


async def test_a_cancel_skips_the_check_of_the_version(plain):
    """`must_look` in `LeasedTaskStore.save`."""
    replica = await plain(_ask)
    task = await replica.send()
    stored = await replica.inner.get(task.id, call())
    for state, version in ((WORKING, stored.version), (CANCELED, None)):
        stale = Task()
        stale.CopyFrom(stored.task)
        stale.status.state = state
        await replica.inner.save(
            stale,
            event=None,
            prev=None,
            prev_version=version or TaskVersion.MISSING,
            context=call(),
        )
    assert await replica.state(task.id) == CANCELED


async def test_other_owners_see_nothing_and_write_nothing(plain):
    """`Recovery` restores the owner's context for every task."""
    replica = await plain(_ask)
    task = await replica.send()
    stored = await replica.inner.get(task.id, call())
    assert await replica.inner.get(task.id, call('eve')) is None
    with pytest.raises(ConcurrentTaskModificationError):
        await replica.inner.save(
            stored.task,
            event=None,
            prev=None,
            prev_version=stored.version,
            context=call('eve'),
        )
    assert replica.inner.as_task_store.owner_resolver(call('eve')) == 'eve'


async def test_an_exception_is_saved_as_failed_and_not_pushed(plain):
    """`Turns.saved` pushes and publishes it."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        raise RuntimeError('boom')

    replica = await plain(agent)
    with pytest.raises(RuntimeError, match='boom'):
        await replica.send()
    assert replica.store.saves[-1]['task'].status.state == FAILED
    assert [kind for kind, _ in replica.order][-1] == 'save'


async def test_a_cancellation_out_of_execute_saves_nothing(plain):
    """`LeasedExecutor` leaves a turn in this way that lost its lease."""

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        raise asyncio.CancelledError

    replica = await plain(agent)
    task = await replica.send()
    assert await replica.state(task.id) == WORKING


async def test_a_save_that_fails_otherwise_ends_the_consumer(plain):
    """`LeasedTaskStore.save`: such a turn is dead, though its agent goes on."""
    deaf = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        replica.store.fail_with = InterfaceError('', {}, Exception('lost'))
        await desk.status(WORKING)
        while not desk.queue.is_closed():
            await asyncio.sleep(0.01)
        deaf.set()

    replica = await plain(agent)
    with pytest.raises(InterfaceError):
        await replica.send()
    await asyncio.wait_for(deaf.wait(), 10)


async def test_a_pause_may_be_followed_by_work(plain):
    """`LeaseState.PARKED`."""
    go_on = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(AUTH_REQUIRED)
        await go_on.wait()
        await desk.status(COMPLETED)

    replica = await plain(agent)
    task = await replica.send()
    assert task.status.state == AUTH_REQUIRED
    go_on.set()
    async with asyncio.timeout(10):
        while await replica.state(task.id) != COMPLETED:
            await asyncio.sleep(0.01)


async def test_another_replica_runs_a_task_that_is_worked_on(plain):
    """`Admission`: the SDK itself keeps nobody from it."""
    go_on, twice = asyncio.Event(), asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()

    async def second(desk: Desk) -> None:
        twice.set()
        await desk.status(COMPLETED)

    one, two = await plain(agent), await plain(second)
    request = message()
    request.configuration.return_immediately = True
    task = await one.handler.on_message_send(request, call())
    await two.send(task=task)
    assert twice.is_set()
    go_on.set()


async def test_the_task_is_read_before_execute_and_can_be_set(plain):
    """`Admission.acquire` replaces it after a wait."""
    seen = []

    async def look(desk: Desk) -> None:
        seen.append(desk.context.current_task.status.state)
        desk.context.current_task = None
        await desk.status(COMPLETED)

    replica = await plain(_ask, look)
    task = await replica.send()
    await replica.send(task=task)
    assert seen == [INPUT_REQUIRED]


async def test_the_running_of_a_request_uses_the_builder_s_call_context(plain):
    """`LeasedContextBuilder` and the `hold_of` in execute()."""
    replica = await plain(_write)
    given = []
    build = replica.handler._request_context_builder.build

    async def building(**options):
        given.append(options)
        return await build(**options)

    replica.handler._request_context_builder.build = building
    await replica.send()
    [options] = given
    assert options['task'] is None
    assert options['context'].user.user_name == 'ada'


async def test_a_subclass_of_an_error_is_an_internal_error():
    """`Admission.wait` raises the very class."""
    from a2a.server.request_handlers.response_helpers import (
        build_error_response,
    )

    class Refused(UnsupportedOperationError):
        pass

    exact = build_error_response('1', UnsupportedOperationError())
    subclass = build_error_response('1', Refused())
    assert exact['error']['code'] != subclass['error']['code']
    assert subclass['error']['code'] == -32603


async def test_streams_of_the_handler_can_be_wrapped_by_a_subclass(plain):
    """`LeasedRequestHandler` overrides the generators with super()."""

    class Sub(DefaultRequestHandler):
        async def on_message_send_stream(self, params, context):
            async with contextlib.aclosing(
                super().on_message_send_stream(params, context)
            ) as events:
                async for event in events:
                    yield event

    replica = await plain(_write)
    replica.handler.__class__ = Sub
    seen = [
        event
        async for event in replica.handler.on_message_send_stream(
            message(), call()
        )
    ]
    assert len(seen) == 3


async def test_a_cancel_waits_for_an_agent_that_ignores_it(plain):
    """`on_cancel_task` bounds it."""
    release = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    replica = await plain(agent)
    request = message()
    request.configuration.return_immediately = True
    task = await replica.handler.on_message_send(request, call())
    canceling = asyncio.ensure_future(
        replica.handler.on_cancel_task(CancelTaskRequest(id=task.id), call())
    )
    done, _ = await asyncio.wait({canceling}, timeout=0.3)
    canceling.cancel()
    release.set()
    assert not done


async def test_the_task_manager_saves_on_the_version_it_read(plain):
    """`Recovery` writes its outcome through it."""
    replica = await plain(_ask)
    task = await replica.send()

    def made() -> TaskManager:
        return TaskManager(
            task_store=replica.inner,
            context=call(),
            task_id=task.id,
            context_id=None,
            initial_message=None,
        )

    manager = made()
    read = await manager.get_task()
    before = manager.current_version
    event = TaskStatusUpdateEvent(
        task_id=task.id,
        context_id=read.context_id,
        status=TaskStatus(state=FAILED),
    )
    event.metadata.update({'a2a_lease': {'reason': 'x'}})
    await manager.save_task_event(event)
    assert manager.current_version.is_after(before)
    stored = await replica.inner.get(task.id, call())
    assert stored.task.metadata['a2a_lease']['reason'] == 'x'
    # Somebody else wrote in between.
    manager = made()
    read = await manager.get_task()
    await replica.inner.save(
        read,
        event=None,
        prev=read,
        prev_version=manager.current_version,
        context=call(),
    )
    with pytest.raises(ConcurrentTaskModificationError):
        await manager.save_task_event(event)
