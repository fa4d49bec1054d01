"""Parts that cannot work together are refused when they are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    VersionedDatabaseTaskStore,
)
from a2a.server.tasks import InMemoryTaskStore
from a2a.types.a2a_pb2 import GetTaskRequest, ListTasksRequest, TaskState
from a2a.utils.errors import TaskNotFoundError
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease import (
    ContextCodec,
    DatabaseLeaseStore,
    Fail,
    FailAbandoned,
    InMemoryLeaseStore,
    LeaseConfigurationError,
    LeasedRequestHandler,
    ReExecute,
    RecoveryPolicy,
    RunAgain,
)
from support.inprocess import ScriptedAgent, Service, call, card, until


if TYPE_CHECKING:
    from pathlib import Path


class Hasty(RecoveryPolicy):
    async def decide(self, lease, task):  # type: ignore[override]
        return Fail('late')


@pytest.mark.parametrize(
    ('changes', 'says'),
    [
        ({'task_store': InMemoryTaskStore()}, 'VersionedDatabaseTaskStore'),
        ({'event_stream': None}, 'DatabaseTaskEventStream'),
        ({'lease_store': None}, r'DatabaseLeaseStore\(engine\)'),
        ({'agent_card': None}, 'AgentCard'),
        ({'agent_card': card('')}, 'service='),
        ({'agent_card': card('  ')}, 'service='),
        ({'service': 'x' * 256}, '256 characters; at most 255'),
        ({'context_codec': ContextCodec}, r'ContextCodec\(\)'),
        ({'settings': {'ttl': 4}}, r'LeaseSettings\(...\)'),
        ({'recovery': FailAbandoned}, r'FailAbandoned\(\)'),
        ({'recovery': Hasty()}, r'Hasty.decide\(\) must not be async'),
    ],
)
def test_a_part_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
):
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/x.db')
    parts = {
        'agent_executor': ScriptedAgent(),
        'agent_card': card(),
        'task_store': VersionedDatabaseTaskStore(engine),
        'event_stream': DatabaseTaskEventStream(engine),
        'lease_store': InMemoryLeaseStore(),
    }
    LeasedRequestHandler(**parts)
    with pytest.raises(LeaseConfigurationError, match=says):
        LeasedRequestHandler(**{**parts, **changes})
    missing = [name for name, value in changes.items() if value is None]
    for name in missing:
        with pytest.raises((LeaseConfigurationError, TypeError)):
            LeasedRequestHandler(
                **{k: v for k, v in parts.items() if k != name}
            )


def test_a_store_that_cannot_be_is_refused(tmp_path: Path):
    url = f'{tmp_path}/x.db'
    for engine, says in (
        (create_engine(f'sqlite:///{url}'), 'create_async_engine'),
        (f'sqlite+aiosqlite:///{url}', 'create_async_engine'),
    ):
        with pytest.raises(LeaseConfigurationError, match=says):
            DatabaseLeaseStore(engine)  # type: ignore[arg-type]
    engine = create_async_engine(f'sqlite+aiosqlite:///{url}')
    for prefix in ('a b', 'x"; --', 'ü', 'x' * 41):
        with pytest.raises(LeaseConfigurationError, match='table_prefix'):
            DatabaseLeaseStore(engine, table_prefix=prefix)


@pytest.mark.parametrize(
    'make',
    [
        lambda: ReExecute(0),
        lambda: ReExecute(True),
        lambda: ReExecute(backoff=-1),
        lambda: ReExecute(reason='{hosts}'),
        lambda: ReExecute(reason='{'),
        lambda: ReExecute(backoff=float('nan')),
        lambda: RunAgain(after=-1),
        lambda: RunAgain(after='5'),  # type: ignore[arg-type]
        lambda: RunAgain(after=float('inf')),
        lambda: ReExecute(reason='{attempts.none}'),
        lambda: ReExecute(reason=None),  # type: ignore[arg-type]
        lambda: Fail(None),  # type: ignore[arg-type]
    ],
)
def test_a_number_that_cannot_be_is_refused(make):
    with pytest.raises(LeaseConfigurationError, match='not '):
        make()


@pytest.mark.parametrize('request_', ['get', 'list'])
async def test_whoever_only_reads_starts_the_handler_too(
    service: Service, request_: str, caplog: pytest.LogCaptureFixture
):
    """A replica that is asked for tasks of others watches them."""
    replica = await service.replica(ScriptedAgent(), start=False)
    if request_ == 'get':
        with pytest.raises(TaskNotFoundError):
            await replica.handler.on_get_task(GetTaskRequest(id='none'), call())
    else:
        await replica.handler.on_list_tasks(ListTasksRequest(), call())
    assert 'lifespan=handler.lifespan' in caplog.text
    assert await service.leases.sessions()
    await replica.handler.aclose()


async def test_a_decision_that_is_none_leaves_the_task_to_the_next_try(
    service: Service, caplog: pytest.LogCaptureFixture
):
    from recovery.test_recovery import Dead

    answers: list[Any] = [None, 'fail', Fail('At last.')]

    class Forgetful(RecoveryPolicy):
        may_run_again = False

        def decide(self, lease, task):
            return answers.pop(0)

    replica = await service.replica(ScriptedAgent(), recovery=Forgetful())
    dead = await Dead(service).open(replica)
    await dead.store('t', TaskState.TASK_STATE_WORKING)
    await dead.lease('t')
    await dead.die()

    async def failed():
        return await replica.state('t') == TaskState.TASK_STATE_FAILED

    await until(failed)
    assert 'Forgetful.decide() returned None' in caplog.text
