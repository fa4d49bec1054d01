"""Replicas, clients and what happens to them, in one process and its time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import (
    InMemoryPushNotificationConfigStore,
    PushNotificationSender,
)
from a2a.types.a2a_pb2 import (
    Artifact,
    CancelTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskArtifactUpdateEvent,
    TaskPushNotificationConfig,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease import (
    FailAbandoned,
    LeaseSettings,
    LeasedRequestHandler,
    ReExecute,
    current_lease,
)
from a2a_lease.turns.marks import INTERRUPTED, TERMINAL
from simulation.database import (
    ConfigsOverLine,
    Database,
    EventsOverLine,
    Line,
    TasksOverLine,
    leases_over,
)
from simulation.loop import BEAT, LOOP, WHO, StuckError, VirtualLoop
from simulation.schedule import LENGTH, OF_CLIENTS, Action, Schedule
from support.inprocess import call, card


SETTINGS = LeaseSettings(
    ttl=5.0,
    heartbeat_interval=0.5,
    sweep_interval=0.5,
    acquire_timeout=10.0,
    drain_timeout=1.0,
    stop_timeout=2.0,
)
PATIENCE = 200.0
"""Virtual seconds in which all comes to rest once nothing goes wrong."""
SILENT = SETTINGS.ttl - 4 * SETTINGS.heartbeat_interval
"""Seconds after which a silence may count as death."""
REFUSED = SETTINGS.heartbeat_interval
"""Seconds without a connection after which it may."""


class _Clock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class _Life:
    """A heartbeat as a task, which counts as a thread of its process."""

    def __init__(self, heartbeat: Any, started: Callable[..., None]) -> None:
        context = contextvars.copy_context()
        context.run(WHO.set, (WHO.get()[0], BEAT))
        self._task = asyncio.get_running_loop().create_task(
            heartbeat.live(started), context=context
        )

    async def ended(self, *, timeout: float) -> bool:
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        return bool(done)


class SimulatedHandler(LeasedRequestHandler):
    """The handler, on virtual time and without threads."""

    _clock = _Clock()
    _live = staticmethod(_Life)


@dataclass
class Heard:
    """What came back for one request."""

    replica: Replica
    kind: str
    said: str = ''
    """The id of its message."""
    events: list[Any] = field(default_factory=list)
    error: Exception | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def task_id(self) -> str:
        """The task that it is of, or ''."""
        for event in self.events:
            if isinstance(event, Task):
                return event.id
            if not isinstance(event, Message):
                return event.task_id
        return ''

    @property
    def states(self) -> list[int]:
        """The states that came."""
        return [e.status.state for e in self.events if hasattr(e, 'status')]


class Replica:
    """One process."""

    def __init__(self, world: World, number: int, life: int) -> None:
        """Is not started."""
        self.world = world
        self.number = number
        self.name = f'{"ABCDEFGH"[number]}{life}'
        self.line = Line(
            world.database, random.Random(f'{world.schedule.seed} {self.name}')
        )
        self.handler: SimulatedHandler | None = None
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.told_to_end = asyncio.Event()
        self.requests: list[Heard] = []
        self.silences: list[tuple[float, float]] = []
        """From when to when it was stopped, or cut off."""
        self.refusals: list[tuple[float, float]] = []
        """From when to when its connections were broken."""
        self.unheard: list[float] = []
        """When the database ended a connection without a word."""
        self.stubborn = False
        """Whether an agent ignored its cancellation there."""
        self.disturbed = False
        """Whether it met an error, or a pause."""

    @property
    def is_dead(self) -> bool:
        """Whether it was killed."""
        return self.world.loop.is_dead(self.name)

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return (
            self.ready.is_set()
            and not self.is_dead
            and not self.told_to_end.is_set()
        )

    def context(self) -> contextvars.Context:
        """Returns one for what its event loop does."""
        context = contextvars.copy_context()
        context.run(WHO.set, (self.name, LOOP))
        return context

    def start(self) -> None:
        """Starts, and starts again until it can."""
        self.world.spawn(self._serve(), context=self.context())

    async def _serve(self) -> None:
        world = self.world
        while True:
            configs = ConfigsOverLine(self.line, world.configs)
            self.handler = SimulatedHandler(
                agent_executor=Agent(self),
                agent_card=card('simulated'),
                task_store=TasksOverLine(self.line, world.database),
                event_stream=EventsOverLine(self.line, world.database),
                lease_store=leases_over(self.line, world.database),
                settings=SETTINGS,
                recovery=ReExecute(max_attempts=4, backoff=1.0)
                if world.schedule.runs_again
                else FailAbandoned(),
                push_config_store=configs,
                push_sender=Webhook(self, configs),
            )
            try:
                await self.handler.start()
            except Exception:
                # The process ends with it, and another one is started.
                await self.handler.aclose()
                self.line.sessions.clear()
                await asyncio.sleep(1)
                continue
            break
        self.ready.set()
        await self.told_to_end.wait()
        await self.handler.aclose()
        # The process ends, and all that still goes on in it.
        self.ended.set()
        world.end(self)

    def take(
        self, heard: Heard, answer: Callable[[Any], AsyncGenerator[Any]]
    ) -> None:
        """Serves a request."""
        self.requests.append(heard)
        self.world.spawn(self._answer(heard, answer), context=self.context())

    async def _answer(
        self, heard: Heard, answer: Callable[[Any], AsyncGenerator[Any]]
    ) -> None:
        try:
            async for event in answer(self.handler):
                copy = type(event)()
                copy.CopyFrom(event)
                heard.events.append(copy)
        except Exception as error:
            heard.error = error
        heard.done.set()

    def hang_up(self) -> None:
        """Breaks the connections of whoever waits for an answer."""
        for heard in self.requests:
            if not heard.done.is_set():
                heard.error = ConnectionError('The server is gone.')
                heard.done.set()


class Webhook(PushNotificationSender):
    """Who is told of each task."""

    def __init__(self, replica: Replica, configs: ConfigsOverLine) -> None:
        """Takes who tells."""
        self._replica = replica
        self._configs = configs

    async def send_notification(self, task_id: str, event: Any) -> None:
        """Takes a while."""
        world = self._replica.world
        slow = world.chance.random() < 0.05
        await asyncio.sleep(world.chance.expovariate(1 if slow else 100))
        if hasattr(event, 'status'):
            world.pushed.setdefault(task_id, []).append(event.status.state)


STATES = {
    'working': TaskState.TASK_STATE_WORKING,
    'input': TaskState.TASK_STATE_INPUT_REQUIRED,
    'auth': TaskState.TASK_STATE_AUTH_REQUIRED,
    'complete': TaskState.TASK_STATE_COMPLETED,
    'fail': TaskState.TASK_STATE_FAILED,
}


class Agent(AgentExecutor):
    """Does as it is told, and goes on from its checkpoint."""

    def __init__(self, replica: Replica) -> None:
        """Takes its process."""
        self._replica = replica

    async def execute(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Runs a script."""
        lease = current_lease()
        run = Run(
            context.task_id or '', self._replica, lease.token, lease.attempt
        )
        world = self._replica.world
        world.note(f'{run.task_id} runs as {lease.token} ({lease.attempt})')
        run.beside = [
            other
            for other in world.runs
            if other.task_id == run.task_id and other.goes_on
        ]
        world.runs.append(run)
        try:
            if context.get_user_input() != 'message':
                await self._begin(context, event_queue)
            for step in context.get_user_input().split('; '):
                await self._do(*step.split(), context=context, out=event_queue)
        finally:
            run.goes_on = False
            world.note(f'{run.task_id} ends as {lease.token}')

    async def _begin(self, context: RequestContext, out: EventQueue) -> None:
        if context.current_task is None:
            assert context.message is not None
            await out.enqueue_event(
                Task(
                    id=context.task_id or '',
                    context_id=context.context_id or '',
                    status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
                    history=[context.message],
                    metadata={'token': current_lease().token},
                )
            )
        await self._do('working', context=context, out=out)

    async def _do(
        self, step: str, *rest: str, context: RequestContext, out: EventQueue
    ) -> None:
        world = self._replica.world
        by = {'token': current_lease().token}
        if step == 'count':
            await self._count(int(rest[0]), float(rest[1]), context, out)
        elif step == 'sleep':
            await asyncio.sleep(float(rest[0]))
        elif step == 'stubborn':
            await self._stubborn(float(rest[0]))
        elif step == 'raise':
            raise RuntimeError('as told')
        elif step == 'poison':
            world.kill(self._replica)
            await asyncio.sleep(0)
        elif step == 'message':
            await out.enqueue_event(
                Message(
                    message_id=str(uuid.uuid4()),
                    role=Role.ROLE_AGENT,
                    context_id=context.context_id,
                    parts=[Part(text='hello')],
                )
            )
        else:
            await out.enqueue_event(
                TaskStatusUpdateEvent(
                    task_id=context.task_id,
                    context_id=context.context_id,
                    status=TaskStatus(state=STATES[step]),
                    metadata=by,
                )
            )

    async def _stubborn(self, seconds: float) -> None:
        until = self._replica.world.loop.time() + seconds
        while (left := until - self._replica.world.loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                self._replica.stubborn = True

    async def _count(
        self, end: int, pause: float, context: RequestContext, out: EventQueue
    ) -> None:
        lease = current_lease()
        assert context.message is not None
        name = context.message.message_id
        # A number may be durable although its checkpoint is not.
        kept = lease.stored_task or context.current_task or Task()
        begin = max(
            lease.checkpoint or 0,
            sum(
                len(artifact.parts)
                for artifact in kept.artifacts
                if artifact.artifact_id == name
            ),
        )
        for number in range(begin, end):
            await out.enqueue_event(
                TaskArtifactUpdateEvent(
                    task_id=context.task_id,
                    context_id=context.context_id,
                    artifact=Artifact(
                        artifact_id=name, parts=[Part(text=str(number))]
                    ),
                    append=number > 0,
                    metadata={'token': lease.token},
                )
            )
            await lease.save_checkpoint(number + 1)
            await asyncio.sleep(pause)

    async def cancel(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Says so."""
        await event_queue.enqueue_event(
            TaskStatusUpdateEvent(
                task_id=context.task_id,
                context_id=context.context_id,
                status=TaskStatus(state=TaskState.TASK_STATE_CANCELED),
            )
        )


@dataclass
class Run:
    """One run of the agent."""

    task_id: str
    replica: Replica
    token: int
    attempt: int
    goes_on: bool = True
    beside: list[Run] = field(default_factory=list)
    """Those of the same task that went on as it began."""


@dataclass
class Client:
    """Somebody who wants something done."""

    number: int
    heard: list[Heard] = field(default_factory=list)
    said: list[SendMessageRequest] = field(default_factory=list)
    """Its messages, as they were sent."""

    @property
    def task_id(self) -> str:
        """The task that it knows of."""
        return next((h.task_id for h in self.heard if h.task_id), '')


class World:
    """One simulation."""

    def __init__(self, schedule: Schedule, *, tell: bool = False) -> None:
        """Takes what happens; `tell` prints it on the way."""
        self.schedule = schedule
        self.loop = VirtualLoop()
        self.database = Database()
        self.chance = random.Random(f'{schedule.seed} world')
        self.configs = InMemoryPushNotificationConfigStore()
        self.replicas: list[Replica] = []
        self.now: dict[int, Replica] = {}
        """The process that is each replica now."""
        self.clients: dict[int, Client] = {}
        self.runs: list[Run] = []
        self.pushed: dict[str, list[int]] = {}
        self.deaths = 0
        self.trouble = False
        """Whether anything at all went wrong."""
        self.unsettled = ''
        self.trace: list[str] = []
        self._tell = tell
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lives = 0

    def run(self) -> None:
        """Plays the schedule, and lets all come to rest."""
        chance = random.Random(f'{self.schedule.seed} ids')
        random.seed(self.schedule.seed)
        asyncio.set_event_loop(self.loop)
        try:
            # The ids of the SDK's own making have no other way in.
            with mock.patch(
                'uuid.uuid4',
                lambda: uuid.UUID(int=chance.getrandbits(128), version=4),
            ):
                self.loop.run_until_complete(self._play())
        except StuckError as error:
            self.unsettled = str(error)
        finally:
            asyncio.set_event_loop(None)

    def close(self) -> None:
        """Lets go of everything."""
        asyncio.set_event_loop(self.loop)
        self.loop.end()
        asyncio.set_event_loop(None)

    def note(self, text: str) -> None:
        """Adds to the trace."""
        line = f'{self.loop.time():8.3f} {WHO.get()[0]}: {text}'
        self.trace.append(line)
        if self._tell:
            print(line)

    def spawn(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        """Has something done beside."""
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        return task

    async def _play(self) -> None:
        for number in range(self.schedule.replicas):
            self._start(number)
        faults = []
        for action in self.schedule.actions:
            await asyncio.sleep(max(0.0, action.at - self.loop.time()))
            self.note(
                f'{action.kind} {action.who} {action.seconds:.1f} '
                f'{action.where}'
            )
            task = self.spawn(getattr(self, f'_{action.kind}')(action))
            if action.kind not in OF_CLIENTS:
                faults.append(task)
        await asyncio.sleep(max(0.0, LENGTH - self.loop.time()))
        await asyncio.gather(*faults)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while await self._unsettled():
                    await asyncio.sleep(1)
        self.unsettled = await self._unsettled()

    # Processes.

    def _start(self, number: int) -> None:
        self._lives += 1
        replica = Replica(self, number, self._lives)
        self.replicas.append(replica)
        self.now[number] = replica
        replica.start()

    def kill(self, replica: Replica, *, back: float = 1.0) -> None:
        """Kills a process; another one comes in its place."""
        if replica.is_dead or replica.ended.is_set():
            return
        self.note(f'{replica.name} dies')
        self.trouble = True
        self.deaths += 1
        self.loop.kill(replica.name)
        replica.line.break_all()
        replica.hang_up()
        context = contextvars.Context()
        self.spawn(self._start_later(replica.number, back), context=context)

    def end(self, replica: Replica) -> None:
        """A process has ended in order."""
        self.note(f'{replica.name} has ended')
        self.loop.kill(replica.name)
        replica.line.break_all()
        replica.hang_up()

    async def _start_later(self, number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._start(number)

    def _process(self, action: Action) -> Replica:
        return self.now[action.who % self.schedule.replicas]

    async def _kill(self, action: Action) -> None:
        self.kill(self._process(action), back=action.seconds)

    async def _term(self, action: Action) -> None:
        replica = self._process(action)
        if replica.is_dead or not replica.ready.is_set():
            return
        self.trouble = True
        replica.told_to_end.set()
        await asyncio.sleep(action.seconds)
        if self.now[replica.number] is replica:
            self._start(replica.number)

    @contextlib.contextmanager
    def _silent(self, replica: Replica) -> Any:
        self.trouble = True
        replica.disturbed = True
        began = self.loop.time()
        yield
        replica.silences.append((began, self.loop.time()))

    async def _stop(self, action: Action) -> None:
        replica = self._process(action)
        with self._silent(replica):
            for thread in (LOOP, BEAT):
                self.loop.hold(replica.name, thread)
            await asyncio.sleep(action.seconds)
            for thread in (BEAT, LOOP):
                self.loop.go_on(replica.name, thread)

    async def _block(self, action: Action) -> None:
        replica = self._process(action)
        self.trouble = True
        self.loop.hold(replica.name, LOOP)
        await asyncio.sleep(action.seconds)
        self.loop.go_on(replica.name, LOOP)

    async def _cut(self, action: Action) -> None:
        replica = self._process(action)
        with self._silent(replica):
            replica.line.cuts += 1
            await asyncio.sleep(action.seconds)
            replica.line.cuts -= 1
            for ghost in list(replica.line.ghosts):
                replica.line.let_go(ghost)
            replica.line.ghosts.clear()

    async def _reset(self, action: Action) -> None:
        """Its connections break, and it gets no new ones for a while."""
        replica = self._process(action)
        self.trouble = replica.disturbed = True
        began = self.loop.time()
        replica.line.break_all()
        replica.line.cuts += 1
        await asyncio.sleep(action.seconds)
        replica.line.cuts -= 1
        replica.refusals.append((began, self.loop.time()))

    async def _unheard(self, action: Action) -> None:
        """The database ends what beats, and the process hears nothing."""
        self.trouble = True
        replica = self._process(action)
        replica.line.lose_unheard()
        replica.unheard.append(self.loop.time())

    async def _lossy(self, action: Action) -> None:
        replica = self._process(action)
        self.trouble = replica.disturbed = True
        replica.line.loses = 0.3
        await asyncio.sleep(action.seconds)
        replica.line.loses = 0.0

    # The database.

    async def _down(self, action: Action) -> None:
        self.trouble = True
        self._disturb_all()
        self.database.outages += 1
        self.database.life += 1
        self.database.locks.clear()
        await asyncio.sleep(action.seconds)
        self.database.outages -= 1

    async def _freeze(self, action: Action) -> None:
        if self.database.frozen is not None:
            return
        self.trouble = True
        self._disturb_all()
        self.database.frozen = frozen = asyncio.Event()
        await asyncio.sleep(action.seconds)
        self.database.frozen = None
        frozen.set()

    def _disturb_all(self) -> None:
        for replica in self.replicas:
            replica.disturbed = True

    # Clients.

    async def _talk(self, action: Action) -> None:
        await self._converse(action, 'send')

    async def _ask(self, action: Action) -> None:
        await self._converse(action, 'ask')

    async def _converse(self, action: Action, kind: str) -> None:
        client = self.clients[action.who] = Client(action.who)
        where = action.where
        for number, script in enumerate(action.scripts):
            request = SendMessageRequest(
                message=Message(
                    message_id=f'm{action.who}.{number}',
                    role=Role.ROLE_USER,
                    context_id=f'c{action.who}',
                    task_id=client.task_id if number else '',
                    parts=[Part(text=script)],
                ),
                configuration=SendMessageConfiguration(
                    task_push_notification_config=TaskPushNotificationConfig(
                        id='hook', url='https://example.org/hook'
                    )
                ),
            )
            client.said.append(request)
            for _ in range(3):
                heard = await self._send(client, request, where, kind)
                if heard.events or not isinstance(heard.error, ConnectionError):
                    break
                # Nobody knows whether it was heard; it is said again.
                where += 1
                await asyncio.sleep(1)
            if not client.task_id or number == len(action.scripts) - 1:
                return
            # The task may go on elsewhere.
            while not self._rests(client.task_id):
                await asyncio.sleep(0.3)
            record = self.database.tasks[client.task_id]
            if record.task.status.state in TERMINAL:
                return

    def _rests(self, task_id: str) -> bool:
        record = self.database.tasks.get(task_id)
        return record is not None and (
            record.task.status.state in TERMINAL | INTERRUPTED
        )

    async def _somebody(self, where: int) -> Replica:
        while True:
            for turn in range(self.schedule.replicas):
                replica = self.now[(where + turn) % self.schedule.replicas]
                if replica.serves:
                    return replica
            await asyncio.sleep(0.2)

    async def _send(
        self,
        client: Client,
        request: SendMessageRequest,
        where: int,
        kind: str = 'send',
    ) -> Heard:
        replica = await self._somebody(where)
        heard = Heard(replica, kind, request.message.message_id)
        client.heard.append(heard)
        sent = SendMessageRequest()  # The SDK writes ids into it.
        sent.CopyFrom(request)

        async def ask(handler: Any) -> AsyncGenerator[Any]:
            yield await handler.on_message_send(sent, call())

        replica.take(
            heard,
            ask
            if kind == 'ask'
            else lambda handler: handler.on_message_send_stream(sent, call()),
        )
        await heard.done.wait()
        self._note_heard(client, heard)
        return heard

    def _note_heard(self, client: Client, heard: Heard) -> None:
        self.note(
            f'client {client.number} heard {heard.task_id} '
            f'{[TaskState.Name(s)[11:] for s in heard.states]} {heard.error!r}'
        )

    async def _again(self, action: Action) -> None:
        client = self.clients.get(action.who, Client(-1))
        if client.said:
            await self._send(client, client.said[0], action.where)

    async def _hurry(self, action: Action) -> None:
        client = self.clients.get(action.who, Client(-1))
        if not client.task_id:
            return
        last = SendMessageRequest()
        last.CopyFrom(client.said[-1])
        last.message.task_id = client.task_id
        await self._send(client, last, action.where)

    async def _listen(self, action: Action) -> None:
        client = self.clients.get(action.who, Client(-1))
        task_id = client.task_id
        if not task_id:
            return
        replica = await self._somebody(action.where)
        heard = Heard(replica, 'listen')
        client.heard.append(heard)
        replica.take(
            heard,
            lambda handler: handler.on_subscribe_to_task(
                SubscribeToTaskRequest(id=task_id), call()
            ),
        )
        await heard.done.wait()
        self._note_heard(client, heard)

    async def _cancel(self, action: Action) -> None:
        client = self.clients.get(action.who, Client(-1))
        task_id = client.task_id
        if not task_id:
            return
        replica = await self._somebody(action.where)

        async def cancel(handler: Any) -> AsyncGenerator[Any]:
            yield await handler.on_cancel_task(
                CancelTaskRequest(id=task_id), call()
            )

        heard = Heard(replica, 'cancel')
        client.heard.append(heard)
        replica.take(heard, cancel)
        await heard.done.wait()
        self._note_heard(client, heard)

    # The end.

    async def _unsettled(self) -> str:
        """Says what is still under way, or ''."""
        for lease in await self.database.leases.leases():
            if lease.session_id is not None:
                return f'a lease is left: {lease}'
        for task_id, record in self.database.tasks.items():
            if not self._rests(task_id):
                state = TaskState.Name(record.task.status.state)
                return f'task {task_id} is {state}, under no lease'
        for client in self.clients.values():
            for heard in client.heard:
                record = self.database.tasks.get(heard.task_id)
                if (
                    heard.kind == 'listen'
                    and record is not None
                    and record.task.status.state in INTERRUPTED
                ):
                    # Somebody may answer, and it would hear of that.
                    continue
                if not heard.done.is_set():
                    return f'client {client.number} waits: {heard}'
        for run in self.runs:
            if run.goes_on and not run.replica.is_dead:
                return f'a run goes on: {run}'
        return ''
