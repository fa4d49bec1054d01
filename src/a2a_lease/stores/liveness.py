"""Locks that the operating system frees when a process dies.

A process that is killed closes its connections and its files within
milliseconds. A lock that is seen free is evidence of death, long before the
silence is; see `a2a_lease.replica.watcher` for what it takes to be believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    cast,
    column,
    func,
    select,
    table,
    text,
)

from a2a_lease.errors import LeaseError
from a2a_lease.model import LivenessLock


try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
except ImportError:  # On Windows.
    flock = None


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from sqlalchemy import TableClause
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine


_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')


class LivenessLocks(ABC):
    """Takes the lock of one session, and looks at those of others."""

    leave_files = False
    """Whether a process that dies leaves something to `clear`."""

    @abstractmethod
    async def take(self, session_id: str, number: int) -> LivenessLock | None:
        """Takes a lock anew; the one before goes.

        Returns:
            The lock, or None where none can be had that goes with the process.
        """

    @abstractmethod
    async def released(self, locks: Mapping[str, LivenessLock]) -> set[str]:
        """Returns the sessions whose lock nobody holds.

        Args:
            locks: What they have published, by session id.
        """

    @asynccontextmanager
    async def holder(self) -> AsyncGenerator[AsyncConnection | None]:
        """Gives the connection that holds the lock, to beat through it.

        None where no connection does.

        Raises:
            LeaseError: It is gone.
        """
        yield None

    async def clear(self, session_id: str, number: int) -> None:
        """Removes what is left of the lock of a session that is over."""
        del session_id, number

    @abstractmethod
    async def close(self) -> None:
        """Lets go of everything."""


def _name(session_id: str, number: int) -> str:
    """Returns a name that is as long as MySQL allows, at most."""
    named = f'a2a-lease {session_id} {number}'.encode(errors='replace')
    return f'a2a-lease-{hashlib.blake2b(named, digest_size=16).hexdigest()}'


class _ServerLocks(LivenessLocks):
    """Locks of the connection that beats, on a database server."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._closed = False
        self._connection: AsyncConnection | None = None
        self._in_use = asyncio.Lock()

    async def take(self, session_id: str, number: int) -> LivenessLock | None:
        await self._let_go()
        connection = await self._engine.connect()
        try:
            connection = await connection.execution_options(
                isolation_level='AUTOCOMMIT'
            )
            server = await self._server(connection)
            taken = server is not None and await self._lock(
                connection, _name(session_id, number)
            )
            if server is None or not taken or self._closed:
                await connection.invalidate()
                return None
        except BaseException:
            await connection.invalidate()
            raise
        self._connection = connection
        return LivenessLock(server=server, number=number)

    @asynccontextmanager
    async def holder(self) -> AsyncGenerator[AsyncConnection]:
        async with self._in_use:
            if self._connection is None:
                raise LeaseError('The liveness lock is gone.')
            yield self._connection

    async def released(self, locks: Mapping[str, LivenessLock]) -> set[str]:
        if not locks:
            return set()
        names = {
            _name(session_id, lock.number): session_id
            for session_id, lock in locks.items()
        }
        async with self.holder() as connection:
            held = await self._held(connection, names)
        return {names[name] for name in names if name not in held}

    async def close(self) -> None:
        self._closed = True
        await self._let_go()
        await self._engine.dispose()

    async def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # The lock would stay with a connection that the pool keeps.
            with contextlib.suppress(Exception):
                await connection.invalidate()

    @abstractmethod
    async def _server(self, connection: AsyncConnection) -> str | None:
        """Returns which life of which server answers.

        None, if a pooler stands in between: such a lock may be another
        client's by the next statement.
        """

    @abstractmethod
    async def _lock(self, connection: AsyncConnection, name: str) -> bool: ...

    @abstractmethod
    async def _held(
        self, connection: AsyncConnection, names: Collection[str]
    ) -> set[str]: ...


async def _driver_connection(connection: AsyncConnection) -> Any:  # noqa: ANN401
    return (await connection.get_raw_connection()).driver_connection


class _PostgresLocks(_ServerLocks):
    async def _server(self, connection: AsyncConnection) -> str | None:
        started, pid = (
            await connection.execute(
                text(
                    'SELECT extract(epoch FROM pg_postmaster_start_time())'
                    '::text, pg_backend_pid()'
                )
            )
        ).one()
        driver = await _driver_connection(connection)
        told = getattr(driver, 'get_server_pid', lambda: None)()
        return f'postgresql {started}' if told == pid else None

    async def _lock(self, connection: AsyncConnection, name: str) -> bool:
        locked = await connection.scalar(
            text('SELECT pg_try_advisory_lock(:key)'),
            {'key': _signed(_key(name))},
        )
        return bool(locked)

    async def _held(
        self, connection: AsyncConnection, names: Collection[str]
    ) -> set[str]:
        keys = {_key(name): name for name in names}
        rows = await connection.execute(
            text(
                'SELECT classid::bigint, objid::bigint FROM pg_locks '
                "WHERE locktype = 'advisory' AND objsubid = 1 AND granted "
                'AND database = (SELECT oid FROM pg_database '
                'WHERE datname = current_database()) '
                'AND objid::bigint = ANY(:low)'
            ),
            {'low': [key & 0xFFFFFFFF for key in keys]},
        )
        held = {high << 32 | low for high, low in rows}
        return {name for key, name in keys.items() if key in held}


def _key(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big')


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key


def _status(schema: str, name: str) -> TableClause:
    return table(
        name,
        column('VARIABLE_NAME'),
        column('VARIABLE_VALUE'),
        schema=schema,
    )


_MARIADB_STATUS = _status('information_schema', 'GLOBAL_STATUS')
_MYSQL_STATUS = _status('performance_schema', 'global_status')


class _MySQLLocks(_ServerLocks):
    async def _server(self, connection: AsyncConnection) -> str | None:
        status = _MYSQL_STATUS
        if getattr(connection.dialect, 'is_mariadb', False):
            status = _MARIADB_STATUS
        # Both are of the moment at which the statement began.
        started = (
            func.unix_timestamp()
            - select(cast(status.c.VARIABLE_VALUE, BigInteger))
            .where(status.c.VARIABLE_NAME == 'UPTIME')
            .scalar_subquery()
        )
        row = await connection.execute(
            select(
                text('@@hostname'),
                text('@@port'),
                started,
                func.connection_id(),
            )
        )
        host, port, start, thread = row.one()
        driver = await _driver_connection(connection)
        told = getattr(driver, 'thread_id', lambda: None)()
        return f'mysql {host}:{port} {start}' if told == thread else None

    async def _lock(self, connection: AsyncConnection, name: str) -> bool:
        locked = await connection.scalar(
            text('SELECT GET_LOCK(:name, 0)'), {'name': name}
        )
        return locked == 1

    async def _held(
        self, connection: AsyncConnection, names: Collection[str]
    ) -> set[str]:
        ordered = list(names)
        looks = ', '.join(
            f'IS_USED_LOCK(:n{number})' for number in range(len(ordered))
        )
        row = (
            await connection.execute(
                text(f'SELECT {looks}'),
                {f'n{number}': name for number, name in enumerate(ordered)},
            )
        ).one()
        return {
            name
            for name, holder in zip(ordered, row, strict=True)
            if holder is not None
        }


class _FileLocks(LivenessLocks):
    """A locked file for each session, beside an SQLite database.

    Never the database file itself: SQLite's own locks on it would go when any
    descriptor of it is closed.
    """

    leave_files = True

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._database: str | None = None
        self._descriptor: int | None = None
        self._path: str | None = None

    async def take(self, session_id: str, number: int) -> LivenessLock | None:
        self._let_go()
        server = _machine()
        if flock is None or server is None:
            return None
        path = await self._path_of(session_id, number)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        self._descriptor, self._path = descriptor, path
        _holding.add(self)
        return LivenessLock(server=server, number=number, of_connection=False)

    async def released(self, locks: Mapping[str, LivenessLock]) -> set[str]:
        return {
            session_id
            for session_id, lock in locks.items()
            if _is_free(await self._path_of(session_id, lock.number))
        }

    async def clear(self, session_id: str, number: int) -> None:
        _remove(await self._path_of(session_id, number))

    async def close(self) -> None:
        self._let_go()
        await self._engine.dispose()

    async def _path_of(self, session_id: str, number: int) -> str:
        if self._database is None:
            async with self._engine.connect() as connection:
                rows = await connection.execute(text('PRAGMA database_list'))
                self._database = next(
                    row.file for row in rows if row.name == 'main'
                )
        return f'{self._database}-{_name(session_id, number)}'

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or self._path is None:
            return
        _remove(self._path)
        os.close(descriptor)

    def forget(self) -> None:
        """Leaves the lock to the parent, in a process that was forked."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()


def _is_free(path: str) -> bool:
    if flock is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # Nobody knows.
    try:
        # Shared, so that lookers are not in each other's way.
        flock(descriptor, LOCK_SH | LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _machine() -> str | None:
    """Returns which life of which machine this is."""
    try:
        return f'machine {_BOOT_ID.read_text().strip()}'
    except OSError:
        return None


_holding: weakref.WeakSet[_FileLocks] = weakref.WeakSet()


def _is_child() -> None:
    for locks in list(_holding):
        locks.forget()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_is_child)


def locks_of(name: str, engine: AsyncEngine) -> LivenessLocks:
    """Returns what takes locks on a kind of database.

    Args:
        name: Of the dialect.
        engine: For its use alone; closed with it.
    """
    if name == 'sqlite':
        return _FileLocks(engine)
    return (
        _PostgresLocks(engine) if name == 'postgresql' else _MySQLLocks(engine)
    )
