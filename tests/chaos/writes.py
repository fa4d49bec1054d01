"""Writes that stand still while reads go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


@asynccontextmanager
async def frozen(engine: AsyncEngine, kind: str) -> AsyncGenerator[None]:
    """Has all writes wait.

    Args:
        engine: The database.
        kind: Which one it is.
    """
    async with engine.connect() as connection:
        names = await connection.run_sync(
            lambda sync: inspect(sync).get_table_names()
        )
        if kind == 'postgresql':
            # Others that stand still in a transaction may be cut off for it.
            forever = 'SET idle_in_transaction_session_timeout = 0'
            await connection.execute(text(forever))
            await connection.commit()
            await _lock(connection, names)
        elif kind == 'mariadb':
            await connection.execute(text('SET idle_transaction_timeout = 0'))
            locks = ', '.join(f'{name} READ' for name in names)
            await connection.execute(text(f'LOCK TABLES {locks}'))
        else:
            await connection.rollback()
            raw = await connection.get_raw_connection()
            cursor = await raw.driver_connection.execute('BEGIN IMMEDIATE')
            await cursor.close()
        yield
        if kind == 'mariadb':
            await connection.execute(text('UNLOCK TABLES'))
        elif kind == 'sqlite':
            raw = await connection.get_raw_connection()
            await raw.driver_connection.rollback()


async def _lock(connection: AsyncConnection, names: list[str]) -> None:
    locks = f'LOCK TABLE {", ".join(names)} IN SHARE MODE'
    while True:
        try:
            await connection.execute(text(locks))
        except DBAPIError:  # A deadlock with who writes.
            await connection.rollback()
        else:
            return
