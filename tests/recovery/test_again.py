"""Turns that run again: the same turn, counted, fenced, and on one stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from a2a.types.a2a_pb2 import (
    Artifact,
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskPushNotificationConfig,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from cryptography.fernet import Fernet

from a2a_lease import (
    DatabaseLeaseStore,
    Fail,
    FailAbandoned,
    LeaseLostError,
    Leave,
    ReExecute,
    RecoveryPolicy,
    RunAgain,
    current_lease,
)
from a2a_lease.model import LeaseState, SessionState
from a2a_lease.replica.session import LiveSession
from a2a_lease.turns.record import TurnRecord
from support.inprocess import (
    AUTH_REQUIRED,
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
    from support.inprocess import Service


# The same turn.


@pytest.mark.parametrize('moment', ['before', 'created', 'working', 'produced'])
async def test_a_new_task_runs_again(stage: Stage, moment: str):
    async def script(desk: Desk, run: int) -> None:
        if run == 1 and moment == 'before':
            stage.task_ids.append(desk.task_id)
            await forever()
        await desk.task()
        if run == 1 and moment == 'created':
            await forever()
        await desk.status(WORKING)
        if run == 1 and moment == 'working':
            await forever()
        kept = current_lease().stored_task
        if kept is not None and kept.artifacts:
            await desk.artifact('two', append=True)
        else:
            await desk.artifact('one')
            if run == 1:
                await forever()
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    if moment == 'before':
        await until(lambda: _is(stage.task_ids))
    elif moment == 'produced':
        await stage.until_produced(1)
    else:
        await stage.until_state(SUBMITTED if moment == 'created' else WORKING)
    await stage.kill()
    task = await stage.until_state(COMPLETED)
    assert stage.began == [1, 2]
    # One that was declared dead learns of it with its next beat.
    await until(lambda: _is(stage.stopped == [1]))
    # An agent that asks whether its task is new takes the same branch.
    assert stage.contexts == [None, None]
    assert texts(task) == (['one', 'two'] if moment == 'produced' else ['one'])
    assert len(task.history) == 1
    assert task.metadata['a2a_lease']['attempt'] == 2
    # Whoever waits at the replica that lost it gets the outcome.
    assert (await sending).status.state == COMPLETED
    await stage.until_free()
    assert not await stage.service.leases.leases()


async def _is(value: Any) -> Any:
    return value


@pytest.mark.parametrize('paused', [INPUT_REQUIRED, AUTH_REQUIRED])
@pytest.mark.parametrize('moment', ['before', 'flushed', 'working'])
async def test_a_resumed_turn_runs_again(
    stage: Stage, paused: int, moment: str
):
    """The answer is not lost, and the question is there as it was."""

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await _ask(desk, paused)
            return
        assert desk.context.current_task.status.state == paused
        if run == 2 and moment == 'before':
            await forever()
        await desk.artifact(desk.context.get_user_input())
        if run == 2 and moment == 'flushed':
            await forever()
        await desk.status(WORKING)
        if run == 2 and moment == 'working':
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script)
    asked = await stage[0].handler.on_message_send(message('hello'), call())
    assert asked.status.state == paused
    answering = spawn(stage, message('the answer', task=asked))
    if moment == 'before':
        await stage.until_began(2)
    elif moment == 'flushed':
        await stage.until_produced(1)
    else:
        await stage.until_state(WORKING)
    await stage.kill()
    task = await stage.until_state(COMPLETED)
    assert stage.began == [1, 1, 2]
    first, second = stage.contexts[1:]
    assert second.status == first.status
    assert second.status.message.parts[0].text == 'which?'
    assert list(second.history) == list(first.history)
    assert texts(task) == ['the answer']
    said = [m.parts[0].text for m in task.history]
    assert said == ['hello', 'which?', 'the answer']
    assert (await answering).status.state == COMPLETED
    await stage.until_free()


async def _ask(desk: Desk, state: int = INPUT_REQUIRED) -> None:
    await desk.queue.enqueue_event(
        TaskStatusUpdateEvent(
            task_id=desk.task_id,
            context_id=desk.context_id,
            status=TaskStatus(
                state=state,
                message=Message(
                    message_id=uuid.uuid4().hex,
                    role=Role.ROLE_AGENT,
                    parts=[Part(text='which?')],
                ),
            ),
        )
    )


async def test_the_request_is_the_same(stage: Stage):
    seen = []

    async def script(desk: Desk, run: int) -> None:
        context = desk.context
        seen.append(
            (
                context.message.SerializeToString(deterministic=True),
                context.configuration.history_length,
                list(context.configuration.accepted_output_modes),
                context.metadata,
                context.tenant,
                context.requested_extensions,
                context.call_context.user.user_name,
            )
        )
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script)
    request = message('words')
    request.configuration.history_length = 7
    request.configuration.accepted_output_modes.append('text/plain')
    request.configuration.return_immediately = True
    request.metadata.update({'why': ['because', 1]})
    context = call()
    context.tenant = 'acme'
    context.requested_extensions.add('urn:x')
    await stage[0].handler.on_message_send(request, context)
    await stage.until_state(WORKING)
    await stage.kill()
    await stage.until_state(COMPLETED)
    assert seen[0] == seen[1]


async def test_an_idle_turn_of_a_dead_replica_runs_again(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await desk.status(WORKING)
            return
        await desk.status(COMPLETED)

    await stage.open(script)
    await stage[0].handler.on_message_send(message(), call())

    async def idle():
        leases = await stage.service.leases.leases()
        return [x for x in leases if x.state is LeaseState.IDLE]

    await until(idle)
    await stage.kill()
    await stage.until_state(COMPLETED)
    # Its agent had returned: nothing crashed.
    assert stage.began == [1, 1]


# What an agent may say the second time.


async def test_a_message_completes_a_task_that_was_to_be_new(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            stage.task_ids.append(desk.task_id)
            await forever()
        await desk.reply('plainly')

    await stage.open(script)
    sending = spawn(stage)
    await until(lambda: _is(stage.task_ids))
    await stage.kill()
    task = await stage.until_state(COMPLETED)
    assert task.status.message.parts[0].text == 'plainly'
    assert (await sending).status.state == COMPLETED
    await stage.until_free()


async def test_a_message_leaves_a_paused_task_paused(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await _ask(desk)
        elif run == 2:
            await forever()
        elif run == 3:
            await desk.reply('plainly')
        else:
            await desk.status(COMPLETED)

    await stage.open(script)
    asked = await stage[0].handler.on_message_send(message(), call())
    answering = spawn(stage, message('answer', task=asked))
    await stage.until_began(2)
    await stage.kill()
    await answering
    task = await stage.until_state(INPUT_REQUIRED)
    assert task.status.message.parts[0].text == 'plainly'
    await stage.until_free()
    await stage[1].handler.on_message_send(message('more', task=task), call())
    await stage.until_state(COMPLETED)


async def test_a_task_event_is_not_repeated_but_what_it_brings_is_kept(
    stage: Stage,
):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await forever()
        await desk.queue.enqueue_event(
            Task(
                id=desk.task_id,
                context_id=desk.context_id,
                status=TaskStatus(state=COMPLETED),
                artifacts=[_artifact('whole')],
                metadata={'kept': True},
            )
        )

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(SUBMITTED)
    await stage.kill()
    task = await stage.until_state(COMPLETED)
    assert texts(task) == ['whole']
    assert task.metadata['kept']
    assert len(task.history) == 1
    await sending


def _artifact(text: str) -> Artifact:
    return Artifact(artifact_id='a', parts=[Part(text=text)])


async def test_an_agent_that_says_nothing_leaves_its_task_idle(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await forever()

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(SUBMITTED)
    await stage.kill()

    async def idle():
        leases = await stage.service.leases.leases()
        return [x for x in leases if x.state is LeaseState.IDLE]

    [lease] = await until(idle)
    assert lease.attempt == 2
    sending.cancel()


# Counted.


@pytest.mark.parametrize('budget', [1, 2, 3])
async def test_the_budget_is_kept_exactly(stage: Stage, budget: int):
    async def script(desk: Desk, run: int) -> None:
        if desk.context.current_task is None:
            await desk.task()
        await desk.status(WORKING)
        await forever()

    await stage.open(script, policy=ReExecute(budget, backoff=0), size=1)
    sending = spawn(stage)
    for run in range(1, budget + 1):
        await stage.until_began(run)
        await stage.until_state(WORKING)
        await stage.kill()
    task = await stage.until_state(FAILED)
    assert stage.began == list(range(1, budget + 1))
    assert f'broke off {budget} times' in task.status.message.parts[0].text
    assert (await sending).status.state == FAILED
    await stage.until_free()


async def test_a_hand_over_costs_no_attempt(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        if desk.context.current_task is None:
            await desk.task()
        await desk.status(WORKING)
        if run < 4:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script, policy=ReExecute(2), size=4)
    sending = spawn(stage)
    for run in range(1, 4):
        await stage.until_began(run)
        await stage.until_state(WORKING)
        [lease] = await stage.service.leases.leases()
        number = next(
            n
            for n, replica in enumerate(stage.replicas)
            if replica.handler._replica.session.id == lease.session_id
        )
        await stage.close(number)
        assert len(stage.stopped) == run
        del stage.replicas[number]
    await asyncio.wait({sending})
    sending.exception()
    await stage.until_state(COMPLETED)
    assert stage.began == [1, 1, 1, 1]


async def test_what_waits_to_run_again_is_left_to_others_at_a_shutdown(
    stage: Stage,
):
    """At once, though other turns still go on here."""
    busy = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if desk.context.message.parts[0].text == 'busy':
            await busy.wait()
        elif run == 1:
            await forever()
        await desk.status(COMPLETED)

    class Later(RecoveryPolicy):
        def decide(self, lease, task):
            return RunAgain(after=600)

    await stage.open(script, policy=Later(), size=1)
    other = await Stage(stage.service).open(script, policy=Later(), size=1)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    # Either of them may claim it, and waits then.
    await stage.kill()

    async def waits():
        return [
            replica
            for replica in (stage[0], other[0])
            if replica.handler._recovery._waiting
        ]

    [waiting] = await until(waits)
    this, other_one = (other, stage) if waiting is other[0] else (stage, other)
    ran = len(this.began)
    going_on = spawn(this, message('busy'))
    await this.until_began(ran + 1)
    draining = asyncio.ensure_future(waiting.handler.drain(timeout=60))
    # It was given back in good order, and does not wait again.
    await until(lambda: _is(2 in other_one.began))
    assert not draining.done()
    assert 2 not in this.began
    busy.set()
    await draining
    assert (await going_on).status.state == COMPLETED
    sending.cancel()


async def test_a_request_that_is_too_large_is_not_stored(
    stage: Stage, caplog: pytest.LogCaptureFixture
):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    await stage.open(
        script, settings=dataclasses.replace(AT_ONCE, request_limit=5_000)
    )
    sending = spawn(stage, message('secret ' * 1000))
    await stage.until_state(WORKING)
    [lease] = await stage.service.leases.leases()
    kept = await stage.service.leases.stored_turn(
        'agent', lease.task_id, token=lease.token
    )
    assert kept.turn is None
    assert 'request_limit' in caplog.text
    await stage.kill()
    task = await stage.until_state(FAILED)
    assert 'its request was not kept' in task.status.message.parts[0].text
    assert stage.began == [1]
    assert 'secret' not in caplog.text
    await sending


async def test_what_is_stored_has_no_credentials_and_goes_with_the_lease(
    stage: Stage, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, 'a2a_lease')
    go_on = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        await go_on.wait()
        await _ask(desk)

    await stage.open(script)
    request = message('private words')
    request.configuration.task_push_notification_config.CopyFrom(
        TaskPushNotificationConfig(
            id='x', url='http://hook.test/', token='push-token'
        )
    )
    sending = spawn(stage, request)
    await stage.until_state(WORKING)
    [lease] = await stage.service.leases.leases()
    kept = await stage.service.leases.stored_turn(
        'agent', lease.task_id, token=1
    )
    record = TurnRecord.load(kept.turn)
    assert record.message.parts[0].text == 'private words'
    assert not record.request.configuration.HasField(
        'task_push_notification_config'
    )
    assert b'push-token' not in record.request.SerializeToString()
    await stage.kill()
    await stage.until_began(2)
    go_on.set()
    await stage.until_state(INPUT_REQUIRED)
    await stage.until_free()
    [lease] = await stage.service.leases.leases()
    kept = await stage.service.leases.stored_turn(
        'agent', lease.task_id, token=lease.token
    )
    assert kept.turn is None
    assert 'private words' not in caplog.text
    # What the client asked for once is there once.
    configs = await stage.service.configs.get_info_for_dispatch(lease.task_id)
    assert len(configs) == 1
    # It was told how the turn ended, by whichever replica ran it again.
    pushed = [
        replica.pushes.states(lease.task_id) for replica in stage.replicas
    ]
    assert [s[-1] for s in pushed if INPUT_REQUIRED in s] == [INPUT_REQUIRED]
    await sending


async def test_nothing_is_stored_if_nothing_runs_again(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    for policy in (FailAbandoned(), ReExecute(1)):
        fresh = await Stage(stage.service).open(script, policy=policy, size=1)
        sending = spawn(fresh)
        await fresh.until_state(WORKING)
        lease = await fresh[0].lease(fresh.task_ids[0])
        kept = await stage.service.leases.stored_turn(
            'agent', lease.task_id, token=lease.token
        )
        assert kept.turn is None
        sending.cancel()


async def test_a_client_waits_for_a_task_that_is_yet_to_be_stored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr('a2a_lease.handler._LOOK_EVERY', 0.02)

    class Hesitates(RecoveryPolicy):
        def decide(self, lease, task):
            # The client looks for the task several times meanwhile.
            return RunAgain(after=1.5)

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await forever()
        await desk.task()
        await desk.status(COMPLETED)

    await stage.open(script, policy=Hesitates())
    sending = spawn(stage)
    await stage.until_began(1)
    await stage.kill()
    assert (await sending).status.state == COMPLETED


# A policy for each task.


async def test_a_policy_decides_for_each_task(stage: Stage):
    class ByMode(RecoveryPolicy):
        def decide(self, lease, task):
            assert lease.attempt == 2
            mode = task.history[0].parts[0].text
            if mode == 'again':
                return RunAgain(after=0.05)
            return Leave() if mode == 'leave' else Fail('As decided.')

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if current_lease().attempt == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script, policy=ByMode())
    sendings = [spawn(stage, message(m)) for m in ('again', 'leave', 'fail')]

    async def all_work():
        states = [await stage[1].state(i) for i in stage.task_ids]
        return states == [WORKING] * 3

    await until(all_work)
    await stage.kill()

    async def states():
        found = {}
        for task_id in set(stage.task_ids):
            task = await stage[1].stored(task_id)
            found[task.history[0].parts[0].text] = task.status.state
        return found == {'again': COMPLETED, 'leave': WORKING, 'fail': FAILED}

    await until(states)
    await stage.until_free()
    for sending in sendings:
        sending.cancel()


# How far it had come.


async def test_a_checkpoint_is_there_on_the_next_attempt(stage: Stage):
    seen = []

    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        seen.append(lease.checkpoint)
        if desk.context.current_task is None:
            await desk.task()
        for number in range((lease.checkpoint or {}).get('done', 0), 4):
            await desk.artifact(str(number), append=number > 0)
            await lease.save_checkpoint({'done': number + 1, 'ü': [None]})
            if run < 3 and number == run:
                await forever()
        assert lease.checkpoint['done'] == 4
        await desk.status(COMPLETED)

    await stage.open(script, policy=ReExecute(5, backoff=0), size=1)
    sending = spawn(stage)
    for run in (1, 2):
        await stage.until_produced(run + 1)
        await stage.kill()
    task = await stage.until_state(COMPLETED)
    assert ''.join(texts(task)) == '0123'
    assert seen == [
        None,
        {'done': 2, 'ü': [None]},
        {'done': 3, 'ü': [None]},
    ]
    await sending


async def test_a_checkpoint_that_cannot_be_is_said(stage: Stage):
    said = []

    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        for value in ('x' * 2_000_000, float('nan'), object()):
            try:
                await lease.save_checkpoint(value)
            except (ValueError, TypeError) as error:
                said.append(str(error))
        assert lease.checkpoint is None
        await desk.task()
        await desk.status(COMPLETED)

    await stage.open(script, size=1)
    await stage[0].handler.on_message_send(message(), call())
    assert 'checkpoint_limit' in said[0]
    assert len(said) == 3


async def test_a_zombie_saves_no_checkpoint(stage: Stage):
    errors = []
    fenced = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        await desk.task()
        await lease.save_checkpoint(run)
        await desk.status(WORKING)
        if run > 1:
            await forever()
        while not errors:
            with contextlib.suppress(asyncio.CancelledError):
                await fenced.wait()
                try:
                    await lease.save_checkpoint('late')
                except LeaseLostError as error:
                    errors.append(error)
                else:
                    await asyncio.sleep(0.02)

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    fenced.set()
    await until(lambda: _is(errors and len(stage.began) == 2))
    [lease] = await stage.service.leases.leases()

    async def second():
        kept = await stage.service.leases.stored_turn(
            'agent', lease.task_id, token=lease.token
        )
        return kept.checkpoint == b'2'

    await until(second)
    sending.cancel()


# Fenced.


async def test_a_zombie_that_ignores_its_cancellation_lands_nothing(
    stage: Stage,
):
    killed, end = asyncio.Event(), asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await stubbornly(killed)
            while not end.is_set():
                await desk.artifact('zombie', artifact_id='z')
                await stubbornly(end)
            return
        for number in range(10):
            await desk.artifact(str(number), append=number > 0)
            await asyncio.sleep(0.05)
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()

    async def took_over():
        task = await stage[1].stored(stage.task_ids[0])
        return len(stage.began) == 2 and 'a2a_lease' in task.metadata

    await until(took_over)
    killed.set()
    task = await stage.until_state(COMPLETED)
    assert ''.join(texts(task)) == '0123456789'
    end.set()
    assert (await sending).status.state == COMPLETED


@pytest.mark.parametrize('how', ['elsewhere', 'here'])
async def test_a_turn_that_runs_again_can_be_canceled(stage: Stage, how: str):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    await stage.open(script, size=3)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await stage.until_began(2)
    [lease] = await stage.service.leases.leases()
    runs = [
        replica.handler._replica.session.id == lease.session_id
        for replica in stage.replicas
    ]
    chosen = runs.index(how == 'here')
    await stage[chosen].handler.on_cancel_task(
        CancelTaskRequest(id=stage.task_ids[0]), call()
    )
    await until(lambda: _is(sorted(stage.stopped) == [1, 2]))
    await stage.until_free()
    assert await stage[1].state(stage.task_ids[0]) == CANCELED
    assert not await stage.service.leases.leases()
    assert (await sending).status.state == CANCELED


async def test_a_cancel_while_it_waits_to_run_again_is_for_good(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await forever()

    class Soon(RecoveryPolicy):
        def decide(self, lease, task):
            decided.set()
            return RunAgain(after=0.5)

    decided = asyncio.Event()
    await stage.open(script, policy=Soon())
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await decided.wait()
    await stage[1].handler.on_cancel_task(
        CancelTaskRequest(id=stage.task_ids[0]), call()
    )
    await stage.until_free()
    assert stage.began == [1]
    assert await stage[1].state(stage.task_ids[0]) == CANCELED
    assert (await sending).status.state == CANCELED


async def test_saves_of_a_turn_that_runs_again_ask_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    """The takeover is its own save; while beats are fresh, that is enough."""
    # On a busy machine a beat may be late.
    monkeypatch.setattr(LiveSession, 'fresh', lambda self: not self.ended)
    looks: list[Any] = []
    look = stage.service.leases.holder

    async def counted(*which: Any) -> Any:
        looks.append(which)
        return await look(*which)

    stage.service.leases.holder = counted  # type: ignore[method-assign]
    before = []

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        before.append(len(looks))
        for number in range(5):
            await desk.artifact(str(number), append=number > 0)
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await stage.until_state(COMPLETED)
    await stage.until_free()
    # The one before is recovery's, at its claim.
    assert before[0] >= 1
    assert len(looks) == before[0]
    await sending


async def test_a_zombie_does_not_run_its_own_task_again_beside_itself(
    stage: Stage,
):
    """It was declared dead, lives on, and may claim what it has left."""
    end = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await stubbornly(end)
            return
        await desk.status(COMPLETED)

    await stage.open(script, size=1)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    leases = stage.service.leases

    async def given_back():
        [lease] = await leases.leases()
        session = {s.id: s for s in await leases.sessions()}[lease.session_id]
        return session.state is SessionState.CLOSED

    await until(given_back)
    assert stage.began == [1]
    end.set()
    await stage.until_state(COMPLETED)
    assert stage.began == [1, 2]
    assert (await sending).status.state == COMPLETED


# On one stream.


@pytest.mark.parametrize('kind', ['send', 'subscribe', 'remote'])
async def test_a_client_gets_the_rest_on_the_same_stream(
    stage: Stage, kind: str
):
    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        if desk.context.current_task is None:
            await desk.task()
        if run == 1:
            await desk.status(WORKING)
        for number in range(lease.checkpoint or 0, 8):
            await desk.artifact(str(number), append=number > 0)
            await lease.save_checkpoint(number + 1)
            if run == 1 and number == 3:
                await forever()
        await desk.status(COMPLETED)

    await stage.open(script, size=3)
    events = []

    async def listen(stream) -> None:
        async for event in stream:
            events.append(event)

    if kind == 'send':
        listening = asyncio.ensure_future(
            listen(stage[0].handler.on_message_send_stream(message(), call()))
        )
    else:
        sending = spawn(stage)
        await stage.until_state(WORKING)
        number = 0 if kind == 'subscribe' else 1
        listening = asyncio.ensure_future(
            listen(
                stage[number].handler.on_subscribe_to_task(
                    SubscribeToTaskRequest(id=stage.task_ids[0]), call()
                )
            )
        )
        await until(lambda: _is(events))
    await stage.until_produced(4)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    assert events[-1].status.state == COMPLETED
    # As a client puts it together: a task replaces what was before it.
    told: list[str] = []
    for event in events:
        if isinstance(event, Task):
            told = texts(event)
        elif isinstance(event, TaskArtifactUpdateEvent):
            told += [part.text for part in event.artifact.parts]
    assert ''.join(told) == '01234567'
    pieces = [
        event.artifact.parts[0].text
        for event in events
        if isinstance(event, TaskArtifactUpdateEvent)
    ]
    assert pieces == sorted(set(pieces))
    if kind != 'send':
        await sending


async def test_what_was_saved_but_not_published_is_not_missing(stage: Stage):
    """Its owner died between the save and the publishing of an event."""

    async def script(desk: Desk, run: int) -> None:
        lease = current_lease()
        await desk.task()
        if run == 1:
            await desk.status(WORKING)
            await desk.artifact('one')
            await desk.artifact('two', append=True)
            await forever()
        assert lease.stored_task is not None
        await desk.artifact('three', append=True)
        await desk.status(COMPLETED)

    def wrap(stream):
        publish = stream.publish

        async def publish_or_not(task_id, event):
            if isinstance(event.event, TaskArtifactUpdateEvent) and (
                event.event.artifact.parts[0].text == 'two'
            ):
                return
            await publish(task_id, event)

        stream.publish = publish_or_not
        return stream

    await stage.open(script, wrap_events=wrap)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    events = []

    async def listen() -> None:
        async for event in stage[1].handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=stage.task_ids[0]), call()
        ):
            events.append(event)

    listening = asyncio.ensure_future(listen())
    await stage.until_produced(2)
    await stage.kill()
    await asyncio.wait_for(listening, 20)
    told: list[str] = []
    for event in events:
        if isinstance(event, Task):
            told = texts(event)
        elif isinstance(event, TaskArtifactUpdateEvent):
            told += [part.text for part in event.artifact.parts]
    assert told == ['one', 'two', 'three']
    await sending


async def test_the_answer_s_flush_does_not_end_a_subscription(stage: Stage):
    go_on = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        if run == 1:
            await desk.task()
            await _ask(desk)
            return
        if run == 2:
            await desk.artifact('one')
            await forever()
        await go_on.wait()
        await desk.artifact('two', artifact_id='b')
        await desk.status(COMPLETED)

    await stage.open(script, size=3)
    asked = await stage[0].handler.on_message_send(message(), call())
    answering = spawn(stage, message('answer', task=asked))
    await stage.until_began(2)
    await stage.kill()
    await stage.until_began(3)
    events = []

    async def listen(number: int) -> None:
        async for event in stage[number].handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=asked.id), call()
        ):
            events.append((number, event))

    listening = [asyncio.ensure_future(listen(n)) for n in (1, 2)]
    await until(lambda: _is({n for n, _ in events} == {1, 2}))
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*listening), 20)
    for number in (1, 2):
        mine = [event for n, event in events if n == number]
        assert mine[-1].status.state == COMPLETED
    assert (await answering).status.state == COMPLETED


# On a replica that lives.


@pytest.mark.parametrize('again', [True, False])
async def test_an_agent_that_is_silent_for_too_long(
    stage: Stage, again: bool, caplog: pytest.LogCaptureFixture
):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(
        script,
        policy=ReExecute() if again else FailAbandoned(),
        settings=dataclasses.replace(AT_ONCE, inactivity_timeout=0.5),
        size=1,
    )
    task = await asyncio.wait_for(spawn(stage), 20)
    assert task.status.state == (COMPLETED if again else FAILED)
    await until(lambda: _is(stage.stopped == [1]))
    assert stage.began == ([1, 2] if again else [1])
    details = (await stage[0].stored(task.id)).metadata['a2a_lease']
    assert details['reason'] == 'agent_silent'
    assert 'inactivity_timeout' in caplog.text
    await stage.until_free()


async def test_a_pause_and_checkpoints_are_no_silence(stage: Stage):
    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        for number in range(8):
            await current_lease().save_checkpoint(number)
            await asyncio.sleep(0.2)
        await desk.status(AUTH_REQUIRED)
        await asyncio.sleep(1.5)
        await desk.status(WORKING)
        await desk.status(COMPLETED)

    await stage.open(
        script,
        settings=dataclasses.replace(AT_ONCE, inactivity_timeout=0.8),
        size=1,
    )
    paused = await spawn(stage)
    assert paused.status.state == AUTH_REQUIRED
    await stage.until_state(COMPLETED)
    assert stage.began == [1]


async def test_a_silent_agent_that_does_not_stop_is_not_run_twice(
    stage: Stage,
):
    end = asyncio.Event()

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await stubbornly(end)

    await stage.open(
        script,
        settings=dataclasses.replace(AT_ONCE, inactivity_timeout=0.5),
        size=1,
    )
    sending = spawn(stage)
    task = await stage.until_state(FAILED)
    assert 'could not stop it' in task.status.message.parts[0].text
    assert stage.began == [1]
    end.set()
    await sending


async def test_a_turn_that_died_here_runs_again_here(stage: Stage):
    """Its consumer ended: the agent talks to nobody."""
    broken = []

    def wrap(store):
        save = store.save

        async def save_or_not(task, **rest):
            if task.artifacts and not broken:
                broken.append(task.id)
                raise ValueError('This event cannot be stored.')
            return await save(task, **rest)

        store.save = save_or_not
        return store

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.artifact('one')
        if run == 1:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script, wrap_tasks=wrap, size=1)
    sending = spawn(stage)
    task = await stage.until_state(COMPLETED)
    assert broken
    assert stage.began == [1, 2]
    await until(lambda: _is(stage.stopped == [1]))
    assert texts(task) == ['one']
    assert task.metadata['a2a_lease']['reason'] == 'turn_died'
    await asyncio.wait({sending}, timeout=20)
    assert sending.done()
    sending.exception()
    await stage.until_free()


async def test_what_is_stored_can_be_encrypted(service: Service):
    service.leases = DatabaseLeaseStore(
        service.engine, encryption_key=Fernet.generate_key()
    )
    stage = Stage(service)

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run == 1:
            await current_lease().save_checkpoint('so far')
            await forever()
        assert current_lease().checkpoint == 'so far'
        await desk.status(COMPLETED)

    await stage.open(script)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await until(lambda: _checkpointed(stage))
    await stage.kill()
    await stage.until_state(COMPLETED)
    await sending


async def _checkpointed(stage: Stage) -> bool:
    [lease] = await stage.service.leases.leases()
    kept = await stage.service.leases.stored_turn(
        'agent', lease.task_id, token=lease.token
    )
    return kept is not None and kept.checkpoint is not None


async def test_the_sessions_end_in_good_order(stage: Stage):
    """A replica that runs something again drains as any other."""

    async def script(desk: Desk, run: int) -> None:
        await desk.task()
        await desk.status(WORKING)
        if run < 3:
            await forever()
        await desk.status(COMPLETED)

    await stage.open(script, size=2)
    sending = spawn(stage)
    await stage.until_state(WORKING)
    await stage.kill()
    await stage.until_began(2)
    [lease] = await stage.service.leases.leases()
    number = next(
        n
        for n, replica in enumerate(stage.replicas)
        if replica.handler._replica.session.id == lease.session_id
    )
    await stage.close(number)
    await stage.until_state(COMPLETED)
    assert stage.began == [1, 2, 2]
    states = [s.state for s in await stage.service.leases.sessions()]
    assert SessionState.CLOSED in states
    sending.cancel()
