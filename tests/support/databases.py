"""The databases that tests run on, each private to the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from a2a_lease.demo.postgres import PrivatePostgres


class PrivateMariaDB:
    """A MariaDB in a temporary folder, on a socket there."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix='a2a-lease-my-')
        self._data = Path(self._folder.name) / 'data'
        self.socket = Path(self._folder.name) / 'socket'
        # Its own: a server that starts deletes the temporary tables that it
        # finds, and those of other servers may be in use.
        self._temporary = Path(self._folder.name) / 'tmp'
        self._temporary.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0

    @staticmethod
    def is_installed() -> bool:
        return _find('mariadbd') is not None

    def start(self) -> None:
        server = _find('mariadbd')
        assert server is not None
        if not self._data.exists():
            subprocess.run(
                [
                    'mariadb-install-db',
                    '--no-defaults',
                    f'--datadir={self._data}',
                    f'--tmpdir={self._temporary}',
                    '--auth-root-authentication-method=normal',
                    '--skip-test-db',
                ],
                check=True,
                capture_output=True,
            )
            shutil.chown(self._data, 'root')
        self._process = subprocess.Popen(
            [
                server,
                '--no-defaults',
                '--user=root',
                f'--datadir={self._data}',
                f'--tmpdir={self._temporary}',
                f'--socket={self.socket}',
                f'--pid-file={self._folder.name}/pid',
                '--skip-networking',
                '--skip-log-bin',
                '--max-connections=400',
                '--innodb-flush-log-at-trx-commit=0',
                '--innodb-buffer-pool-size=64M',
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(300):
            try:
                self._sql('SELECT 1')
                return
            except subprocess.CalledProcessError:
                assert self._process.poll() is None, 'mariadbd ended'
                time.sleep(0.1)
        raise TimeoutError('mariadbd does not answer')

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def _sql(self, sql: str) -> None:
        subprocess.run(
            [
                'mariadb',
                '--no-defaults',
                f'--socket={self.socket}',
                '--user=root',
                f'--execute={sql}',
            ],
            check=True,
            capture_output=True,
        )

    def create_database(self) -> str:
        self._made += 1
        name = f'lease_{self._made}'
        self._sql(f'CREATE DATABASE {name} CHARACTER SET utf8mb4')
        return f'mysql+asyncmy://root@/{name}?unix_socket={self.socket}'

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path='/usr/sbin')


class PgBouncer:
    """Shares the connections to a PostgreSQL among transactions."""

    def __init__(self, database_url: str) -> None:
        url = make_url(database_url)
        self._folder = tempfile.TemporaryDirectory(prefix='a2a-lease-pgb-')
        folder, data = Path(self._folder.name), Path(str(url.query['host']))
        config = folder / 'pgbouncer.ini'
        config.write_text(
            f"""
            [databases]
            * = host={data} user=postgres
            [pgbouncer]
            pool_mode = transaction
            auth_type = any
            unix_socket_dir = {folder}
            listen_port = 5432
            max_client_conn = 500
            default_pool_size = 10
            """
        )
        self.url = str(url.update_query_dict({'host': str(folder)}))
        command = [_find('pgbouncer') or '', str(config)]
        if os.geteuid() == 0:
            # It refuses to run as root.
            shutil.chown(folder, data.owner())
            command += ['--user', data.owner()]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(100):
            if (folder / '.s.PGSQL.5432').exists():
                return
            assert self._process.poll() is None, 'pgbouncer ended'
            time.sleep(0.1)
        raise TimeoutError('pgbouncer does not listen')

    @staticmethod
    def is_installed() -> bool:
        return _find('pgbouncer') is not None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._folder.cleanup()


class Servers:
    """Starts a server when the first test asks for it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[str, Any] = {}

    def get(self, kind: str) -> Any:
        if kind not in self._running:
            server: Any = (
                PrivatePostgres('fsync = off', 'synchronous_commit = off')
                if kind == 'postgresql'
                else PrivateMariaDB()
            )
            self._running[kind] = self._stack.enter_context(server)
        return self._running[kind]

    def close(self) -> None:
        self._stack.close()


POOLED = {
    'poolclass': NullPool,
    'connect_args': {
        'statement_cache_size': 0,
        'prepared_statement_cache_size': 0,
        'prepared_statement_name_func': str,
    },
}


@dataclass
class Database:
    """An empty database for one test."""

    kind: str
    url: str
    server: Any
    """Its server, which can `stop` and `start`; None for SQLite."""
    pooled: bool = False
    """Whether each transaction may have another connection."""

    def engine(self, **options: Any) -> AsyncEngine:
        return engine_of(self.url, pooled=self.pooled, **options)


def engine_of(url: str, *, pooled: bool, **options: Any) -> AsyncEngine:
    """Makes an engine, as its user does behind a pooler or without one."""
    if pooled:
        # A statement is prepared on one connection of the server, and the
        # next transaction has another one.
        options |= POOLED
    return create_async_engine(url, **options)


def can_begin(path: Path | str, kind: str) -> bool:
    """Whether a transaction of some kind can begin on an SQLite file."""
    with contextlib.closing(sqlite3.connect(path, timeout=0.5)) as file:
        try:
            file.execute(f'BEGIN {kind}')
        except sqlite3.OperationalError:
            return False
    return True


_OTHERS = {
    'postgresql': 'SELECT pg_terminate_backend(pid) FROM pg_stat_activity '
    'WHERE datname = current_database() AND pid <> pg_backend_pid()',
    'mariadb': 'SELECT id FROM information_schema.processlist '
    'WHERE db = database() AND id <> connection_id()',
}


async def drop_connections(engine: AsyncEngine, kind: str) -> None:
    """Has the server end all connections to a database but this one."""
    async with engine.connect() as connection:
        found = await connection.scalars(text(_OTHERS[kind]))
        if kind == 'mariadb':
            for each in found.all():
                # It may have ended meanwhile.
                with contextlib.suppress(DBAPIError):
                    await connection.execute(text(f'KILL {int(each)}'))


def make_database(kind: str, servers: Servers, folder: Path) -> Database:
    if kind == 'sqlite':
        return Database(kind, f'sqlite+aiosqlite:///{folder}/test.db', None)
    server = servers.get(kind)
    return Database(kind, server.create_database(), server)
