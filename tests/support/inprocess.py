"""Replicas within the test's own process, over the SDK's database stores.

The databases are real; only the processes are not. What a process adds, dying
and being stopped, is tested in `tests/processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from a2a.auth.user import User
from a2a.server.agent_execution import AgentExecutor
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    VersionedDatabaseTaskStore,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.tasks import (
    InMemoryPushNotificationConfigStore,
    PushNotificationSender,
)
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    Artifact,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease import LeaseSettings, LeasedRequestHandler


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from a2a.server.agent_execution import RequestContext
    from a2a.server.events import EventQueue
    from sqlalchemy.ext.asyncio import AsyncEngine

    from a2a_lease import LeaseStore


SETTINGS = LeaseSettings(
    ttl=2,
    heartbeat_interval=0.2,
    sweep_interval=0.2,
    acquire_timeout=5,
    drain_timeout=5,
    stop_timeout=1,
)

SUBMITTED = TaskState.TASK_STATE_SUBMITTED
WORKING = TaskState.TASK_STATE_WORKING
COMPLETED = TaskState.TASK_STATE_COMPLETED
FAILED = TaskState.TASK_STATE_FAILED
CANCELED = TaskState.TASK_STATE_CANCELED
INPUT_REQUIRED = TaskState.TASK_STATE_INPUT_REQUIRED
AUTH_REQUIRED = TaskState.TASK_STATE_AUTH_REQUIRED


class NamedUser(User):
    """A user who logged in."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return True

    @property
    def user_name(self) -> str:
        return self._name


def call(user: str = 'ada', **state: Any) -> ServerCallContext:
    return ServerCallContext(user=NamedUser(user), state=dict(state))


def message(
    text: str = 'hello', *, task: Task | str | None = None, context: str = ''
) -> SendMessageRequest:
    task_id = task.id if isinstance(task, Task) else (task or '')
    if isinstance(task, Task) and not context:
        context = task.context_id
    return SendMessageRequest(
        message=Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_USER,
            task_id=task_id,
            context_id=context,
            parts=[Part(text=text)],
        )
    )


class Desk:
    """What an agent script has at hand."""

    def __init__(self, context: RequestContext, queue: EventQueue) -> None:
        self.context = context
        self.queue = queue
        self.task_id = context.task_id or ''
        self.context_id = context.context_id or ''

    async def task(self, state: int = SUBMITTED) -> None:
        assert self.context.message is not None
        await self.queue.enqueue_event(
            Task(
                id=self.task_id,
                context_id=self.context_id,
                status=TaskStatus(state=state),
                history=[self.context.message],
            )
        )

    async def status(
        self, state: int, *, timestamp_seconds: int | None = None
    ) -> None:
        status = TaskStatus(state=state)
        if timestamp_seconds is not None:
            status.timestamp.FromSeconds(timestamp_seconds)
        await self.queue.enqueue_event(
            TaskStatusUpdateEvent(
                task_id=self.task_id, context_id=self.context_id, status=status
            )
        )

    async def artifact(
        self, text: str, *, artifact_id: str = 'a', append: bool = False
    ) -> None:
        await self.queue.enqueue_event(
            TaskArtifactUpdateEvent(
                task_id=self.task_id,
                context_id=self.context_id,
                artifact=Artifact(
                    artifact_id=artifact_id, parts=[Part(text=text)]
                ),
                append=append,
            )
        )

    async def reply(self, text: str) -> None:
        await self.queue.enqueue_event(
            Message(
                message_id=str(uuid.uuid4()),
                role=Role.ROLE_AGENT,
                context_id=self.context_id,
                parts=[Part(text=text)],
            )
        )


class ScriptedAgent(AgentExecutor):
    """Runs one script a turn."""

    def __init__(self, *scripts: Callable[[Desk], Awaitable[None]]) -> None:
        self.scripts = list(scripts)
        self.turns = 0
        self.running = 0
        self.overlapped = False
        self.canceled: list[str] = []
        self.on_cancel: Callable[[Desk], Awaitable[None]] | None = None

    async def execute(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        script = self.scripts[min(self.turns, len(self.scripts) - 1)]
        self.turns += 1
        self.running += 1
        self.overlapped = self.overlapped or self.running > 1
        try:
            await script(Desk(context, event_queue))
        finally:
            self.running -= 1

    async def cancel(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        self.canceled.append(context.task_id or '')
        if self.on_cancel is not None:
            await self.on_cancel(Desk(context, event_queue))


class Pushes(PushNotificationSender):
    """Records what is pushed."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.before_send: Callable[[str, Any], Awaitable[None]] | None = None

    async def send_notification(self, task_id: str, event: Any) -> None:
        if self.before_send is not None:
            await self.before_send(task_id, event)
        copy = type(event)()
        copy.CopyFrom(event)
        self.sent.append((task_id, copy))

    def states(self, task_id: str) -> list[int]:
        return [
            event.status.state
            for sent_id, event in self.sent
            if sent_id == task_id
            and isinstance(event, Task | TaskStatusUpdateEvent)
        ]


@dataclass
class InProcessReplica:
    """One leased handler and what surrounds it."""

    handler: LeasedRequestHandler
    agent: AgentExecutor
    pushes: Pushes
    tasks: VersionedDatabaseTaskStore
    events: DatabaseTaskEventStream
    leases: LeaseStore

    async def lease(self, task_id: str) -> Any:
        return await self.leases.get(self.handler.service, task_id)

    async def stored(self, task_id: str, user: str = 'ada') -> Task | None:
        stored = await self.tasks.get(task_id, call(user))
        return stored.task if stored is not None else None

    async def state(self, task_id: str, user: str = 'ada') -> int | None:
        task = await self.stored(task_id, user)
        return task.status.state if task is not None else None

    async def working(self) -> Task:
        """Waits until a task with a lease works, and returns it."""

        async def working() -> Task | None:
            for lease in await self.leases.leases():
                task = await self.stored(lease.task_id)
                if task is not None and task.status.state == WORKING:
                    return task
            return None

        return await until(working)


def card(name: str = 'agent') -> AgentCard:
    return AgentCard(
        name=name,
        description='An agent for tests',
        version='1',
        default_input_modes=['text'],
        default_output_modes=['text'],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
    )


@dataclass
class Service:
    """Makes replicas over one database."""

    engine: AsyncEngine
    leases: LeaseStore
    configs: InMemoryPushNotificationConfigStore = field(
        default_factory=InMemoryPushNotificationConfigStore
    )
    stack: contextlib.AsyncExitStack = field(
        default_factory=contextlib.AsyncExitStack
    )
    clients: list[asyncio.Task[Any]] = field(default_factory=list)
    """Requests that a test need not wait for."""

    async def let_clients_go(self) -> None:
        for client in self.clients:
            # Twice would leave a connection of SQLite half closed: its driver
            # waits for a thread that the second cancel has ended.
            if not client.cancelling():
                client.cancel()
        await asyncio.gather(*self.clients, return_exceptions=True)

    async def replica(
        self,
        agent: AgentExecutor | Callable[[Desk], Awaitable[None]],
        *,
        start: bool = True,
        settings: LeaseSettings = SETTINGS,
        wrap_tasks: Callable[[Any], Any] = lambda store: store,
        wrap_events: Callable[[Any], Any] = lambda stream: stream,
        leases: LeaseStore | None = None,
        name: str = 'agent',
        **options: Any,
    ) -> InProcessReplica:
        if not isinstance(agent, AgentExecutor):
            agent = ScriptedAgent(agent)
        tasks = VersionedDatabaseTaskStore(self.engine)
        events = DatabaseTaskEventStream(self.engine, poll_interval_s=0.05)
        await tasks.initialize()
        await events.initialize()
        pushes = Pushes()
        handler = LeasedRequestHandler(
            agent_executor=agent,
            agent_card=card(name),
            task_store=wrap_tasks(tasks),
            event_stream=wrap_events(events),
            lease_store=leases or self.leases,
            settings=settings,
            push_config_store=self.configs,
            push_sender=pushes,
            **options,
        )
        if start:
            await self.stack.enter_async_context(handler)
        return InProcessReplica(
            handler=handler,
            agent=agent,
            pushes=pushes,
            tasks=tasks,
            events=events,
            leases=self.leases,
        )

    async def beats(self, replica: InProcessReplica, count: int) -> None:
        """Waits for so many beats of a replica, and sweeps with them."""

        async def beat() -> int:
            session = replica.handler._replica.session
            beats = {s.id: s.beat for s in await self.leases.sessions()}
            return beats.get(session.id, 0) if session is not None else 0

        until_beat = await beat() + count

        async def passed() -> bool:
            return await beat() >= until_beat

        await until(passed)


async def stubbornly(event: asyncio.Event) -> None:
    """Waits as an agent does that ignores its cancellations.

    Not for ever, so that a test which fails meanwhile comes to its end.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + 60
    while not event.is_set() and loop.time() < until:
        try:
            await asyncio.wait_for(event.wait(), until - loop.time())
        except (TimeoutError, asyncio.CancelledError):
            continue


async def until(
    condition: Callable[[], Awaitable[Any]], *, timeout: float = 20
) -> Any:
    """Waits for something that another party brings about."""
    async with asyncio.timeout(timeout):
        while not (result := await condition()):
            await asyncio.sleep(0.01)
        return result


class SlowTasks(VersionedTaskStore):
    """Holds up one save, past its permit, until it is told to go on."""

    def __init__(self, inner: VersionedTaskStore) -> None:
        self.inner = inner
        self.holds = None
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def save(self, task, **rest):
        if task.status.state == self.holds:
            self.holds = None
            self.entered.set()
            await self.go_on.wait()
        return await self.inner.save(task, **rest)

    async def get(self, task_id, context):
        return await self.inner.get(task_id, context)

    async def list(self, params, context):
        return await self.inner.list(params, context)

    async def delete(self, task_id, context):
        await self.inner.delete(task_id, context)


async def slow_replica(
    service: Service, script: Any, holds: int, **options: Any
) -> tuple[InProcessReplica, SlowTasks]:
    """Makes a replica whose save of a state takes its time."""
    made: list[SlowTasks] = []

    def wrap(store):
        made.append(SlowTasks(store))
        made[0].holds = holds
        return made[0]

    return await service.replica(script, wrap_tasks=wrap, **options), made[0]
