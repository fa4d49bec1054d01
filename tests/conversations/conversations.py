"""The list of conversations that both handlers must have alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import (
    DeleteTaskPushNotificationConfigRequest,
    GetExtendedAgentCardRequest,
    GetTaskPushNotificationConfigRequest,
    ListTaskPushNotificationConfigsRequest,
    TaskPushNotificationConfig,
    TaskState,
)

from conversations.talk import Conversation
from support.inprocess import (
    AUTH_REQUIRED,
    CANCELED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
)


if TYPE_CHECKING:
    from conversations.talk import Talk
    from support.inprocess import Desk


# What agents do.


async def writes(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await desk.artifact('one')
    await desk.artifact('two', append=True)
    await desk.status(COMPLETED)


async def replies(talk: Talk, desk: Desk) -> None:
    await desk.reply('hello yourself')


async def rejects(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(TaskState.TASK_STATE_REJECTED)


async def asks(talk: Talk, desk: Desk) -> None:
    if desk.context.current_task is None:
        await desk.task()
    await desk.status(INPUT_REQUIRED)


async def finishes(talk: Talk, desk: Desk) -> None:
    await desk.status(COMPLETED)


async def works_then_finishes(talk: Talk, desk: Desk) -> None:
    await desk.status(WORKING)
    await desk.artifact('answer')
    await desk.status(COMPLETED)


async def asks_for_login(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(AUTH_REQUIRED)


async def waits_for_login(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(AUTH_REQUIRED)
    await talk.gates['login'].wait()
    await desk.status(WORKING)
    await desk.status(COMPLETED)


async def waits(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await talk.gates['go'].wait()
    await desk.artifact('one')
    await desk.status(COMPLETED)


async def waits_on(talk: Talk, desk: Desk) -> None:
    await desk.status(WORKING)
    await talk.gates['go'].wait()
    await desk.artifact('one')
    await desk.status(COMPLETED)


async def raises(talk: Talk, desk: Desk) -> None:
    raise RuntimeError('boom')


async def raises_after_task(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await desk.artifact('one')
    raise RuntimeError('boom')


async def message_after_task(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.reply('too late')


async def task_after_message(talk: Talk, desk: Desk) -> None:
    await desk.reply('first')
    await desk.task()


async def status_without_task(talk: Talk, desk: Desk) -> None:
    await desk.status(WORKING)


async def goes_on_after_the_end(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(COMPLETED)
    await desk.status(FAILED)


async def leaves_it_working(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)


async def says_canceled(talk: Talk, desk: Desk) -> None:
    await desk.status(CANCELED)


async def task_again(talk: Talk, desk: Desk) -> None:
    await desk.task()
    await desk.status(COMPLETED)


# What is said to them.


async def send_and_get(talk: Talk) -> None:
    task = await talk.send('hi')
    if task is not None:
        await talk.get(task.id)
        await talk.get(task.id, history_length=0)
        await talk.get(task.id, at=1)
    await talk.list()


async def stream_and_get(talk: Talk) -> None:
    task = await talk.stream('hi')
    if task is not None:
        await talk.get(task.id)


async def answer_twice(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.send('first answer', task=task)
    await talk.send('second answer', task=task)
    await talk.get(task.id)
    await talk.send('after the end', task=task)


async def answer_streaming(talk: Talk) -> None:
    task = await talk.stream('hi')
    await talk.stream('first answer', task=task)
    await talk.get(task.id)


async def answer_elsewhere(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.send('first answer', task=task, at=1)
    await talk.get(task.id)


async def answer_naming_the_task_only(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.send('answer', task=task, only_task=True, at=1)
    await talk.get(task.id)


async def answer_twice_naming_the_task_only(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.send('first answer', task=task, only_task=True)
    await talk.send('second answer', task=task, only_task=True)
    await talk.get(task.id)


async def wrong_names(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.send('x', task=task, context_id='not-its-context')
    await talk.send('x', task_id='no-such-task')
    await talk.get('no-such-task')
    await talk.cancel('no-such-task')
    await talk.subscribe('no-such-task')
    await talk.send('x', message_id='')
    await talk.get('')


async def log_in(talk: Talk) -> None:
    task = await talk.send('hi')
    talk.gates['login'].set()
    await talk.until_stored(task.id, COMPLETED)
    await talk.get(task.id)


async def log_in_streaming(talk: Talk) -> None:
    streaming = asyncio.ensure_future(talk.stream('hi'))
    await talk.gates['heard stream hi'].wait()
    talk.gates['login'].set()
    await streaming


async def return_at_once(talk: Talk) -> None:
    task = await talk.send('hi', immediately=True)
    await talk.until_stored(task.id, WORKING)
    talk.gates['go'].set()
    await talk.until_stored(task.id, COMPLETED)
    await talk.get(task.id)


def subscribe_while_running(at: int):
    async def play(talk: Talk) -> None:
        task = await talk.send('hi', immediately=True)
        await talk.until_stored(task.id, WORKING)
        subscribing = asyncio.ensure_future(talk.subscribe(task.id, at=at))
        await talk.gates['heard subscribe'].wait()
        talk.gates['go'].set()
        await subscribing
        await talk.subscribe(task.id, at=at)

    return play


async def subscribe_to_a_pause_that_is_answered(talk: Talk) -> None:
    """The subscriber sits on the other replica while the answer comes."""
    task = await talk.send('hi')
    subscribing = asyncio.ensure_future(talk.subscribe(task.id, at=1))
    await talk.gates['heard subscribe'].wait()
    talk.gates['go'].set()
    await talk.send('answer', task=task)
    await subscribing


def cancel_while_running(at: int):
    async def play(talk: Talk) -> None:
        task = await talk.send('hi', immediately=True, push=True)
        await talk.until_stored(task.id, WORKING)
        await talk.cancel(task.id, at=at)
        await talk.get(task.id)
        await talk.cancel(task.id, at=at)
        await talk.until_pushed(CANCELED)

    return play


def cancel_while_paused(at: int):
    async def play(talk: Talk) -> None:
        task = await talk.send('hi', push=True)
        await talk.cancel(task.id, at=at)
        await talk.get(task.id)
        await talk.send('too late', task=task, at=at)
        await talk.until_pushed(CANCELED)

    return play


async def cancel_what_blocks(talk: Talk) -> None:
    blocking = asyncio.ensure_future(talk.send('hi'))
    async with asyncio.timeout(20):
        while True:
            page = await talk.clients[0][False].list_tasks(_list_request())
            if page.tasks and page.tasks[0].status.state == WORKING:
                break
            await asyncio.sleep(0.01)
    await talk.clients[0][False].cancel_task(_cancel_request(page.tasks[0].id))
    await blocking
    await talk.get(page.tasks[0].id)


def _list_request():
    from a2a.types.a2a_pb2 import ListTasksRequest

    return ListTasksRequest()


def _cancel_request(task_id: str):
    from a2a.types.a2a_pb2 import CancelTaskRequest

    return CancelTaskRequest(id=task_id)


async def send_with_push(talk: Talk) -> None:
    await talk.send('hi', push=True)
    await talk.until_pushed(talk.last.status.state if talk.last else FAILED)


async def fail_with_push(talk: Talk) -> None:
    await talk.send('hi', push=True)
    await talk.until_pushed(FAILED)


async def manage_push(talk: Talk) -> None:
    task = await talk.send('hi')
    await talk.call(
        'create_task_push_notification_config',
        TaskPushNotificationConfig(
            task_id=task.id, id='mine', url='http://127.0.0.1:1/hook'
        ),
    )
    get = GetTaskPushNotificationConfigRequest(task_id=task.id, id='mine')
    await talk.call('get_task_push_notification_config', get, at=1)
    await talk.call(
        'list_task_push_notification_configs',
        ListTaskPushNotificationConfigsRequest(task_id=task.id),
    )
    await talk.call(
        'delete_task_push_notification_config',
        DeleteTaskPushNotificationConfigRequest(task_id=task.id, id='mine'),
    )
    await talk.call('get_task_push_notification_config', get)
    await talk.call(
        'create_task_push_notification_config',
        TaskPushNotificationConfig(
            task_id='no-such-task', id='mine', url='http://127.0.0.1:1/hook'
        ),
    )


async def extended_card(talk: Talk) -> None:
    await talk.call('get_extended_agent_card', GetExtendedAgentCardRequest())


NOT_PUSHED = (
    'The SDK does not push what it saves itself: FAILED after an exception, '
    'and a cancel that no event of the agent brought.'
)

CONVERSATIONS = [
    Conversation('a task is written', send_and_get, [writes]),
    Conversation('a task is streamed', stream_and_get, [writes]),
    Conversation('a plain answer', send_and_get, [replies]),
    Conversation('a plain answer, streamed', stream_and_get, [replies]),
    Conversation('a rejection', send_and_get, [rejects]),
    Conversation('two questions', answer_twice, [asks, asks, finishes]),
    Conversation(
        'a question, streamed', answer_streaming, [asks, works_then_finishes]
    ),
    Conversation(
        'an answer elsewhere', answer_elsewhere, [asks, works_then_finishes]
    ),
    Conversation(
        'an answer elsewhere that names the task only',
        answer_naming_the_task_only,
        [asks, finishes],
        plain_is_wrong='It invents a context and saves the task as FAILED.',
        instead=[('get', 'TASK_STATE_COMPLETED')],
    ),
    Conversation(
        'two answers that name the task only',
        answer_twice_naming_the_task_only,
        [asks, asks, finishes],
        plain_is_wrong='The second one makes the task FAILED.',
        instead=[('get', 'TASK_STATE_COMPLETED')],
    ),
    Conversation('wrong names', wrong_names, [asks]),
    Conversation('a login', answer_twice, [asks_for_login, asks, finishes]),
    Conversation('a login out of band', log_in, [waits_for_login]),
    Conversation(
        'a login out of band, streamed', log_in_streaming, [waits_for_login]
    ),
    Conversation('an answer at once', return_at_once, [waits]),
    Conversation('a subscription', subscribe_while_running(0), [waits]),
    Conversation(
        'a subscription elsewhere', subscribe_while_running(1), [waits]
    ),
    Conversation(
        'a subscription to a pause that is answered',
        subscribe_to_a_pause_that_is_answered,
        [asks, waits_on],
        plain_is_wrong="The flush of the user's answer ends the stream.",
        instead=[('subscribe', 'TASK_STATE_COMPLETED')],
    ),
    Conversation(
        'a cancel',
        cancel_while_running(0),
        [waits],
        on_cancel=says_canceled,
    ),
    Conversation(
        'a cancel of which the agent says nothing',
        cancel_while_running(0),
        [waits],
        plain_is_wrong=NOT_PUSHED,
        instead=[('pushed', 'TASK_STATE_CANCELED')],
    ),
    Conversation(
        'a cancel elsewhere',
        cancel_while_running(1),
        [waits],
        on_cancel=says_canceled,
        plain_is_wrong=NOT_PUSHED,
        instead=[('pushed', 'TASK_STATE_CANCELED')],
    ),
    Conversation(
        'a cancel of a pause',
        cancel_while_paused(0),
        [asks],
        on_cancel=says_canceled,
    ),
    Conversation(
        'a cancel of a pause elsewhere',
        cancel_while_paused(1),
        [asks],
        plain_is_wrong=NOT_PUSHED,
        instead=[('pushed', 'TASK_STATE_CANCELED')],
    ),
    Conversation(
        'a cancel of what a client waits for',
        cancel_what_blocks,
        [waits],
        plain_is_wrong='The waiting client is told that the task works.',
        instead=[('send hi', 'TASK_STATE_CANCELED')],
    ),
    Conversation('a push of everything', send_with_push, [writes]),
    Conversation('a push of a pause', send_with_push, [asks]),
    Conversation('settings of pushes', manage_push, [asks]),
    Conversation('an exception', send_and_get, [raises_after_task]),
    Conversation('an exception, streamed', stream_and_get, [raises_after_task]),
    Conversation('an exception at once', send_and_get, [raises]),
    Conversation(
        'an exception that is pushed',
        fail_with_push,
        [raises_after_task],
        plain_is_wrong=NOT_PUSHED,
        instead=[('pushed', 'TASK_STATE_FAILED')],
    ),
    Conversation('a message after a task', send_and_get, [message_after_task]),
    Conversation('a task after a message', send_and_get, [task_after_message]),
    Conversation('a status of no task', send_and_get, [status_without_task]),
    Conversation(
        'an event after the end',
        stream_and_get,
        [goes_on_after_the_end],
        plain_is_wrong='The terminal state changes.',
        instead=[('get', 'TASK_STATE_COMPLETED')],
    ),
    Conversation(
        'a task that is left working',
        answer_twice,
        [leaves_it_working, asks, finishes],
    ),
    Conversation(
        'a task that is announced again', answer_streaming, [asks, task_again]
    ),
    Conversation('an extended card', extended_card, [asks]),
]
