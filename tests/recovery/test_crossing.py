"""Messages, webhooks, shutdowns and zombies that cross with a recovery."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from a2a.server.agent_execution import SimpleRequestContextBuilder
from a2a.types.a2a_pb2 import (
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease import (
    Fail,
    FailAbandoned,
    Leave,
    ReExecute,
    RecoveryPolicy,
    current_lease,
)
from a2a_lease.model import LeaseState, SessionState
from support.inprocess import (
    CANCELED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    SUBMITTED,
    WORKING,
    Desk,
    call,
    message,
    stubbornly,
    until,
)
from support.stage import AT_ONCE, Stage, forever, spawn, texts


if TYPE_CHECKING:
    from collections.abc import Callable


async def _true(value: Any) -> bool:
    return bool(value)


def _listen(stage: Stage, request: Any = None) -> tuple[list[Any], Any]:
    """Streams from the first replica."""
    events: list[Any] = []

    async def listen() -> None:
        async for event in stage[0].handler.on_message_send_stream(
            request or message(), call()
        ):
            events.append(event)

    listening = asyncio.ensure_future(listen())
    stage.service.clients.append(listening)
    return events, listening


def _told(events: list[Any]) -> list[str]:
    """Puts together what a client was told, as a client does."""
    told: list[str] = []
    for event in events:
        if isinstance(event, Task):
            told = texts(event)
        elif isinstance(event, TaskArtifactUpdateEvent):
            told += [part.text for part in event.artifact.parts]
    return told


def _states(events: list[Any]) -> list[int]:
    return [
        event.status.state
        for event in events
        if isinstance(event, Task | TaskStatusUpdateEvent)
    ]


def _hold(stage: Stage, holds: Callable[[Any], bool]) -> asyncio.Event:
    """Has the webhook of the first replica take its time for an event."""
    answers = asyncio.Event()

    async def before_send(task_id: str, event: Any) -> None:
        if holds(event):
            await answers.wait()

    stage[0].pushes.before_send = before_send
    return answers


# A message that comes for a task whose replica is gone.


@pytest.mark.parametrize('end', ['dies', 'drains'])
async def test_a_message_takes_not_the_place_of_a_turn_that_runs_again(
    stage: Stage, end: str
):
    said: list[tuple[str, Any]] = []

    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        text = desk.context.get_user_input()
        said.append((text, lease.checkpoint))
        if text == 'hello':
            await desk.task()
            await desk.status(INPUT_REQUIRED)
        elif text == 'answer' and lease.checkpoint is None:
            await lease.save_checkpoint('half')
            await forever()
        else:
            await desk.status(INPUT_REQUIRED)

    # The message looks for the task more often than the sweep.
    await stage.open(
        script,
        settings=dataclasses.replace(AT_ONCE, acquire_timeout=30),
        size=3,
    )
    paused = await stage[0].handler.on_message_send(message(), call())
    spawn(stage, message('answer', task=paused))
    await stage.until_began(2)
    await _until_checkpoint(stage, paused.id)
    following = spawn(stage, message('follow-up', task=paused), 1)
    await (stage.kill() if end == 'dies' else stage.close())
    assert (await following).status.state == INPUT_REQUIRED
    assert said == [
        ('hello', None),
        ('answer', None),
        ('answer', 'half'),
        ('follow-up', None),
    ]
    stored = await stage[1].stored(paused.id)
    assert [m.parts[0].text for m in stored.history] == [
        'hello',
        'answer',
        'follow-up',
    ]


async def _until_checkpoint(stage: Stage, task_id: str) -> None:
    async def saved():
        lease = await stage[0].lease(task_id)
        kept = await stage.service.leases.stored_turn(
            'agent', task_id, token=lease.token
        )
        return kept is not None and kept.checkpoint is not None

    await until(saved)


async def test_a_message_that_lost_a_race_makes_way_for_the_recovery(
    stage: Stage,
):
    """It had passed admission; the re-run must not wait behind it."""

    async def script(desk: Desk, run: int) -> None:
        text = desk.context.get_user_input()
        if text == 'hello':
            await desk.task()
        elif text == 'answer' and current_lease().attempt == 1:
            await forever()
        await desk.status(INPUT_REQUIRED)

    await stage.open(
        script, settings=dataclasses.replace(AT_ONCE, acquire_timeout=600)
    )
    paused = await stage[0].handler.on_message_send(message(), call())
    store = stage[1].handler._turns.store
    arrives, goes_on = asyncio.Event(), asyncio.Event()
    plain = store.acquire

    async def acquire(request):
        arrives.set()
        await goes_on.wait()
        return await plain(request)

    store.acquire = acquire
    try:
        following = spawn(stage, message('follow-up', task=paused), 1)
        await arrives.wait()
        # The lease is taken on another replica, which dies.
        store.acquire = plain
        spawn(stage, message('answer', task=paused))
        await stage.until_began(2)
        await stage.kill()

        async def claimed():
            lease = await stage[0].lease(paused.id)
            return lease.token > 2

        await until(claimed)
    finally:
        store.acquire = plain
        goes_on.set()
    await stage.until_began(4)
    assert (await following).status.state == INPUT_REQUIRED
    stored = await stage[1].stored(paused.id)
    assert [m.parts[0].text for m in stored.history] == [
        'hello',
        'answer',
        'follow-up',
    ]


@pytest.mark.parametrize('end', ['dies', 'drains', 'goes on'])
async def test_no_message_is_lost_behind_another(stage: Stage, end: str):
    """Two come at once for one task: both run, or are refused."""
    go_on = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
        elif run == 2:
            await desk.status(WORKING)
            await go_on.wait()
        await desk.status(INPUT_REQUIRED)

    await stage.open(
        script, settings=dataclasses.replace(AT_ONCE, acquire_timeout=30)
    )
    paused = await stage[0].handler.on_message_send(message(), call())
    both = [spawn(stage, message(text, task=paused)) for text in ('one', 'two')]
    await stage.until_began(2)
    if end == 'dies':
        await stage.kill()
    elif end == 'drains':
        await stage.close()
    go_on.set()
    answers = await asyncio.gather(*both, return_exceptions=True)
    stored = await stage[1].stored(paused.id)
    kept = [m.parts[0].text for m in stored.history]
    for text, answer in zip(('one', 'two'), answers, strict=True):
        if isinstance(answer, Exception):
            assert 'shutting down' in str(answer)
        else:
            assert answer.status.state == INPUT_REQUIRED
            assert text in kept


# What a stream has shown when its turn is lost.


async def test_an_event_that_is_stuck_in_a_webhook_is_not_skipped(
    stage: Stage,
):
    """It was saved; its replica is declared dead before anyone was told."""

    class Fails(RecoveryPolicy):
        def decide(self, lease, task):
            return Fail('no more')

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.artifact('0')
        await desk.artifact('1', append=True)
        await forever()

    await stage.open(script, policy=Fails())
    _hold(
        stage,
        lambda event: (
            isinstance(event, TaskArtifactUpdateEvent)
            and event.artifact.parts[0].text == '1'
        ),
    )
    events, listening = _listen(stage)
    await stage.until_produced(2)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    assert _told(events) == ['0', '1']
    assert _states(events)[-1] == FAILED


async def test_a_pause_that_is_stuck_in_a_webhook_ends_its_stream(
    stage: Stage,
):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.status(INPUT_REQUIRED)

    await stage.open(script)
    _hold(
        stage,
        lambda event: (
            isinstance(event, TaskStatusUpdateEvent)
            and event.status.state == INPUT_REQUIRED
        ),
    )
    events, listening = _listen(stage)
    await stage.until_state(INPUT_REQUIRED)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    assert _states(events)[-1] == INPUT_REQUIRED


async def test_what_a_zombie_reads_again_was_not_shown_to_its_client(
    stage: Stage,
):
    """Its save meets the task of the new owner before it knows of its loss."""
    zombie_goes_on, new_goes_on = asyncio.Event(), asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await desk.status(WORKING)
            await desk.artifact('0')
            await zombie_goes_on.wait()
            await desk.artifact('from the zombie', append=True)
            await forever()
        await desk.artifact('1', append=True)
        await desk.artifact('2', append=True)
        await new_goes_on.wait()
        await desk.status(COMPLETED)

    await stage.open(script)
    events, listening = _listen(stage)
    await stage.until_produced(1)
    # It learns of its loss from the save, not from its heartbeat.
    heartbeat = stage[0].handler._replica._heartbeat
    heartbeat._listener = _Deaf(heartbeat._listener)
    await stage.kill()
    await stage.until_produced(3)
    zombie_goes_on.set()
    await until(lambda: _true('2' in _told(events)))
    new_goes_on.set()
    await asyncio.wait_for(listening, 20)
    assert _told(events) == ['0', '1', '2']
    assert _states(events)[-1] == COMPLETED


class _Deaf:
    """Hears nothing of a session that is lost."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def session_lost(self, session: Any) -> None:
        pass


@pytest.mark.parametrize('kind', ['returns', 'is left'])
async def test_a_turn_that_ends_without_an_event_ends_its_streams(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr('a2a_lease.handler._LOOK_EVERY', 0.1)

    class Leaves(RecoveryPolicy):
        def decide(self, lease, task):
            return Leave()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()

    await stage.open(
        script, policy=Leaves() if kind == 'is left' else ReExecute()
    )
    events, listening = _listen(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    assert _states(events)[-1] == WORKING


# Attempts that come to nothing.


async def test_a_turn_that_never_begins_again_fails_after_its_budget(
    stage: Stage,
):
    class OnlyOnce(SimpleRequestContextBuilder):
        built = 0

        async def build(self, *args, **kwargs):
            OnlyOnce.built += 1
            if OnlyOnce.built > 1:
                raise KeyError('a header that is not there any more')
            return await super().build(*args, **kwargs)

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    await stage.open(
        script,
        policy=ReExecute(max_attempts=3, backoff=0.01),
        request_context_builder=OnlyOnce(),
    )
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    assert (await sending).status.state == FAILED
    assert OnlyOnce.built == 3
    task = await stage[1].stored(stage.task_ids[0])
    assert task.metadata['a2a_lease']['attempt'] == 3
    await stage.until_free()


# Webhooks and neighbours that are slow.


async def test_that_a_turn_runs_again_is_told_once(stage: Stage):
    """Though what follows the event meets an outage."""

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await desk.status(WORKING)
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script, policy=ReExecute(backoff=0.0))
    events, listening = _listen(stage)
    await stage.until_state(WORKING)
    store = stage.service.leases
    move, lost = store.move, []

    async def move_or_lose(*which: Any, **how: Any) -> bool:
        if how['state'] is LeaseState.RUNNING and len(lost) < 2:
            lost.append(which)
            raise ConnectionResetError('lost')
        return await move(*which, **how)

    store.move = move_or_lose
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    assert len(lost) == 2
    assert _states(events)[-1] == COMPLETED
    told = [
        event
        for event in events
        if isinstance(event, TaskStatusUpdateEvent)
        and 'a2a_lease' in event.metadata
    ]
    tasks = [event for event in events[1:] if isinstance(event, Task)]
    assert len(told) + len(tasks) == 1


async def test_a_webhook_does_not_hold_up_a_turn_that_runs_again(
    stage: Stage,
):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script)
    answers = asyncio.Event()

    async def before_send(task_id: str, event: Any) -> None:
        if event.metadata:
            await answers.wait()

    for replica in stage.replicas:
        replica.pushes.before_send = before_send
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await stage.until_began(2)
    task_id = stage.task_ids[0]
    ran = next(
        replica
        for replica in stage.replicas
        if replica.handler._push.is_sending(task_id)
    )
    # What the turn says waits behind it.
    await until(lambda: _true(ran.handler._push._sending[task_id] == 2))
    answers.set()
    assert (await sending).status.state == COMPLETED
    await stage.until_free()
    # The webhook is told in the order in which it happened.
    assert ran.pushes.states(task_id)[-3:] == [WORKING, WORKING, COMPLETED]
    assert ran.pushes.sent[-3][1].metadata


def _neighbours(stage: Stage, released: asyncio.Event) -> Any:
    """A script: one ignores its cancellation, others end at their second run."""

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if desk.context.get_user_input() == 'stubborn':
            await stubbornly(released)
        elif stage.task_ids.count(desk.task_id) == 1:
            await forever()
        await desk.status(COMPLETED)

    return script


async def test_a_hand_over_waits_for_no_stubborn_neighbour(stage: Stage):
    released = asyncio.Event()
    await stage.open(
        _neighbours(stage, released),
        settings=dataclasses.replace(AT_ONCE, stop_timeout=60),
    )
    spawn(stage, message('stubborn'))
    await stage.until_began(1)
    spawn(stage, message('obedient'))
    await stage.until_began(2)
    await stage.until_state(WORKING)
    draining = asyncio.ensure_future(stage.close())
    await stage.until_began(3)
    assert not draining.done()
    assert stage.task_ids[2] == stage.task_ids[1]
    released.set()
    await draining


async def test_a_replica_takes_not_back_what_it_hands_over(stage: Stage):
    """Its sweep goes on while it waits for an agent that does not stop."""
    released = asyncio.Event()
    await stage.open(
        _neighbours(stage, released),
        policy=FailAbandoned(),
        settings=dataclasses.replace(AT_ONCE, stop_timeout=2),
        size=1,
    )
    spawn(stage, message('stubborn'))
    await stage.until_began(1)
    spawn(stage, message('obedient'))
    await stage.until_began(2)

    async def works():
        return await stage[0].state(stage.task_ids[1]) == WORKING

    await until(works)
    await stage.close()
    lease = await stage[0].lease(stage.task_ids[1])
    states = {s.id: s.state for s in await stage.service.leases.sessions()}
    assert states[lease.session_id] is SessionState.CLOSED
    assert lease.token == 1
    assert await works()
    released.set()
    await stage[0].handler._replica.close(timeout=5)


async def test_what_is_about_to_run_again_is_handed_over(stage: Stage):
    """Its replica shuts down between the takeover and the run."""
    released = asyncio.Event()
    await stage.open(_neighbours(stage, released), size=1)
    first = stage[0]
    settings = dataclasses.replace(AT_ONCE, stop_timeout=0.5)
    second = await stage.service.replica(
        first.agent, settings=settings, recovery=ReExecute()
    )
    # Its session lives on after the shutdown, with an agent that does too.
    stubborn = asyncio.ensure_future(
        second.handler.on_message_send(message('stubborn'), call())
    )
    stage.service.clients.append(stubborn)
    await stage.until_began(1)
    reached = asyncio.Event()

    async def run_turn(turn, record):
        reached.set()
        await forever()

    second.handler._recovery._run_turn = run_turn
    spawn(stage)
    await stage.until_began(2)
    await first.handler.drain(timeout=0)
    await reached.wait()
    await second.handler.drain(timeout=0)
    third = await stage.service.replica(
        first.agent, settings=AT_ONCE, recovery=ReExecute()
    )

    async def completed():
        return await third.state(stage.task_ids[1]) == COMPLETED

    await until(completed)
    released.set()
    await second.handler._replica.close(timeout=5)


async def test_turns_that_are_delayed_count_among_those_that_run_again(
    stage: Stage,
):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    await stage.open(
        script,
        policy=ReExecute(backoff=600),
        settings=dataclasses.replace(AT_ONCE, run_again_limit=2),
    )
    for _ in range(6):
        spawn(stage)
    await stage.until_began(6)

    async def claimed() -> list[str]:
        return [
            lease.task_id
            for lease in await stage.service.leases.leases()
            if lease.state is LeaseState.RECOVERING
        ]

    # Every turn died twice, so that it is run again after a while.
    async with stage.service.engine.begin() as connection:
        await connection.exec_driver_sql(
            'UPDATE a2a_lease_leases SET attempt = 2'
        )
    await stage.kill()
    # Both replicas take two each, and leave the rest.
    await until(lambda: _count(claimed, 4))
    await stage.service.beats(stage[1], 5)
    assert len(await claimed()) == 4


async def _count(what: Callable[[], Any], number: int) -> bool:
    return len(await what()) >= number


# What an agent says at first.


async def test_the_first_task_event_of_a_run_brings_what_it_says(
    stage: Stage,
):
    def said(text: str) -> Message:
        return Message(
            message_id=text, role=Role.ROLE_AGENT, parts=[Part(text=text)]
        )

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await forever()
        assert desk.context.message is not None
        await desk.queue.enqueue_event(
            Task(
                id=desk.task_id,
                context_id=desk.context_id,
                status=TaskStatus(state=SUBMITTED, message=said('I begin')),
                history=[desk.context.message, said('I understood')],
            )
        )
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_began(1)
    await stage.kill()
    task = await sending
    assert task.status.state == COMPLETED
    assert [m.parts[0].text for m in task.history] == [
        'hello',
        'I understood',
        'I begin',
    ]


async def test_agent_s_messages_without_ids_are_told_apart(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
        elif run == 3:
            await desk.status(WORKING)
            await forever()
        status = TaskStatus(state=INPUT_REQUIRED)
        status.message.role = Role.ROLE_AGENT
        status.message.parts.add(text=f'question {run}')
        await desk.queue.enqueue_event(
            TaskStatusUpdateEvent(
                task_id=desk.task_id,
                context_id=desk.context_id,
                status=status,
            )
        )

    await stage.open(script)
    handler = stage[0].handler
    task = await handler.on_message_send(message('hello'), call())
    task = await handler.on_message_send(message('yes', task=task), call())
    sending = spawn(stage, message('yes', task=task))
    await stage.until_state(WORKING)
    await stage.kill()
    await sending
    seen = [
        [m.parts[0].text for m in context.history]
        for context in stage.contexts[2:4]
    ]
    assert seen[0] == seen[1]


async def test_the_last_checkpoint_is_the_one_that_is_stored(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await asyncio.gather(
                *(lease.save_checkpoint(number) for number in range(20))
            )
            stage.contexts.append(lease.checkpoint)
            await forever()
        stage.contexts.append(lease.checkpoint)
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    await until(lambda: _true(len(stage.contexts) == 2))
    await stage.kill()
    assert (await sending).status.state == COMPLETED
    assert stage.contexts[1] == stage.contexts[3] == 19


async def test_a_client_that_wants_no_history_gets_none(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script)
    request = message()
    request.configuration.history_length = 0
    events, listening = _listen(stage, request)
    await stage.until_state(WORKING)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    tasks = [event for event in events if isinstance(event, Task)]
    assert tasks
    assert not any(task.history for task in tasks)
    assert CANCELED not in _states(events)
