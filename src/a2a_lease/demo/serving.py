"""The server's side of `ServerProcess`."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import uvicorn


if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette


def serve(make_app: Callable[[dict[str, Any]], Starlette]) -> None:
    """Serves an application until the parent process ends or says so.

    Args:
        make_app: Makes it of the parent's configuration.
    """
    config = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(
        level=logging.INFO,
        format='%(asctime)s %(levelname)s %(name)s: %(message)s',
    )
    logging.getLogger('httpx').setLevel(logging.WARNING)
    listener = socket.socket(fileno=config['descriptor'])
    server = uvicorn.Server(
        uvicorn.Config(make_app(config), log_config=None, access_log=False)
    )
    server.run(sockets=[listener])


def _end_with_parent() -> None:
    # By descriptor: a buffered read would hold a lock at the end of Python.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
