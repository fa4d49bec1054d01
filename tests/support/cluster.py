"""Replicas as real processes, and those who talk to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a.client import ClientConfig, create_client
from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.types.a2a_pb2 import (
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskPushNotificationConfig,
    TaskState,
)
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from a2a_lease import DatabaseLeaseStore
from a2a_lease.demo.local_http import local_client
from a2a_lease.demo.webserver import webhook
from support.databases import can_begin
from support.forkserver import ForkedServer
from support.inprocess import NamedUser


if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from a2a.client import Client

    from support.databases import Database


SETTINGS = {
    'ttl': 3.0,
    'heartbeat_interval': 0.3,
    'sweep_interval': 0.3,
    'acquire_timeout': 20.0,
    'drain_timeout': 1.0,
    'stop_timeout': 1.0,
}
PATIENCE = 40.0


@dataclass
class Heard:
    """What came over one stream."""

    events: list[StreamResponse] = field(default_factory=list)
    error: Exception | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Task | None = None

    def add(self, event: StreamResponse) -> None:
        self.events.append(event)
        self.changed.set()

    @property
    def payloads(self) -> list[Any]:
        return [getattr(e, str(e.WhichOneof('payload'))) for e in self.events]

    @property
    def states(self) -> list[int]:
        return [
            (e.task if e.HasField('task') else e.status_update).status.state
            for e in self.events
            if e.HasField('task') or e.HasField('status_update')
        ]

    @property
    def texts(self) -> list[str]:
        return [
            e.artifact_update.artifact.parts[0].text
            for e in self.events
            if e.HasField('artifact_update')
        ]

    @property
    def task_id(self) -> str:
        for e in self.events:
            if e.HasField('task'):
                return e.task.id
            if e.HasField('status_update'):
                return e.status_update.task_id
        return ''

    async def until(self, condition: Callable[[Heard], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

    async def ended(self) -> None:
        assert self.done is not None
        await asyncio.wait_for(self.done, PATIENCE)


def listen(events: AsyncIterator[StreamResponse]) -> Heard:
    """Collects what a stream brings."""
    heard = Heard()

    async def collect() -> None:
        try:
            async for event in events:
                heard.add(event)
        except Exception as error:
            heard.error = error
        finally:
            heard.changed.set()

    heard.done = asyncio.ensure_future(collect())
    return heard


def make_request(
    script: str, *, task_id: str = '', context_id: str = '', webhook: str = ''
) -> SendMessageRequest:
    """Makes a message that says what `support.replica_app` shall do."""
    request = SendMessageRequest(
        message=Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_USER,
            task_id=task_id,
            context_id=context_id,
            parts=[Part(text='\n'.join(script.split('; ')))],
        )
    )
    if webhook:
        request.configuration.task_push_notification_config.CopyFrom(
            TaskPushNotificationConfig(id='hook', url=webhook)
        )
    return request


def passed_over(folder: Path) -> set[str]:
    """The tasks of which the SDK did not tell whom it should have.

    Args:
        folder: That of the replicas, which note it there.
    """
    notes = folder / 'passed_over'
    return set(notes.read_text().split()) if notes.exists() else set()


class Cluster:
    """Several replicas over one database."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        size: int = 2,
        settings: dict[str, float] | None = None,
        service: str = 'commanded',
        starts: int | None = None,
        faults: dict[int, dict[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        """Names the replicas.

        Args:
            database: What they share.
            folder: Where they log, and find their gates.
            size: How many there are.
            settings: What differs from `SETTINGS`.
            service: Whom they serve.
            starts: How many of them to start; all by default.
            faults: What goes wrong in which of them: see `chaos.faults`.
            config: More for `support.replica_app`.
        """
        self.database = database
        self.folder = folder
        self._starts = size if starts is None else starts
        self.replicas = [
            ForkedServer(
                name,
                module='support.replica_app',
                folder=folder,
                config={
                    'database_url': database.url,
                    'pooled': database.pooled,
                    'folder': str(folder),
                    'service': service,
                    'settings': {**SETTINGS, **(settings or {})},
                    **config,
                    **({'faults': faults[n]} if n in (faults or {}) else {}),
                },
            )
            for n, name in enumerate('ABCDEFGH'[:size])
        ]
        self.webhook = Heard()
        self.webhook_url = ''
        self._stack = contextlib.AsyncExitStack()
        self._clients: dict[tuple[int, str, bool], Client] = {}

    async def __aenter__(self) -> Cluster:
        async with contextlib.AsyncExitStack() as stack:
            self.engine = self.database.engine()
            stack.push_async_callback(self.engine.dispose)
            self.tasks = VersionedDatabaseTaskStore(self.engine)
            self.leases = DatabaseLeaseStore(self.engine)
            for replica in self.replicas:
                stack.callback(replica.end)
            for replica in self.replicas[: self._starts]:
                replica.start()
            self.webhook_url = await stack.enter_async_context(
                webhook(self.webhook.add)
            )
            await asyncio.gather(
                *(r.ready() for r in self.replicas[: self._starts])
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, *_: object
    ) -> None:
        if kind is not None:
            for replica in self.replicas:
                print(f'--- {replica.name}\n{replica.log_tail(60)}')
            print(*self.agent_log(), sep='\n')
            with contextlib.suppress(DBAPIError):
                print(*await self.leases.sessions(), sep='\n')
                print(*await self.leases.leases(), sep='\n')
        await self._stack.aclose()

    # Processes.

    def kill(self, number: int) -> None:
        self.replicas[number].kill()

    async def stop(self, number: int) -> None:
        """Pauses a replica, outside of its transactions.

        Within one it would keep locked what it has written.
        """
        while True:
            self.replicas[number].send_signal(signal.SIGSTOP)
            if not await self._is_held_up():
                return
            self.go_on(number)
            await asyncio.sleep(0.05)

    async def _is_held_up(self) -> bool:
        """Whether a transaction stands still."""
        if self.database.kind == 'sqlite':
            path = self.engine.url.database or ''
            return not await asyncio.to_thread(can_begin, path, 'IMMEDIATE')
        standing: set[Any] | None = None
        async with self.engine.connect() as connection:
            for _ in range(3):
                # MariaDB's list stays as it is until nobody has read it for
                # a tenth of a second.
                await asyncio.sleep(0.12)
                found = await connection.execute(
                    text(_TRANSACTIONS[self.database.kind])
                )
                now = {tuple(row) for row in found}
                await connection.rollback()
                standing = now if standing is None else standing & now
                if not standing:
                    return False
        return True

    def go_on(self, number: int) -> None:
        self.replicas[number].send_signal(signal.SIGCONT)

    def terminate(self, number: int) -> None:
        self.replicas[number].send_signal(signal.SIGTERM)

    def open_gate(self, name: str) -> None:
        (self.folder / f'gate-{name}').touch()

    # Clients.

    async def client(
        self, number: int, *, user: str = 'ada', streaming: bool = True
    ) -> Client:
        key = number, user, streaming
        if key not in self._clients:
            http = local_client(timeout=PATIENCE, headers={'x-user': user})
            self._stack.push_async_callback(http.aclose)
            self._clients[key] = await create_client(
                self.replicas[number].url,
                ClientConfig(streaming=streaming, httpx_client=http),
            )
        return self._clients[key]

    async def send(
        self, number: int, script: str, *, user: str = 'ada', **rest: Any
    ) -> Task | Message:
        """Sends a message and waits for the answer, as a blocking client."""
        client = await self.client(number, user=user, streaming=False)
        async for response in client.send_message(self.message(script, **rest)):
            return (
                response.task if response.HasField('task') else response.message
            )
        raise AssertionError('no answer')

    async def stream(
        self, number: int, script: str, *, user: str = 'ada', **rest: Any
    ) -> Heard:
        client = await self.client(number, user=user)
        return self.hear(client.send_message(self.message(script, **rest)))

    def hear(self, events: AsyncIterator[StreamResponse]) -> Heard:
        return listen(events)

    def message(
        self, script: str, *, task: Task | None = None, push: bool = False
    ) -> SendMessageRequest:
        return make_request(
            script,
            task_id=task.id if task else '',
            context_id=task.context_id if task else '',
            webhook=self.webhook_url if push else '',
        )

    # What is stored.

    async def task(self, task_id: str, *, user: str = 'ada') -> Task | None:
        stored = await self.tasks.get(
            task_id, ServerCallContext(user=NamedUser(user))
        )
        return stored.task if stored is not None else None

    async def until_state(
        self, task_id: str, state: int, *, user: str = 'ada'
    ) -> Task:
        async def reached():
            task = await self.task(task_id, user=user)
            return task if task and task.status.state == state else None

        return await self.until(reached)

    async def until(self, condition: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (result := await condition()):
                await asyncio.sleep(0.02)
            return result

    async def next_beat(self, number: int) -> None:
        """Waits for a beat of a replica."""
        pid = str(self.replicas[number].pid)

        async def beat() -> int:
            return max(
                session.beat
                for session in await self.leases.sessions()
                if session.label.endswith(f':{pid}')
            )

        before = await beat()

        async def passed() -> bool:
            return await beat() > before

        await self.until(passed)

    async def until_no_leases(self) -> None:
        async def none_left():
            return not [
                lease
                for lease in await self.leases.leases()
                if lease.session_id is not None
            ]

        await self.until(none_left)

    def agent_log(self) -> list[dict[str, Any]]:
        log = self.folder / 'agent.log'
        if not log.exists():
            return []
        return [json.loads(line) for line in log.read_text().splitlines()]


_TRANSACTIONS = {
    'postgresql': """
        SELECT pid, xact_start FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND state LIKE 'idle in transaction%'
    """,
    'mariadb': """
        SELECT trx_id, trx_started FROM information_schema.innodb_trx
        JOIN information_schema.processlist ON id = trx_mysql_thread_id
        WHERE db = DATABASE() AND id <> CONNECTION_ID()
    """,
}
"""Those in which a client has the word."""


FAILED = TaskState.TASK_STATE_FAILED
COMPLETED = TaskState.TASK_STATE_COMPLETED
CANCELED = TaskState.TASK_STATE_CANCELED
WORKING = TaskState.TASK_STATE_WORKING
INPUT_REQUIRED = TaskState.TASK_STATE_INPUT_REQUIRED
AUTH_REQUIRED = TaskState.TASK_STATE_AUTH_REQUIRED
