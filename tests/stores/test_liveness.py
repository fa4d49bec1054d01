"""Locks that the operating system frees when a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from a2a_lease import DatabaseLeaseStore
from a2a_lease.model import LivenessLock
from a2a_lease.testing.conformance import open_session
from support.databases import Database, PgBouncer


if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from a2a_lease import LeaseStore


HOLDER = """
import asyncio, os, sys
from sqlalchemy.ext.asyncio import create_async_engine
from a2a_lease import DatabaseLeaseStore

async def main(url, session_id, forks):
    store = DatabaseLeaseStore(create_async_engine(url)).detached()
    lock = await store.take_liveness_lock(session_id, number=1)
    assert await store.renew(session_id, lock=lock)
    if forks and not os.fork():
        import time
        time.sleep(60)
        os._exit(0)
    print('holds', flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:3], len(sys.argv) > 3))
"""


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[object]:
    engine = database.engine()
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine) -> DatabaseLeaseStore:
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    return store


@pytest.fixture
async def looker(store: DatabaseLeaseStore) -> AsyncIterator[LeaseStore]:
    """Another replica, with a lock of its own."""
    looker = store.detached()
    assert await looker.take_liveness_lock('looker', number=1) is not None
    yield looker
    await looker.close()


async def _released(looker: LeaseStore) -> set[str]:
    locked = [s for s in await looker.sessions() if s.lock is not None]
    return await looker.released_locks(locked)


async def _until_released(looker: LeaseStore, session_id: str) -> None:
    async with asyncio.timeout(20):
        while session_id not in await _released(looker):
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _holder(database: Database, *arguments: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        '-c',
        HOLDER,
        database.url,
        *arguments,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b'holds\n'
        yield process
    finally:
        # With what it has forked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_the_lock_of_a_killed_process_is_free(
    database: Database, store: DatabaseLeaseStore, looker: LeaseStore
):
    session_id = await open_session(store)
    async with _holder(database, session_id) as process:
        # Looking takes nothing, however often.
        for _ in range(3):
            assert not await _released(looker)
        [session] = await store.sessions()
        mine = await looker.take_liveness_lock('looker', number=2)
        assert mine is not None
        assert session.lock == LivenessLock(server=mine.server, number=1)
        process.send_signal(signal.SIGSTOP)
        assert not await _released(looker)
        process.kill()
        await _until_released(looker, session_id)


async def test_the_lock_of_another_connection_is_another_one(
    store: DatabaseLeaseStore, looker: LeaseStore
):
    session_id = await open_session(store)
    replica = store.detached()
    first = await replica.take_liveness_lock(session_id, number=1)
    assert await replica.renew(session_id, lock=first) is not None
    again = store.detached()
    second = await again.take_liveness_lock(session_id, number=2)
    assert second is not None
    assert await again.renew(session_id, lock=second) is not None
    # What is left of the first one, at a server that takes it for alive, says
    # nothing of the second; nor does its end.
    await replica.close()
    assert not await _released(looker)
    await again.take_liveness_lock(session_id, number=3)
    [session] = [s for s in await store.sessions() if s.id == session_id]
    assert session.lock == second
    await again.close()


async def test_a_beat_without_its_lock_is_an_error(postgresql: Database):
    """Else a lock that is free could be that of a replica that beats."""
    engine = postgresql.engine()
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    session_id = await open_session(store)
    replica = store.detached()
    lock = await replica.take_liveness_lock(session_id, number=1)
    assert await replica.renew(session_id, lock=lock) is not None
    async with engine.connect() as connection:
        await connection.execute(
            text(
                'SELECT pg_terminate_backend(pid) FROM pg_locks '
                "WHERE locktype = 'advisory' AND database = (SELECT oid "
                'FROM pg_database WHERE datname = current_database())'
            )
        )
    with pytest.raises(DBAPIError):
        await replica.renew(session_id, lock=lock)
    # Without one it beats on.
    assert await replica.renew(session_id) is not None
    [session] = await store.sessions()
    assert session.lock is None
    await replica.close()
    await engine.dispose()


async def test_a_beat_and_a_look_come_at_the_same_time(
    store: DatabaseLeaseStore,
):
    """Both need the connection that has the lock."""
    session_id = await open_session(store)
    replica = store.detached()
    lock = await replica.take_liveness_lock(session_id, number=1)
    assert await replica.renew(session_id, lock=lock)
    [session] = await store.sessions()
    for _ in range(20):
        beaten, released = await asyncio.gather(
            replica.renew(session_id, lock=lock),
            replica.released_locks([session]),
        )
        assert beaten is not None
        assert not released
    await replica.close()


async def test_a_dead_session_leaves_no_file(
    database: Database, store: DatabaseLeaseStore, looker: LeaseStore
):
    session_id = await open_session(store)
    async with _holder(database, session_id) as process:
        process.kill()
        await _until_released(looker, session_id)
    [session] = [s for s in await store.sessions() if s.id == session_id]
    assert await looker.fence(session_id, beat=session.beat)
    closing = store.detached()
    await closing.take_liveness_lock('another', number=1)
    await closing.close()
    if database.kind == 'sqlite':
        path = Path(database.url.partition('///')[2])
        [only] = path.parent.glob(f'{path.name}-a2a-lease-*')
        assert only.stat().st_size == 0  # The looker's.


async def test_a_fork_does_not_hold_the_lock(tmp_path: Path):
    database = Database(
        'sqlite', f'sqlite+aiosqlite:///{tmp_path}/test.db', None
    )
    engine = database.engine()
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    session_id = await open_session(store)
    looker = store.detached()
    assert await looker.take_liveness_lock('looker', number=1)
    async with _holder(database, session_id, 'forks') as process:
        assert not await _released(looker)
        process.kill()
        await _until_released(looker, session_id)
    await looker.close()
    await engine.dispose()


async def test_there_is_no_lock_behind_a_pooler(postgresql: Database):
    """The connection of the server is another client's a moment later."""
    if not PgBouncer.is_installed():
        pytest.skip('pgbouncer is missing')
    with contextlib.closing(PgBouncer(postgresql.url)) as pooler:
        database = Database(
            'postgresql', pooler.url, postgresql.server, pooled=True
        )
        engine = database.engine()
        store = DatabaseLeaseStore(engine)
        await store.initialize()
        session_id = await open_session(store)
        replica = store.detached()
        assert await replica.take_liveness_lock(session_id, number=1) is None
        assert await replica.renew(session_id) is not None
        await replica.close()
        await engine.dispose()


async def test_a_server_that_restarted_is_another_one(postgresql: Database):
    engine = postgresql.engine()
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    replica = store.detached()
    before = await replica.take_liveness_lock('x', number=1)
    await replica.close()
    await engine.dispose()
    await asyncio.to_thread(postgresql.server.stop)
    await asyncio.to_thread(postgresql.server.start)
    replica = DatabaseLeaseStore(postgresql.engine()).detached()
    after = await replica.take_liveness_lock('x', number=2)
    await replica.close()
    assert before is not None
    assert after is not None
    assert before.server != after.server
