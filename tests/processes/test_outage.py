"""The database goes away and comes back; the living are not declared dead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from a2a_lease.model import SessionState
from support.cluster import COMPLETED, WORKING, Cluster
from support.databases import drop_connections


if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


TTL = 3.0


@pytest.fixture(params=['postgresql', 'mariadb'])
def server_database(request) -> Database:
    return request.getfixturevalue(request.param)


async def _all_open(cluster: Cluster) -> None:
    sessions = await cluster.leases.sessions()
    assert {s.state for s in sessions} == {SessionState.OPEN}
    assert len(sessions) == len(cluster.replicas)


async def test_an_outage_longer_than_the_ttl_fails_nobody(
    server_database: Database, tmp_path: Path
):
    async with Cluster(server_database, tmp_path) as cluster:
        streams = [
            await cluster.stream(
                n,
                'task; working; artifact one; wait during; append two; '
                'wait end; append three; complete',
            )
            for n in range(2)
        ]
        for heard in streams:
            await heard.until(lambda heard: heard.texts)
        await cluster.engine.dispose()
        await asyncio.to_thread(server_database.server.stop)
        cluster.open_gate('during')
        await asyncio.sleep(2 * TTL)
        await asyncio.to_thread(server_database.server.start)
        cluster.open_gate('end')
        for heard in streams:
            await heard.ended()
            assert heard.error is None
            assert heard.states[-1] == COMPLETED
            task = await cluster.task(heard.task_id)
            [artifact] = task.artifacts
            texts = [part.text for part in artifact.parts]
            assert texts == ['one', 'two', 'three']
        await _all_open(cluster)
        await cluster.until_no_leases()


LOCKS = {
    'postgresql': 'LOCK TABLE a2a_lease_sessions IN SHARE MODE',
    'mariadb': 'LOCK TABLES a2a_lease_sessions READ',
    'sqlite': 'BEGIN IMMEDIATE',
}


async def test_writes_that_stall_while_reads_work_fail_nobody(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=3) as cluster:
        streams = [
            await cluster.stream(n, 'task; working; wait end; complete')
            for n in range(3)
        ]
        for heard in streams:
            await heard.until(lambda heard: WORKING in heard.states)
        engine = database.engine()
        async with engine.connect() as connection:
            await connection.execute(text(LOCKS[database.kind]))
            await asyncio.sleep(2 * TTL)
            await connection.rollback()
            if database.kind == 'mariadb':
                await connection.execute(text('UNLOCK TABLES'))
        await engine.dispose()
        # Whoever judged wrongly would do it now.
        await asyncio.sleep(TTL)
        await _all_open(cluster)
        cluster.open_gate('end')
        for heard in streams:
            await heard.ended()
            assert heard.error is None
            assert heard.states[-1] == COMPLETED
        await cluster.until_no_leases()


async def test_connections_that_the_server_drops_fail_nobody(
    server_database: Database, tmp_path: Path
):
    async with Cluster(server_database, tmp_path) as cluster:
        heard = await cluster.stream(
            0,
            'task; working; artifact 0; wait 1; append 1; wait 2; append 2; '
            'wait 3; append 3; complete',
        )
        await heard.until(lambda heard: heard.texts)
        for number in (1, 2, 3):
            await _drop_connections(server_database)
            cluster.open_gate(str(number))
            await heard.until(lambda heard, n=number: len(heard.texts) > n)
        await heard.ended()
        assert heard.states[-1] == COMPLETED
        assert heard.texts == ['0', '1', '2', '3']
        await _all_open(cluster)


async def _drop_connections(database: Database) -> None:
    engine = database.engine()
    await drop_connections(engine, database.kind)
    await engine.dispose()
