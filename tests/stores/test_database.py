"""What the conformance suite cannot see: locks, settings, and set-ups."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease import (
    DatabaseLeaseStore,
    LeaseConfigurationError,
    LeaseError,
)
from a2a_lease.model import SessionState
from a2a_lease.testing.conformance import SERVICE, acquire, open_session


if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database


@pytest.fixture
async def store(database: Database) -> AsyncIterator[DatabaseLeaseStore]:
    engine = database.engine()
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    yield store
    await engine.dispose()


ROW_LOCKS = {
    'sqlite': 'BEGIN IMMEDIATE',
    'postgresql': 'SELECT * FROM a2a_lease_sessions FOR UPDATE',
    'mariadb': 'SELECT * FROM a2a_lease_sessions FOR UPDATE',
}
TABLE_LOCKS = {
    'sqlite': 'BEGIN IMMEDIATE',
    'postgresql': 'LOCK TABLE a2a_lease_sessions IN SHARE MODE',
    'mariadb': 'LOCK TABLES a2a_lease_sessions READ',
}


@pytest.mark.parametrize('locks', [ROW_LOCKS, TABLE_LOCKS])
async def test_fencing_does_not_queue_behind_a_lock(
    database: Database, store: DatabaseLeaseStore, locks
):
    session_id = await open_session(store)
    engine = database.engine()
    async with engine.connect() as connection:
        await connection.execute(text(locks[database.kind]))
        # It would wait for as long as the lock is held, which is for ever.
        async with asyncio.timeout(20):
            assert not await store.fence(session_id, beat=0)
        await connection.rollback()
        if database.kind == 'mariadb':
            await connection.execute(text('UNLOCK TABLES'))
    await engine.dispose()
    [session] = await store.sessions(SERVICE)
    assert session.state is SessionState.OPEN
    assert await store.fence(session_id, beat=0)


async def test_a_beat_is_whole_before_its_commit(
    database: Database, store: DatabaseLeaseStore
):
    """A replica that is paused between the two keeps no lock on its row."""
    session_id = await open_session(store)
    engine = database.engine()
    beating = DatabaseLeaseStore(engine, create_table=False)
    await beating.initialize()

    @event.listens_for(engine.sync_engine, 'commit')
    def fail(connection: object) -> None:
        raise RuntimeError('Paused before its commit.')

    with pytest.raises(RuntimeError, match='Paused'):
        await beating.renew(session_id)
    await engine.dispose()
    [session] = await store.sessions(SERVICE)
    assert session.beat == 1


async def test_a_look_uses_an_index(postgresql: Database):
    engine = postgresql.engine()
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    async with engine.begin() as connection:
        await connection.execute(
            text(
                'INSERT INTO a2a_lease_sessions (id, service, state, done, '
                'beat, notices, ttl, heartbeat_interval, label, '
                'started_at, renewed_at) '
                "SELECT md5(n::text), 's', 'open', false, 0, 0, 20, 1, '', 0, 0 "
                'FROM generate_series(1, 2000) AS n'
            )
        )
        await connection.execute(text('ANALYZE a2a_lease_sessions'))
    statements: list[tuple[str, object]] = []

    @event.listens_for(engine.sync_engine, 'before_cursor_execute')
    def _(connection, cursor, statement, parameters, *rest):
        statements.append((statement, parameters))

    look = await store.look('s', 'm' * 32, everyone=False)
    assert len(look.open) == 3
    [(statement, parameters)] = [s for s in statements if 'UNION' in s[0]]
    async with engine.begin() as connection:
        await connection.execute(text('SET LOCAL enable_sort = on'))
        plan = await connection.exec_driver_sql(
            f'EXPLAIN {statement}', parameters
        )
        assert 'Seq Scan' not in '\n'.join(row[0] for row in plan)
    await engine.dispose()


async def test_tables_are_created_by_many_at_once(database: Database):
    engines = [database.engine() for _ in range(6)]
    stores = [DatabaseLeaseStore(engine) for engine in engines]
    await asyncio.gather(*(store.initialize() for store in stores))
    await asyncio.gather(*(open_session(store) for store in stores))
    assert len(await stores[0].sessions()) == 6
    for engine in engines:
        await engine.dispose()


async def test_missing_tables_are_said_when_they_may_not_be_created(
    database: Database,
):
    engine = database.engine()
    store = DatabaseLeaseStore(engine, create_table=False)
    with pytest.raises(LeaseConfigurationError, match='create_table=True'):
        await store.initialize()
    with pytest.raises(LeaseConfigurationError, match='a2a_lease_sessions'):
        await store.renew('x')
    await engine.dispose()


async def test_a_prefix_makes_another_store(database: Database):
    engine = database.engine()
    one = DatabaseLeaseStore(engine, table_prefix='one_')
    two = DatabaseLeaseStore(engine, table_prefix='two_')
    session_id = await open_session(one)
    await acquire(one, session_id)
    assert not await two.sessions()
    assert not await two.leases()
    detached = one.detached()
    assert await detached.renew(session_id) is not None
    await detached.close()
    await engine.dispose()


async def test_a_time_zone_changes_no_time(postgresql: Database):
    engine = create_async_engine(
        postgresql.url,
        connect_args={'server_settings': {'timezone': 'Pacific/Kiritimati'}},
    )
    store = DatabaseLeaseStore(engine)
    await open_session(store)
    [session] = await store.sessions()
    assert abs(session.started_at.timestamp() - time.time()) < 3600
    await engine.dispose()


@pytest.mark.parametrize('level', ['SERIALIZABLE', 'REPEATABLE READ'])
@pytest.mark.parametrize('kind', ['postgresql', 'mariadb'])
async def test_a_stricter_isolation_of_the_engine_changes_nothing(
    request, kind: str, level: str
):
    database = request.getfixturevalue(kind)
    engine = database.engine(isolation_level=level)
    store = DatabaseLeaseStore(engine)
    dead = await open_session(store)
    for number in range(10):
        await acquire(store, dead, f'task {number}')
    await store.fence(dead, beat=0)
    claimers = [await open_session(store) for _ in range(4)]
    claims = await asyncio.gather(
        *(
            store.claim(SERVICE, session_id=c, limit=10, ended=[dead])
            for c in claimers
        )
    )
    claimed = [each.lease.task_id for some in claims for each in some]
    assert sorted(claimed) == [f'task {n}' for n in range(10)]
    await engine.dispose()


@pytest.mark.parametrize('mode', ['wal', 'delete'])
async def test_sqlite_works_in_both_journal_modes(tmp_path, mode: str):
    url = f'sqlite+aiosqlite:///{tmp_path}/{mode}.db'
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        await connection.execute(text(f'PRAGMA journal_mode = {mode}'))
    store = DatabaseLeaseStore(engine)
    sessions = [await open_session(store) for _ in range(4)]
    stores = [DatabaseLeaseStore(create_async_engine(url)) for _ in sessions]

    async def work(store: DatabaseLeaseStore, session_id: str) -> None:
        for number in range(10):
            task_id = f'{session_id} {number}'
            lease = await acquire(store, session_id, task_id)
            assert await store.renew(session_id) is not None
            await store.release(SERVICE, task_id, token=lease.token)

    await asyncio.gather(*map(work, stores, sessions))
    assert [s.beat for s in await store.sessions()] == [10] * 4
    for each in (store, *stores):
        await each._engine.dispose()


@pytest.mark.parametrize(
    'url',
    [
        'sqlite+aiosqlite://',
        'sqlite+aiosqlite:///:memory:',
        'sqlite+aiosqlite:///file:x?mode=memory&cache=shared&uri=true',
    ],
)
def test_sqlite_in_memory_is_refused_with_the_way_out(url: str):
    with pytest.raises(LeaseConfigurationError, match='InMemoryLeaseStore'):
        DatabaseLeaseStore(create_async_engine(url))


async def test_a_detached_store_keeps_the_connection_s_making(
    database: Database,
):
    connected = []
    engine = database.engine()

    @event.listens_for(engine.sync_engine, 'connect')
    def _(connection, record):
        connected.append(connection)

    store = DatabaseLeaseStore(engine)
    session_id = await open_session(store)
    before = len(connected)
    detached = store.detached()
    assert await detached.renew(session_id) is not None
    assert len(connected) == before + 1
    await detached.close()
    # The user's engine is still open, and as it was.
    assert await store.renew(session_id) is not None
    await engine.dispose()


async def test_what_cannot_be_stored_is_said(store: DatabaseLeaseStore):
    session_id = await open_session(store)
    with pytest.raises(LeaseError, match='task id has 300 characters'):
        await acquire(store, session_id, 'x' * 300)
    with pytest.raises(LeaseError, match='owner contains a NUL'):
        await acquire(store, session_id, owner='a\0b')
    with pytest.raises(LeaseError, match='owner is not Unicode text'):
        await acquire(store, session_id, owner='\ud800')
    with pytest.raises(LeaseError, match='task id ends with a space'):
        await acquire(store, session_id, 'task ')
    with pytest.raises(LeaseError, match='session id ends with a space'):
        await open_session(store, 'session ')
    assert not await store.leases()
    large = b'x' * 1_000_000
    lease = await acquire(
        store, session_id, call_context=large, owner='🦊' * 100_000
    )
    stored = await store.get(SERVICE, lease.task_id)
    assert stored.call_context == large
    assert stored.owner == '🦊' * 100_000


async def test_a_beat_on_sqlite_gives_up_the_write_lock_by_itself(tmp_path):
    """What is given up runs to its end there, and would pile up."""
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/x.db')
    store = DatabaseLeaseStore(engine)
    session_id = await open_session(store)
    detached = store.detached()
    assert await detached.renew(session_id) is not None
    tries = []
    event.listen(
        detached._engine.sync_engine,
        'before_cursor_execute',
        lambda *call: tries.append(call[2]),
    )
    async with engine.connect() as connection:
        before = await connection.scalar(text('PRAGMA busy_timeout'))
        await connection.execute(text('BEGIN IMMEDIATE'))
        with pytest.raises(OperationalError, match='locked'):
            await detached.renew(session_id)
        await connection.rollback()
        # The server's own connections wait as they did.
        assert await connection.scalar(text('PRAGMA busy_timeout')) == before
    assert len(tries) == 1
    async with detached._engine.connect() as connection:
        wait = await connection.scalar(text('PRAGMA busy_timeout'))
    assert wait < before
    assert await detached.renew(session_id) is not None
    await detached.close()
    await engine.dispose()


async def test_a_canceled_write_on_sqlite_keeps_no_lock(tmp_path):
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/x.db')
    other = create_async_engine(
        f'sqlite+aiosqlite:///{tmp_path}/x.db',
        connect_args={'timeout': 0.2},
    )
    store = DatabaseLeaseStore(engine)
    session_id = await open_session(store)
    for delay in range(40):
        beat = asyncio.ensure_future(store.renew(session_id))
        await asyncio.sleep(delay / 20_000)
        beat.cancel()
        await asyncio.wait({beat})
    await store.close()
    elsewhere = DatabaseLeaseStore(other)
    assert await elsewhere.renew(session_id) is not None
    await engine.dispose()
    await other.dispose()


async def test_a_label_is_made_fit(store: DatabaseLeaseStore):
    """It is for people; a strange host name stops no replica."""
    await store.open_session(
        session_id='s',
        service=SERVICE,
        ttl=1.0,
        heartbeat_interval=0.1,
        label='\0h\ud800' + 'x' * 300,
    )
    [session] = await store.sessions()
    assert session.label.startswith('h?xx')
    assert len(session.label) == 255


async def test_what_a_user_said_can_be_encrypted(database: Database):
    engine = database.engine()
    store = DatabaseLeaseStore(engine, encryption_key=Fernet.generate_key())
    session_id = await open_session(store)
    await acquire(store, session_id, turn=b'a secret')
    await store.save_checkpoint(SERVICE, 'task', token=1, checkpoint=b'secrets')
    kept = await store.stored_turn(SERVICE, 'task', token=1)
    assert (kept.turn, kept.checkpoint) == (b'a secret', b'secrets')
    async with engine.connect() as connection:
        [row] = await connection.execute(
            text('SELECT turn, checkpoint FROM a2a_lease_leases')
        )
    assert b'secret' not in bytes(row.turn) + bytes(row.checkpoint)
    other = DatabaseLeaseStore(engine, encryption_key=Fernet.generate_key())
    with pytest.raises(LeaseError, match='Give all replicas the same'):
        await other.stored_turn(SERVICE, 'task', token=1)
    await engine.dispose()


async def test_a_key_that_is_none_is_refused(tmp_path, monkeypatch):
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/x.db')
    with pytest.raises(LeaseConfigurationError, match='generate_key'):
        DatabaseLeaseStore(engine, encryption_key='secret')
    with pytest.raises(LeaseConfigurationError, match='not a Fernet key'):
        DatabaseLeaseStore(engine, encryption_key='')
    monkeypatch.setitem(sys.modules, 'cryptography.fernet', None)
    with pytest.raises(LeaseConfigurationError, match='encryption\\]'):
        DatabaseLeaseStore(engine, encryption_key=Fernet.generate_key())
    await engine.dispose()
