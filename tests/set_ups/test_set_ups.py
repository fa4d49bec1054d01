"""Databases as others set them up, and what must hold on them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from processes.test_death import (  # noqa: F401 - run here once more
    test_a_killed_replica_s_task_fails_and_all_are_told,
)
from processes.test_running_again import (  # noqa: F401 - run here once more
    test_a_killed_replica_s_turn_goes_on_elsewhere,
)
from set_ups.conftest import POOLED, SERIALIZABLE, STRICT, WAL
from stores.test_conformance import (  # noqa: F401 - run here once more
    TestDatabaseLeaseStore,
)


if TYPE_CHECKING:
    from support.databases import Database


async def test_the_set_up_is_what_it_says(
    database: Database, request: pytest.FixtureRequest
):
    asked = {
        SERIALIZABLE: [
            ('SHOW default_transaction_isolation', 'serializable'),
            ('SHOW timezone', 'Pacific/Apia'),
        ],
        STRICT: [
            ('SELECT @@tx_isolation', 'SERIALIZABLE'),
            ('SELECT @@time_zone', '+13:00'),
        ],
        WAL: [('PRAGMA journal_mode', 'wal')],
        POOLED: [],
    }[request.node.callspec.params['database']]
    engine = database.engine()
    async with engine.connect() as connection:
        for query, answer in asked:
            assert await connection.scalar(text(query)) == answer
    if database.pooled:
        # Two clients, one after another, on one connection of the server.
        pids = set()
        for _ in range(2):
            async with engine.connect() as connection:
                pids.add(
                    await connection.scalar(text('SELECT pg_backend_pid()'))
                )
        assert len(pids) == 1
    await engine.dispose()
