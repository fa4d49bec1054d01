"""What a canceled call of the database leaves behind: nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest
from a2a.server.cluster import (
    DatabaseTaskEventStream,
    VersionedDatabaseTaskStore,
)
from a2a.server.cluster.version import TaskVersion
from a2a.types.a2a_pb2 import Task, TaskState
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease.turns.event_stream import LeasedEventStream
from a2a_lease.turns.saving import always, read_through_outages
from support.databases import can_begin
from support.inprocess import call


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures('no_garbage_collector')
@pytest.mark.parametrize('what', ['read', 'subscription'])
async def test_a_canceled_call_keeps_no_file_locked(what: str, tmp_path: Path):
    """SQLite: a cursor that is open locks the file against all who write."""
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/tasks.db')
    tasks = VersionedDatabaseTaskStore(engine)
    await tasks.initialize()
    stream = DatabaseTaskEventStream(engine)
    await stream.initialize()
    task = Task(id='id', context_id='context')
    task.status.state = TaskState.TASK_STATE_WORKING
    await tasks.save(
        task,
        event=task,
        prev=None,
        prev_version=TaskVersion.MISSING,
        context=call(),
    )

    async def read() -> None:
        await read_through_outages(tasks, 'id', call(), permit=always)

    async def subscription() -> None:
        leased = LeasedEventStream(stream, None)  # type: ignore[arg-type]
        async for _ in leased.subscribe('id', after=TaskVersion.MISSING):
            pass

    kept = []
    for steps in range(120):
        calling = asyncio.ensure_future(
            read() if what == 'read' else subscription()
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        # Whoever holds the task holds its traceback.
        kept.append(calling)
        assert await asyncio.to_thread(
            can_begin, tmp_path / 'tasks.db', 'EXCLUSIVE'
        )
    await engine.dispose()
