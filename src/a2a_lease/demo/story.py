"""What happens in the demo, and what must be seen."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from a2a.client import ClientConfig, create_client
from a2a.types.a2a_pb2 import (
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskPushNotificationConfig,
    TaskState,
)

from a2a_lease.demo.local_http import local_client


if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from a2a.client import Client

    from a2a_lease.demo.processes import ServerProcess
    from a2a_lease.demo.report import Report


_CHAPTERS_TOLD = 3
_AT_LEAST = 1.0
"""Seconds for which something is awaited in any case."""
_CHAPTERS = 16
"""How many the task of the killed replica has, if it runs again."""


@dataclass
class Party:
    """Somebody who hears of a task, and what they heard."""

    name: str
    report: Report
    states: list[int] = field(default_factory=list)
    task_id: str = ''
    chapters: int = 0
    written: set[str] = field(default_factory=set)
    """The chapters that are in the task, as this party has put it together."""
    again_at: float | None = None
    began_again_with: str = ''
    completed_at: float | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    failed_at: float | None = None

    def hears(self, response: StreamResponse) -> None:
        """Takes in one event."""
        kind = response.WhichOneof('payload')
        if kind == 'artifact_update':
            self.chapters += 1
            self.task_id = response.artifact_update.task_id
            text = response.artifact_update.artifact.parts[0].text
            self.written.add(text)
            if self.again_at is not None and not self.began_again_with:
                self.began_again_with = text
                self.report.says(self.name, text)
            elif self.chapters <= _CHAPTERS_TOLD:
                self.report.says(self.name, text)
            elif self.chapters == _CHAPTERS_TOLD + 1:
                self.report.says(self.name, '...', 'and so on')
        elif kind in ('status_update', 'task'):
            status = getattr(response, kind).status
            if not self.states or status.state != self.states[-1]:
                said = ''.join(part.text for part in status.message.parts)
                self.report.says(self.name, named(status.state), said)
            self.states.append(status.state)
            if kind == 'task':
                self.written |= _chapters(response.task)
            if (
                'a2a_lease' in getattr(response, kind).metadata
                and status.state == TaskState.TASK_STATE_WORKING
            ):
                self.again_at = time.monotonic()
                self.report.says(self.name, 'runs again', 'on another replica')
            if status.state == TaskState.TASK_STATE_COMPLETED:
                self.completed_at = time.monotonic()
            if status.state == TaskState.TASK_STATE_FAILED:
                self.failed_at = time.monotonic()
        self.heard.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what was heard fulfils a condition."""
        while not condition():
            self.heard.clear()
            await self.heard.wait()


def named(state: int) -> str:
    """Returns a task state as people write it."""
    return TaskState.Name(state).removeprefix('TASK_STATE_')


def ask(text: str, *, task: Task | None = None, push_to: str = '') -> Any:
    """Makes a message to the agent."""
    request = SendMessageRequest(
        message=Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_USER,
            task_id=task.id if task else '',
            context_id=task.context_id if task else '',
            parts=[Part(text=text)],
        )
    )
    if push_to:
        request.configuration.task_push_notification_config.CopyFrom(
            TaskPushNotificationConfig(id='webhook', url=push_to)
        )
    return request


async def connect(server: ServerProcess, *, streaming: bool = True) -> Client:
    """Makes a client of one replica, as the SDK has it."""
    return await create_client(
        server.url,
        ClientConfig(
            streaming=streaming,
            httpx_client=local_client(timeout=60.0),
        ),
    )


async def listen(
    party: Party, events: AsyncIterator[StreamResponse]
) -> str | None:
    """Lets a party hear a stream to its end.

    Returns:
        What broke it, or None if it ended well.
    """
    try:
        async for response in events:
            party.hears(response)
    except Exception as error:  # noqa: BLE001 - that it breaks is the point
        party.report.says(party.name, 'stream broke', type(error).__name__)
        return type(error).__name__
    return None


class Story:
    """Three replicas, three tasks, one kill."""

    def __init__(
        self,
        replicas: list[ServerProcess],
        *,
        webhook_url: str,
        webhook: Party,
        report: Report,
        patience: float,
        goes_on: bool,
    ) -> None:
        """Sets the scene.

        Args:
            replicas: A, B and C; they serve already.
            webhook_url: Where the webhook listens.
            webhook: What it hears.
            report: Where everything is told.
            patience: Seconds after the kill after which nothing is awaited
                any more.
            goes_on: Whether the task of the killed replica runs again.
        """
        self._a, self._b, self._c = replicas
        self._webhook_url = webhook_url
        self._webhook = webhook
        self._report = report
        self._patience = patience
        self._until = 0.0
        self._goes_on = goes_on

    async def play(self) -> None:
        """Plays it, and reports each expectation as met or missed."""
        report = self._report
        at_a, at_b = await connect(self._a), await connect(self._b)
        at_c = await connect(self._c, streaming=False)
        client = Party('client of A', report)
        subscriber = Party('subscriber at B', report)
        long = Party('client of B', report)

        paused = await _only_task(
            (await connect(self._a, streaming=False)).send_message(
                ask('ask first')
            )
        )
        report.tells(f'Task P is paused on A: {named(paused.status.state)}.')
        long_stream = asyncio.ensure_future(
            listen(long, at_b.send_message(ask('40')))
        )
        await long.until(lambda: long.chapters >= 1)
        report.tells('Task L is a long one, on B.')
        client_stream = asyncio.ensure_future(
            listen(
                client,
                at_a.send_message(
                    ask(
                        str(_CHAPTERS if self._goes_on else 1000),
                        push_to=self._webhook_url,
                    )
                ),
            )
        )
        await client.until(lambda: client.chapters >= 1)
        task_id = client.task_id
        subscription = asyncio.ensure_future(
            listen(
                subscriber,
                at_b.subscribe(SubscribeToTaskRequest(id=task_id)),
            )
        )
        await subscriber.until(lambda: subscriber.chapters >= 1)
        report.tells('Task V works on A, with a subscriber and a webhook.')

        report.kills(self._a.name, self._a.pid)
        killed_at = time.monotonic()
        self._a.kill()
        self._until = killed_at + self._patience
        broke = await client_stream
        report.expects('the stream of its own client breaks', broke)

        tells = self._run_again if self._goes_on else self._failed
        await tells(killed_at, subscription, subscriber, at_c, task_id)
        await self._nothing_else(at_c, paused, long, long_stream)

    async def _run_again(
        self,
        killed_at: float,
        subscription: Awaitable[str | None],
        subscriber: Party,
        at_c: Client,
        task_id: str,
    ) -> None:
        report = self._report
        webhook = self._webhook
        await self._within(subscription)
        report.expects(
            'the task runs again elsewhere, from where it had come to',
            webhook.began_again_with not in ('', 'Chapter 1'),
            seen=webhook.began_again_with,
            after=_since(killed_at, webhook.again_at),
        )
        report.expects(
            'a subscriber on another replica gets the rest on the same stream',
            len(subscriber.written) == _CHAPTERS
            and subscriber.states[-1] == TaskState.TASK_STATE_COMPLETED,
            seen=f'{len(subscriber.written)} of {_CHAPTERS} chapters',
            after=_since(killed_at, subscriber.completed_at),
        )
        pushed = await self._within(
            webhook.until(lambda: webhook.completed_at is not None)
        )
        report.expects(
            'the webhook is told COMPLETED, once, and never FAILED',
            pushed
            and _count_failed(webhook) == 0
            and webhook.states.count(TaskState.TASK_STATE_COMPLETED) == 1,
            after=_since(killed_at, webhook.completed_at),
        )
        task = await at_c.get_task(GetTaskRequest(id=task_id))
        details = dict(task.metadata).get('a2a_lease')
        attempt = int(details['attempt']) if details is not None else 1
        report.expects(
            'GetTask on a third replica says COMPLETED at the second attempt',
            task.status.state == TaskState.TASK_STATE_COMPLETED
            and attempt == 2  # noqa: PLR2004
            and len(task.artifacts) == len(_chapters(task)) == _CHAPTERS,
            seen=f'{named(task.status.state)}, attempt {attempt}',
        )

    async def _failed(
        self,
        killed_at: float,
        subscription: Awaitable[str | None],
        subscriber: Party,
        at_c: Client,
        task_id: str,
    ) -> None:
        report = self._report
        failed = await self._within(subscription)
        report.expects(
            'a subscriber on another replica gets FAILED, and its stream ends',
            failed and _count_failed(subscriber) == 1,
            after=_since(killed_at, subscriber.failed_at),
        )
        webhook = self._webhook
        pushed = await self._within(
            webhook.until(lambda: webhook.failed_at is not None)
        )
        report.expects(
            'the webhook is told FAILED, once',
            pushed and _count_failed(webhook) == 1,
            after=_since(killed_at, webhook.failed_at),
        )
        task = await at_c.get_task(GetTaskRequest(id=task_id))
        details = dict(task.metadata).get('a2a_lease')
        reason = details['reason'] if details is not None else ''
        report.expects(
            'GetTask on a third replica says FAILED, and why',
            task.status.state == TaskState.TASK_STATE_FAILED
            and reason == 'replica_lost',
            seen=f'{named(task.status.state)} {reason}',
        )

    async def _nothing_else(
        self,
        at_c: Client,
        paused: Task,
        long: Party,
        long_stream: Awaitable[str | None],
    ) -> None:
        report = self._report
        now = await at_c.get_task(GetTaskRequest(id=paused.id))
        report.expects(
            'the paused task is untouched',
            now.status == paused.status,
            seen=named(now.status.state),
        )
        answered = await _only_task(
            at_c.send_message(ask('2', task=paused)),
        )
        report.expects(
            'it takes its answer on another replica, and completes',
            answered.status.state == TaskState.TASK_STATE_COMPLETED
            and len(answered.artifacts) == 2,  # noqa: PLR2004
            seen=named(answered.status.state),
        )
        await self._while_it_is_heard(long, asyncio.ensure_future(long_stream))
        report.expects(
            'the long turn elsewhere completes, undisturbed',
            long.states[-1] == TaskState.TASK_STATE_COMPLETED
            and long.chapters == 40,  # noqa: PLR2004
            seen=f'{named(long.states[-1])}, {long.chapters} chapters',
        )

    async def _while_it_is_heard(
        self, party: Party, stream: asyncio.Future[str | None]
    ) -> None:
        # However slow the machine is.
        heard = -1
        while not stream.done() and party.chapters > heard:
            heard = party.chapters
            await asyncio.wait({stream}, timeout=self._patience)

    async def _within(self, waited: Awaitable[Any]) -> bool:
        left = self._until - time.monotonic()
        try:
            await asyncio.wait_for(waited, max(_AT_LEAST, left))
        except TimeoutError:
            return False
        return True


def _count_failed(party: Party) -> int:
    return party.states.count(TaskState.TASK_STATE_FAILED)


def _since(killed_at: float, moment: float | None) -> float | None:
    return moment - killed_at if moment is not None else None


def _chapters(task: Task) -> set[str]:
    return {part.text for a in task.artifacts for part in a.parts}


async def _only_task(events: AsyncIterator[StreamResponse]) -> Task:
    async for response in events:
        return response.task
    raise RuntimeError('There was no answer.')
