"""Rows that a person, or another version, has written."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import column, table, text, update

from a2a_lease import DatabaseLeaseStore, LeaseError
from a2a_lease.testing.conformance import SERVICE, acquire, open_session


if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncEngine

    from support.databases import Database


SESSIONS = table(
    'a2a_lease_sessions', column('id'), column('state'), column('service')
)
LEASES = table(
    'a2a_lease_leases',
    column('task_id'),
    column('state'),
    column('cancel_requested'),
    column('session_id'),
)


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = database.engine()
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> DatabaseLeaseStore:
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    return store


async def _write(engine: AsyncEngine, statement: Any) -> None:
    async with engine.begin() as connection:
        await connection.execute(statement)


async def test_a_session_in_an_unknown_state_is_left_alone(
    engine: AsyncEngine,
    store: DatabaseLeaseStore,
    caplog: pytest.LogCaptureFixture,
):
    """And holds up nobody."""
    me, strange = await open_session(store), await open_session(store)
    dead = await open_session(store)
    await acquire(store, strange, 'strange')
    await acquire(store, dead, 'left')
    await store.fence(dead, beat=0)
    await _write(
        engine,
        update(SESSIONS)
        .where(SESSIONS.c.id == strange)
        .values(state='hibernating'),
    )
    look = await store.look(SERVICE, me, everyone=True)
    assert [session.id for session in look.ended] == [dead]
    for ended in (None, [strange, dead]):
        claimed = await store.claim(
            SERVICE, session_id=me, limit=9, ended=ended
        )
        assert [c.lease.task_id for c in claimed] == (
            ['left'] if ended is None else []
        )
    assert not await store.forget_session(strange)
    await store.prune_sessions(SERVICE, older_than=-1)
    with caplog.at_level(logging.WARNING):
        sessions = {session.id for session in await store.sessions()}
    assert me in sessions
    assert strange not in sessions
    assert 'hibernating' in caplog.text


async def test_a_lease_in_an_unknown_state_is_left_alone(
    engine: AsyncEngine,
    store: DatabaseLeaseStore,
    caplog: pytest.LogCaptureFixture,
):
    """And holds up nobody."""
    me, dead = await open_session(store), await open_session(store)
    await acquire(store, dead, 'a strange')
    await acquire(store, dead, 'left')
    await _write(
        engine,
        update(LEASES)
        .where(LEASES.c.task_id == 'a strange')
        .values(state='suspended', cancel_requested=True),
    )
    await store.fence(dead, beat=0)
    claimed = await store.claim(SERVICE, session_id=me, limit=9, ended=[dead])
    assert [c.lease.task_id for c in claimed] == ['left']
    with pytest.raises(LeaseError, match=r"'suspended'.*version"):
        await store.get(SERVICE, 'a strange')
    with caplog.at_level(logging.WARNING):
        leases = await store.leases()
    assert [lease.task_id for lease in leases] == ['left']
    assert 'a strange' in caplog.text


async def test_a_lease_of_a_session_that_is_nowhere_is_claimed(
    engine: AsyncEngine, store: DatabaseLeaseStore
):
    me = await open_session(store)
    await acquire(store, me)
    await _write(
        engine, update(LEASES).values(session_id="'; DROP TABLE sessions")
    )
    [claimed] = await store.claim(SERVICE, session_id=me, limit=9, ended=None)
    assert claimed.previous_session is None
    assert not claimed.previous_closed


async def test_tables_of_another_version_are_said(
    engine: AsyncEngine, store: DatabaseLeaseStore
):
    """At the start, not at the first crash."""
    async with engine.begin() as connection:
        await connection.execute(
            text('ALTER TABLE a2a_lease_leases DROP COLUMN previous_closed')
        )
    with pytest.raises(LeaseError, match='previous_closed'):
        await DatabaseLeaseStore(engine).initialize()
