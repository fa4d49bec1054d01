from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from support.databases import (
    Database,
    PgBouncer,
    PrivateMariaDB,
    Servers,
    make_database,
)


if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


SERIALIZABLE, POOLED, STRICT, WAL = SET_UPS = (
    'postgresql, serializable, far from UTC',
    'postgresql behind a pooler',
    'mariadb, serializable, far from UTC',
    'sqlite in WAL mode',
)
"""MariaDB is in REPEATABLE READ, and SQLite without a WAL, everywhere else."""
_KINDS = {
    SERIALIZABLE: 'postgresql',
    POOLED: 'postgresql',
    STRICT: 'mariadb',
    WAL: 'sqlite',
}


@pytest.fixture(params=SET_UPS)
async def database(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> AsyncIterator[Database]:
    set_up = request.param
    if set_up == STRICT and not PrivateMariaDB.is_installed():
        pytest.skip('mariadbd is missing')
    if set_up == POOLED and not PgBouncer.is_installed():
        pytest.skip('pgbouncer is missing')
    database = make_database(_KINDS[set_up], servers, tmp_path)
    if set_up == SERIALIZABLE:
        await _alter(
            database,
            "default_transaction_isolation TO 'serializable'",
            "timezone TO 'Pacific/Apia'",
        )
    elif set_up == STRICT:
        database.url += (
            "&init_command=SET time_zone = '%2B13:00', "
            "tx_isolation = 'SERIALIZABLE'"
        )
    elif set_up == WAL:
        path = database.url.partition('///')[2]
        with closing(sqlite3.connect(path)) as file:
            file.execute('PRAGMA journal_mode = WAL')
    if set_up != POOLED:
        yield database
        return
    pooler = PgBouncer(database.url)
    try:
        yield Database('postgresql', pooler.url, database.server, pooled=True)
    finally:
        pooler.close()


async def _alter(database: Database, *settings: str) -> None:
    engine = database.engine()
    name = engine.url.database
    async with engine.begin() as connection:
        for setting in settings:
            await connection.execute(
                text(f'ALTER DATABASE {name} SET {setting}')
            )
    await engine.dispose()
