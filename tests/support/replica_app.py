"""One replica of the agent that process tests run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import uuid
from pathlib import Path
from typing import Any

from a2a.auth.user import User
from a2a.server.agent_execution import AgentExecutor
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    VersionedDatabaseTaskStore,
)
from a2a.server.routes import (
    DefaultServerCallContextBuilder,
    create_agent_card_routes,
    create_jsonrpc_routes,
)
from a2a.server.tasks import (
    BasePushNotificationSender,
    DatabasePushNotificationConfigStore,
)
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    Artifact,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from sqlalchemy.exc import TimeoutError as SQLAlchemyTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.applications import Starlette

from a2a_lease import (
    DatabaseLeaseStore,
    Fail,
    FailAbandoned,
    LeaseSettings,
    LeasedRequestHandler,
    ReExecute,
    RecoveryPolicy,
    RunAgain,
    current_lease,
)
from a2a_lease.demo.local_http import local_client
from a2a_lease.demo.serving import serve
from chaos import faults
from support.databases import engine_of


_POOL = 15
"""Connections at once, as SQLAlchemy makes them by default."""
STATES = {
    'submitted': TaskState.TASK_STATE_SUBMITTED,
    'working': TaskState.TASK_STATE_WORKING,
    'input': TaskState.TASK_STATE_INPUT_REQUIRED,
    'auth': TaskState.TASK_STATE_AUTH_REQUIRED,
    'complete': TaskState.TASK_STATE_COMPLETED,
    'fail': TaskState.TASK_STATE_FAILED,
    'cancel': TaskState.TASK_STATE_CANCELED,
}


class Log:
    """What happens here, for all replicas in one file."""

    def __init__(self, folder: Path, replica: str) -> None:
        self.folder = folder
        self._replica = replica

    def __call__(self, what: str, task_id: str) -> None:
        line = json.dumps(
            {
                'what': what,
                'task': task_id,
                'replica': self._replica,
                'pid': os.getpid(),
            }
        )
        with (self.folder / 'agent.log').open('a') as log:
            log.write(f'{line}\n')


class NotedConfigs(DatabasePushNotificationConfigStore):
    """Notes whom the SDK does not tell, since it cannot read where."""

    def __init__(self, engine: AsyncEngine, folder: Path) -> None:
        super().__init__(engine)
        self._notes = folder / 'passed_over'

    async def get_info_for_dispatch(self, task_id):
        try:
            return await super().get_info_for_dispatch(task_id)
        except Exception:
            with self._notes.open('a') as notes:
                notes.write(f'{task_id}\n')
            raise


class CommandedAgent(AgentExecutor):
    """Does what the lines of its message say.

    `task`, a state, `artifact TEXT`, `append TEXT`, `message TEXT`,
    `wait GATE` (for a file of that name), `stubborn GATE` (the same, whatever
    is done to it), `block SECONDS` (the event loop), `raise`, `oom`,
    `sleep SECONDS`, `checkpoint VALUE`, `count N GATE` (appends numbers up to
    N, each with a checkpoint, and waits for the gate after the first that this
    run adds), `tick N SECONDS` (the same, and waits so long after each),
    `hog SECONDS` (all connections to the database), `note WORD` (nothing).
    `first COMMAND` is for the first attempt only, `later COMMAND` for others.
    """

    def __init__(self, log: Log, engine: AsyncEngine) -> None:
        self._log = log
        self._folder = log.folder
        self._engine = engine

    async def execute(self, context, event_queue) -> None:
        task_id = context.task_id
        self._log(f'began {current_lease().attempt}', task_id)
        try:
            for line in context.get_user_input().splitlines():
                command, _, rest = line.strip().partition(' ')
                await self._do(command, rest, context, event_queue)
        except asyncio.CancelledError:
            self._log('stopped', task_id)
            raise
        finally:
            self._log('ended', task_id)

    async def _do(self, command, rest, context, queue) -> None:
        task_id, context_id = context.task_id, context.context_id
        lease = current_lease()
        # Who wrote it, for those who look at the events.
        by = {'token': lease.token}
        if command in ('first', 'later'):
            if (lease.attempt == 1) == (command == 'first'):
                command, _, rest = rest.partition(' ')
                await self._do(command, rest, context, queue)
        elif command == 'sleep':
            await asyncio.sleep(float(rest))
        elif command == 'checkpoint':
            await lease.save_checkpoint(rest)
        elif command in ('count', 'tick'):
            number, _, pause = rest.partition(' ')
            begin = (lease.checkpoint or {'counted': 0})['counted']
            # A number may be durable although its checkpoint is not.
            kept = lease.stored_task or context.current_task or Task()
            begin = max(begin, sum(len(a.parts) for a in kept.artifacts))
            for each in range(begin, int(number)):
                what = 'append' if each else 'artifact'
                await self._do(what, f'{each} ', context, queue)
                await lease.save_checkpoint({'counted': each + 1})
                if command == 'tick':
                    await asyncio.sleep(float(pause))
                elif each == begin:
                    await self._gate(f'{pause}{each}')
        elif command == 'hog':
            await self._hog(float(rest))
        elif command == 'note':
            pass
        elif command == 'task':
            await queue.enqueue_event(
                Task(
                    id=task_id,
                    context_id=context_id,
                    status=TaskStatus(state=STATES['submitted']),
                    history=[context.message],
                    metadata=by,
                )
            )
        elif command in STATES:
            await queue.enqueue_event(
                TaskStatusUpdateEvent(
                    task_id=task_id,
                    context_id=context_id,
                    status=TaskStatus(state=STATES[command]),
                    metadata=by,
                )
            )
        elif command in ('artifact', 'append'):
            await queue.enqueue_event(
                TaskArtifactUpdateEvent(
                    task_id=task_id,
                    context_id=context_id,
                    artifact=Artifact(artifact_id='a', parts=[Part(text=rest)]),
                    append=command == 'append',
                    metadata=by,
                )
            )
        elif command == 'message':
            await queue.enqueue_event(
                Message(
                    message_id=str(uuid.uuid4()),
                    role=Role.ROLE_AGENT,
                    context_id=context_id,
                    parts=[Part(text=rest)],
                )
            )
        elif command == 'wait':
            await self._gate(rest)
        elif command == 'stubborn':
            while True:
                try:
                    await self._gate(rest)
                    break
                except asyncio.CancelledError:
                    continue
        elif command == 'block':
            # A process whose clock is set apart cannot sleep otherwise.
            select.select([], [], [], float(rest))
        elif command == 'raise':
            raise RuntimeError('as commanded')
        elif command == 'oom':
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ValueError(f'unknown command {command!r}')

    async def _hog(self, seconds: float) -> None:
        async with contextlib.AsyncExitStack() as stack:
            with contextlib.suppress(SQLAlchemyTimeoutError):
                for _ in range(_POOL):
                    await stack.enter_async_context(self._engine.connect())
            await asyncio.sleep(seconds)

    async def _gate(self, name: str) -> None:
        while not (self._folder / f'gate-{name}').exists():
            await asyncio.sleep(0.02)

    async def cancel(self, context, event_queue) -> None:
        self._log('cancel() called', context.task_id)
        await event_queue.enqueue_event(
            TaskStatusUpdateEvent(
                task_id=context.task_id,
                context_id=context.context_id,
                status=TaskStatus(state=STATES['cancel']),
            )
        )


class HeaderUser(User):
    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_authenticated(self) -> bool:
        return bool(self._name)

    @property
    def user_name(self) -> str:
        return self._name


class ContextBuilder(DefaultServerCallContextBuilder):
    """Believes a header; tests have no secrets."""

    def build_user(self, request) -> User:
        return HeaderUser(request.headers.get('x-user', ''))


class Patient(RecoveryPolicy):
    """Runs again once a gate is open; until then, a claim is only a claim."""

    def __init__(self, folder: Path, gate: str) -> None:
        self._gate = folder / f'gate-{gate}'
        self._claimed = folder / 'claimed'

    def decide(self, lease, task):
        self._claimed.touch()
        if not self._gate.exists():
            return RunAgain(after=0.2)
        return RunAgain()


class Mixed(ReExecute):
    """Runs again what does not ask to be run once."""

    def decide(self, lease, task):
        said = task.history[0].parts[0].text if task and task.history else ''
        if 'note once' in said:
            return Fail('The agent says so.')
        return super().decide(lease, task)


def make_policy(config: dict[str, Any]) -> RecoveryPolicy:
    if 'decides_after' in config:
        return Patient(Path(config['folder']), config['decides_after'])
    if 'mixed' in config:
        return Mixed(**config['mixed'])
    if 're_execute' in config:
        return ReExecute(**config['re_execute'])
    return FailAbandoned()


def make_app(config: dict[str, Any]) -> Starlette:
    if 'faults' in config:
        faults.install(**config['faults'])
    engine = engine_of(
        config['database_url'],
        pooled=config['pooled'],
        **config.get('engine', {}),
    )
    log = Log(Path(config['folder']), config['name'])
    card = AgentCard(
        name=config['service'],
        description='Does as it is told.',
        version='1',
        default_input_modes=['text/plain'],
        default_output_modes=['text/plain'],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
        supported_interfaces=[
            AgentInterface(
                url=config['url'],
                protocol_binding='JSONRPC',
                protocol_version='1.0',
            )
        ],
    )
    configs = NotedConfigs(engine, Path(config['folder']))
    handler = LeasedRequestHandler(
        agent_executor=CommandedAgent(log, engine),
        agent_card=card,
        task_store=VersionedDatabaseTaskStore(engine),
        event_stream=DatabaseTaskEventStream(engine, poll_interval_s=0.1),
        lease_store=DatabaseLeaseStore(engine),
        settings=LeaseSettings(**config['settings']),
        recovery=make_policy(config),
        push_config_store=configs,
        push_sender=BasePushNotificationSender(local_client(), configs),
    )
    return Starlette(
        routes=[
            *create_agent_card_routes(card),
            *create_jsonrpc_routes(
                handler, rpc_url='/', context_builder=ContextBuilder()
            ),
        ],
        lifespan=handler.lifespan,
    )


if __name__ == '__main__':
    serve(make_app)
