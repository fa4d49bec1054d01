"""One agent, served by the plain or the leased handler, and its transcript."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from a2a.client import ClientConfig, ClientFactory
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    VersionedDatabaseTaskStore,
)
from a2a.server.request_handlers import DefaultRequestHandler, GrpcHandler
from a2a.server.routes import create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import (
    BasePushNotificationSender,
    DatabasePushNotificationConfigStore,
)
from a2a.types import a2a_pb2_grpc
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
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
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette

from a2a_lease import DatabaseLeaseStore, LeasedRequestHandler
from a2a_lease.demo.local_http import local_client
from a2a_lease.demo.webserver import serving, webhook
from support.inprocess import SETTINGS, Desk, ScriptedAgent


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncEngine


JSONRPC = 'JSONRPC'
OTHERS = ('HTTP+JSON', 'GRPC')
UUID = re.compile(
    r'[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}'
)


@dataclass
class Conversation:
    """What an agent does, and what is said to it."""

    name: str
    play: Callable[[Talk], Awaitable[None]]
    scripts: list[Callable[[Talk, Desk], Awaitable[None]]]
    on_cancel: Callable[[Talk, Desk], Awaitable[None]] | None = None
    plain_is_wrong: str = ''
    """Why the plain handler's transcript is not the one to want."""
    instead: list[tuple[str, str]] = field(default_factory=list)
    """Lines of the leased transcript that the plain one has not."""


@dataclass
class Talk:
    """Two servers of one agent over one database, and a client of both."""

    leased: bool
    transport: str
    engine: AsyncEngine
    conversation: Conversation
    transcript: list[tuple[str, str]] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(
        default_factory=lambda: defaultdict(asyncio.Event)
    )
    pushed: list[tuple[str, int]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    last: Task | None = None

    async def __aenter__(self) -> Talk:
        async with contextlib.AsyncExitStack() as stack:
            self.webhook = await stack.enter_async_context(
                webhook(self._receive)
            )
            self.clients = [await self._server(stack) for _ in range(2)]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _receive(self, event: StreamResponse) -> None:
        kind = event.WhichOneof('payload')
        if kind in ('task', 'status_update'):
            content = getattr(event, kind)
            self.pushed.append((kind, content.status.state))
        else:
            self.pushed.append((kind, 0))

    async def _server(self, stack: contextlib.AsyncExitStack) -> Any:
        tasks = VersionedDatabaseTaskStore(self.engine)
        events = DatabaseTaskEventStream(self.engine, poll_interval_s=0.05)
        configs = DatabasePushNotificationConfigStore(self.engine)
        for part in (tasks, events, configs):
            await part.initialize()
        http = local_client(timeout=20)
        stack.push_async_callback(http.aclose)
        app = Starlette()
        url = ''
        if self.transport != 'GRPC':
            url = await stack.enter_async_context(serving(app))
        grpc_server = grpc.aio.server()
        port = grpc_server.add_insecure_port('127.0.0.1:0')
        card = AgentCard(
            name='talker',
            description='Talks.',
            version='1',
            default_input_modes=['text/plain'],
            default_output_modes=['text/plain'],
            capabilities=AgentCapabilities(
                streaming=True, push_notifications=True
            ),
            supported_interfaces=[
                AgentInterface(
                    url=(
                        f'127.0.0.1:{port}'
                        if self.transport == 'GRPC'
                        else url.rstrip('/')
                    ),
                    protocol_binding=self.transport,
                    protocol_version='1.0',
                )
            ],
        )
        agent = ScriptedAgent(
            *(
                lambda desk, script=script: script(self, desk)
                for script in self.conversation.scripts
            )
        )
        # A second replica goes on with the scripts where the first one is.
        first = getattr(self, '_agent', None)
        self._agent = agent
        if first is not None:
            agent.scripts = first.scripts
        agent.__class__ = _Shared
        agent.talk = self
        if self.conversation.on_cancel is not None:
            on_cancel = self.conversation.on_cancel
            agent.on_cancel = lambda desk: on_cancel(self, desk)
        options: dict[str, Any] = {
            'agent_executor': agent,
            'task_store': tasks,
            'event_stream': events,
            'agent_card': card,
            'push_config_store': configs,
            'push_sender': BasePushNotificationSender(http, configs),
        }
        if self.leased:
            handler: Any = LeasedRequestHandler(
                **options,
                lease_store=DatabaseLeaseStore(self.engine),
                settings=SETTINGS,
            )
            await stack.enter_async_context(handler)
        else:
            handler = DefaultRequestHandler(**options)
            stack.push_async_callback(handler.aclose)
        app.router.routes += [
            *create_jsonrpc_routes(handler, rpc_url='/'),
            *create_rest_routes(handler),
        ]
        a2a_pb2_grpc.add_A2AServiceServicer_to_server(
            GrpcHandler(handler), grpc_server
        )
        if self.transport == 'GRPC':
            await grpc_server.start()
            stack.push_async_callback(grpc_server.stop, None)
        clients = {}
        for streaming in (True, False):
            clients[streaming] = ClientFactory(
                ClientConfig(
                    streaming=streaming,
                    httpx_client=http,
                    grpc_channel_factory=grpc.aio.insecure_channel,
                    supported_protocol_bindings=[self.transport],
                )
            ).create(card)
            stack.push_async_callback(clients[streaming].close)
        return clients

    # The transcript.

    def note(self, what: str, value: Any) -> None:
        if hasattr(value, 'DESCRIPTOR'):
            value = MessageToDict(value)
        self.transcript.append((what, self._anonymous(_clean(value))))

    def _anonymous(self, value: Any) -> str:
        def name(match: re.Match[str]) -> str:
            return self.names.setdefault(match[0], f'id {len(self.names) + 1}')

        return UUID.sub(name, re.sub(r'127.0.0.1:\d+', 'here', str(value)))

    async def _noting(self, what: str, call: Awaitable[Any]) -> Any:
        try:
            result = await asyncio.wait_for(call, 20)
        except Exception as error:
            self.note(what, f'{type(error).__name__}: {error}')
            return None
        self.note(what, result)
        return result

    # What is said.

    def message(
        self,
        text: str,
        *,
        task: Task | None = None,
        only_task: bool = False,
        context_id: str = '',
        task_id: str = '',
        push: bool = False,
        immediately: bool = False,
        message_id: str | None = None,
    ) -> SendMessageRequest:
        request = SendMessageRequest(
            message=Message(
                message_id=(
                    str(uuid.uuid4()) if message_id is None else message_id
                ),
                role=Role.ROLE_USER,
                task_id=task.id if task else task_id,
                context_id=context_id
                or (task.context_id if task and not only_task else ''),
                parts=[Part(text=text)],
            )
        )
        request.configuration.return_immediately = immediately
        if push:
            request.configuration.task_push_notification_config.CopyFrom(
                TaskPushNotificationConfig(id='hook', url=self.webhook)
            )
        return request

    async def send(self, text: str, *, at: int = 0, **rest: Any) -> Task:
        async def call() -> StreamResponse:
            request = self.message(text, **rest)
            async for response in self.clients[at][False].send_message(request):
                return response
            raise AssertionError('no answer')

        response = await self._noting(f'send {text}', call())
        if response is not None and response.HasField('task'):
            self.last = response.task
        return self.last

    async def stream(self, text: str, *, at: int = 0, **rest: Any) -> Task:
        events = self.clients[at][True].send_message(self.message(text, **rest))
        await self.hear(f'stream {text}', events)
        return self.last

    async def subscribe(self, task_id: str, *, at: int = 0) -> None:
        events = self.clients[at][True].subscribe(
            SubscribeToTaskRequest(id=task_id)
        )
        await self.hear('subscribe', events)

    async def hear(self, what: str, events: Any) -> None:
        shown = None
        try:
            async with asyncio.timeout(20):
                async for event in events:
                    if (
                        event.HasField('status_update')
                        and event.status_update.status == shown
                    ):
                        # The SDK reads the task after it began to listen, and
                        # may tell once more what that has.
                        continue
                    shown = event.task.status if what == 'subscribe' else None
                    self.note(what, event)
                    if event.HasField('task'):
                        self.last = event.task
                    if event.HasField('status_update'):
                        self.last = Task(
                            id=event.status_update.task_id,
                            context_id=event.status_update.context_id,
                        )
                    self.gates[f'heard {what}'].set()
        except Exception as error:
            self.note(what, f'{type(error).__name__}: {error}')
        self.note(what, 'ends')

    async def get(self, task_id: str, *, at: int = 0, **rest: Any) -> Any:
        return await self._noting(
            'get',
            self.clients[at][False].get_task(
                GetTaskRequest(id=task_id, **rest)
            ),
        )

    async def list(self, *, at: int = 0) -> Any:
        return await self._noting(
            'list', self.clients[at][False].list_tasks(ListTasksRequest())
        )

    async def cancel(self, task_id: str, *, at: int = 0) -> Any:
        return await self._noting(
            'cancel',
            self.clients[at][False].cancel_task(CancelTaskRequest(id=task_id)),
        )

    async def call(self, method: str, request: Any, *, at: int = 0) -> Any:
        return await self._noting(
            method, getattr(self.clients[at][False], method)(request)
        )

    async def until_stored(self, task_id: str, state: int) -> None:
        async with asyncio.timeout(20):
            while True:
                task = await self.clients[0][False].get_task(
                    GetTaskRequest(id=task_id)
                )
                if task.status.state == state:
                    return
                await asyncio.sleep(0.01)

    async def until_pushed(self, state: int) -> None:
        """Waits for what is pushed, and notes it in the end."""
        with contextlib.suppress(TimeoutError):
            # The plain handler may never push it.
            async with asyncio.timeout(20 if self.leased else 1):
                while state not in [pushed for _, pushed in self.pushed]:
                    await asyncio.sleep(0.01)
        self.note(
            'pushed',
            [(kind, TaskState.Name(s)) for kind, s in self.pushed],
        )


class _Shared(ScriptedAgent):
    """Counts turns over both replicas."""

    talk: Talk

    async def execute(self, context, event_queue) -> None:
        turns = self.talk.__dict__.setdefault('turns', 0)
        self.talk.__dict__['turns'] += 1
        script = self.scripts[min(turns, len(self.scripts) - 1)]
        await script(Desk(context, event_queue))


def _clean(value: Any) -> Any:
    # A pause without a timestamp gets one from the leased handler.
    if isinstance(value, dict):
        return {
            key: _clean(each)
            for key, each in value.items()
            if key not in ('timestamp', 'nextPageToken')
        }
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return value
