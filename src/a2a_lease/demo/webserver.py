"""A small web server within this process."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import uvicorn
from a2a.types.a2a_pb2 import StreamResponse
from google.protobuf.json_format import ParseDict
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from starlette.requests import Request


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # The signals are for the process that this server is a part of.
        yield


@asynccontextmanager
async def serving(app: Starlette) -> AsyncGenerator[str]:
    """Serves an application on a free port.

    Yields:
        Its URL.
    """
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(128)
        server = _Server(
            uvicorn.Config(app, log_level='warning', lifespan='off')
        )
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f'http://127.0.0.1:{listener.getsockname()[1]}/'
        finally:
            server.should_exit = True
            server.force_exit = True
            await running


@asynccontextmanager
async def webhook(
    take: Callable[[StreamResponse], None],
) -> AsyncGenerator[str]:
    """Receives push notifications, as a client that does not stay would.

    Args:
        take: Gets what is pushed.

    Yields:
        Its URL.
    """

    async def receive(request: Request) -> Response:
        take(
            ParseDict(
                await request.json(),
                StreamResponse(),
                ignore_unknown_fields=True,
            )
        )
        return Response()

    app = Starlette(routes=[Route('/', receive, methods=['POST'])])
    async with serving(app) as url:
        yield url
