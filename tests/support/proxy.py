"""A small TCP proxy between one replica and its database."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sqlalchemy.engine import make_url


if TYPE_CHECKING:
    from support.databases import Database


_CHUNK = 1 << 16


class Proxy:
    """Passes bytes on, unless it is told otherwise.

    It lets no connection end by itself: what a database does when it restarts
    reaches the replica, and what the replica does reaches the database.
    """

    def __init__(self, database: Database) -> None:
        """Takes a database on a server."""
        self._kind = database.kind
        self._url = make_url(database.url)
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._refuses = False
        self.url = ''
        """The address of the database by way of this."""

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(
            self._connected, '127.0.0.1', 0
        )
        port = self._server.sockets[0].getsockname()[1]
        url = self._url.set(host='127.0.0.1', port=port)
        self.url = url.difference_update_query(
            ['host', 'unix_socket']
        ).render_as_string(hide_password=False)

    @property
    def _socket(self) -> str:
        if self._kind == 'postgresql':
            return f'{self._url.query["host"]}/.s.PGSQL.5432'
        return str(self._url.query['unix_socket'])

    async def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()
        self._passes.set()
        self.drop()
        while self._lines:
            await asyncio.sleep(0.01)

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        await self._passes.wait()
        try:
            theirs = await asyncio.open_unix_connection(self._socket)
        except OSError:
            writer.transport.abort()
            return
        line = _Line((reader, writer), theirs, self._passes)
        self._lines.add(line)
        try:
            await line.run()
        finally:
            self._lines.discard(line)

    # What goes wrong.

    def drop(self) -> None:
        """Ends every connection in order."""
        for line in self._lines:
            line.end()

    def reset(self) -> None:
        """Breaks every connection."""
        for line in self._lines:
            line.reset()

    @asynccontextmanager
    async def stalled(self) -> AsyncGenerator[None]:
        """Passes nothing on, and keeps it for later."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    @asynccontextmanager
    async def refusing(self) -> AsyncGenerator[None]:
        """Breaks every connection, and takes no new ones."""
        self._refuses = True
        self.reset()
        try:
            yield
        finally:
            self._refuses = False

    @asynccontextmanager
    async def half_open(self) -> AsyncGenerator[None]:
        """Loses every connection, and only the database learns of it.

        New ones work.
        """
        lost = list(self._lines)
        for line in lost:
            line.lose()
        try:
            yield
        finally:
            for line in lost:
                line.reset()


class _Line:
    """One connection."""

    def __init__(
        self,
        ours: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        theirs: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        passes: asyncio.Event,
    ) -> None:
        self._replica, self._database = ours, theirs
        self._passes = passes
        self._ended = asyncio.Event()
        self._is_lost = False

    async def run(self) -> None:
        ways = {
            asyncio.ensure_future(
                self._pass(self._replica[0], self._database[1])
            ),
            asyncio.ensure_future(
                self._pass(self._database[0], self._replica[1])
            ),
        }
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            while not ended.done():
                done, _ = await asyncio.wait(
                    {*ways, ended}, return_when=asyncio.FIRST_COMPLETED
                )
                if done - {ended} and not self._is_lost:
                    break
                ways -= done
        finally:
            for each in (*ways, ended):
                each.cancel()
            await asyncio.gather(*ways, ended, return_exceptions=True)
            for _, writer in (self._replica, self._database):
                writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passes.wait()
                if self._is_lost:
                    continue
                writer.write(data)
                await writer.drain()

    def end(self) -> None:
        self._ended.set()

    def reset(self) -> None:
        sock = self._replica[1].get_extra_info('socket')
        with contextlib.suppress(OSError):
            # A close without linger is a reset.
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)
            )
        self._ended.set()

    def lose(self) -> None:
        self._is_lost = True
        self._database[1].close()
