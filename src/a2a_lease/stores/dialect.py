"""What differs between the databases, each difference with its reason."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Float, literal_column, text
from sqlalchemy.ext.asyncio import AsyncEngine

from a2a_lease.errors import LeaseConfigurationError


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from sqlalchemy import ColumnElement
    from sqlalchemy.ext.asyncio import AsyncConnection


_EXTRAS = {
    'postgresql': 'postgresql',
    'mysql': 'mysql',
    'mariadb': 'mysql',
    'sqlite': 'sqlite',
}
_IN_MEMORY = ('', ':memory:')

_LOCK_SQLSTATES = frozenset({'55P03'})
_LOCK_CODES = frozenset({1205, 3572})
"""Lock wait timeout, and NOWAIT."""
_CONTENTION_SQLSTATES = frozenset({'40001', '40P01'})
_CONTENTION_CODES = frozenset({1020, 1205, 1213})
"""MariaDB reports a changed row as 1020 under snapshot isolation."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One kind of database."""

    name: str
    returns_updates: bool
    """MariaDB 10.11 and MySQL have no UPDATE ... RETURNING."""
    skips_locked: bool
    """SQLite has one writer at a time, and no row locks to skip."""
    isolation: str | None
    """Each statement here repeats its conditions; anything stricter only
    aborts them. SQLite knows one level."""

    @property
    def now(self) -> ColumnElement[float]:
        """Seconds since the epoch by the database, as the statement runs.

        PostgreSQL's now() stands still at the start of the transaction.
        """
        if self.name == 'postgresql':
            return literal_column(
                'extract(epoch from clock_timestamp())::float8', Float(53)
            )
        if self.name == 'sqlite':
            return literal_column(
                "((julianday('now') - 2440587.5) * 86400.0)", Float(53)
            )
        return literal_column(
            "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
            ' / 1e6)',
            Float(53),
        )

    async def begin_writing(self, connection: AsyncConnection) -> None:
        """Takes the write lock before the first read where there is one.

        SQLite refuses a transaction that reads first and writes later, if
        another one wrote in between.
        """
        if self.name == 'sqlite':
            await connection.execute(text('BEGIN IMMEDIATE'))

    @asynccontextmanager
    async def not_queueing(
        self, connection: AsyncConnection
    ) -> AsyncGenerator[None]:
        """Makes statements give up at once on what others locked."""
        if self.name == 'postgresql':
            # NOWAIT looks at rows only; this covers a locked table too.
            await connection.execute(text("SET LOCAL lock_timeout = '50ms'"))
            yield
            return
        if self.name == 'sqlite':
            before = await connection.scalar(text('PRAGMA busy_timeout'))
            await connection.execute(text('PRAGMA busy_timeout = 50'))
            try:
                yield
            finally:
                await connection.execute(
                    text(f'PRAGMA busy_timeout = {int(before or 0)}')
                )
            return
        await connection.execute(
            text(
                'SET SESSION lock_wait_timeout = 1, '
                'innodb_lock_wait_timeout = 1'
            )
        )
        try:
            yield
        finally:
            await connection.execute(
                text(
                    'SET SESSION lock_wait_timeout = DEFAULT, '
                    'innodb_lock_wait_timeout = DEFAULT'
                )
            )


def dialect_of(engine: AsyncEngine) -> Dialect:
    """Returns what is to know of the engine's database.

    Raises:
        LeaseConfigurationError: It is none of those that work, or it is in
            memory.
    """
    if not isinstance(engine, AsyncEngine):
        raise LeaseConfigurationError(
            f'DatabaseLeaseStore needs an engine of create_async_engine(), '
            f'not {engine!r}.'
        )
    name = engine.dialect.name
    if engine.dialect.driver == 'aiomysql':
        raise LeaseConfigurationError(
            'aiomysql fails on binary columns; use asyncmy: mysql+asyncmy://, '
            'with pip install "a2a-lease[mysql]".'
        )
    if name not in _EXTRAS:
        raise LeaseConfigurationError(
            f'DatabaseLeaseStore works on PostgreSQL, MySQL, MariaDB and '
            f'SQLite, not on {name}. Keep leases in one of those, or '
            f'implement LeaseStore.'
        )
    if name == 'sqlite':
        database = engine.url.database or ''
        if database in _IN_MEMORY or 'mode=memory' in str(engine.url):
            raise LeaseConfigurationError(
                'An SQLite database in memory cannot be shared: the heartbeat '
                'has a connection of its own, and would see another one. Use '
                'InMemoryLeaseStore(), which does the same, or a file.'
            )
        return Dialect(
            name=name,
            returns_updates=True,
            skips_locked=False,
            isolation=None,
        )
    return Dialect(
        name='mysql' if name == 'mariadb' else name,
        returns_updates=name == 'postgresql',
        skips_locked=True,
        isolation='READ COMMITTED',
    )


def is_locked(error: Exception) -> bool:
    """Whether a statement gave up, since others hold a lock."""
    sqlstate, code, said = _codes(error)
    return (
        sqlstate in _LOCK_SQLSTATES
        or code in _LOCK_CODES
        or 'database is locked' in said
        or 'database table is locked' in said
    )


def is_contention(error: Exception) -> bool:
    """Whether the same transaction may pass if it is tried again at once."""
    sqlstate, code, said = _codes(error)
    return (
        sqlstate in _CONTENTION_SQLSTATES
        or code in _CONTENTION_CODES
        or 'database is locked' in said
    )


def _codes(error: Exception) -> tuple[str, int | None, str]:
    original = getattr(error, 'orig', None)
    sqlstate = str(getattr(original, 'sqlstate', '') or '')
    arguments = getattr(original, 'args', ())
    code = arguments[0] if arguments and isinstance(arguments[0], int) else None
    return sqlstate, code, str(original)
