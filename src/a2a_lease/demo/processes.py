"""Server processes that are started, killed, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx

from a2a_lease.demo.local_http import local_client


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ServerProcess:
    """One uvicorn server in a process of its own.

    The process ends when this one does, however that happens: it watches its
    standard input, which closes then.
    """

    def __init__(
        self,
        name: str,
        *,
        module: str,
        config: Mapping[str, Any],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Names a server that does not run yet.

        Args:
            name: What it is called, and its log file.
            module: The module to run; it calls `serving.serve`.
            config: What the module gets.
            folder: Where its log goes.
            environment: More variables for it.
        """
        self.name = name
        self.log = folder / f'{name}.log'
        self.port = 0
        self._module = module
        self._config = config
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it serves."""
        return f'http://127.0.0.1:{self.port}'

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f'{self.name} was not started.')
        return self._process

    def start(self) -> None:
        """Starts it; its port stays the same when it is started again."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(('127.0.0.1', self.port))
            listener.listen(128)
            self.port = listener.getsockname()[1]
            config = {
                **self._config,
                'name': self.name,
                'url': self.url,
                'descriptor': listener.fileno(),
            }
            with self.log.open('ab') as log:
                self._process = self._spawn(listener.fileno(), log.fileno())
        lifeline = self._process.stdin
        if lifeline is None:
            raise RuntimeError(f'{self.name} has no standard input.')
        lifeline.write(json.dumps(config).encode() + b'\n')
        lifeline.flush()

    def _spawn(self, listener: int, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, '-m', self._module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener],
            env=self._environment,
            # A Ctrl-C of the terminal is for the parent, which ends its
            # servers itself.
            start_new_session=True,
        )

    async def ready(self, *, timeout: float = 60.0) -> None:
        """Waits until it serves.

        Raises:
            RuntimeError: It ended, or does not answer; with the end of its
                log.
        """
        try:
            async with asyncio.timeout(timeout), local_client() as client:
                while self._running().poll() is None:
                    try:
                        answer = await client.get(
                            f'{self.url}/.well-known/agent-card.json'
                        )
                        if answer.is_success:
                            return
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        raise RuntimeError(f'{self.name} does not serve:\n{self.log_tail()}')

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._running().send_signal(number)

    def kill(self) -> None:
        """Ends it by SIGKILL, as the kernel does when memory runs out."""
        self.send_signal(signal.SIGKILL)
        self._running().wait()

    async def ended(self, *, timeout: float = 60.0) -> int:
        """Waits for it to end.

        Returns:
            Its exit code.
        """
        return await asyncio.to_thread(self._running().wait, timeout)

    def end(self) -> None:
        """Makes sure that it is gone."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None

    def log_tail(self, lines: int = 30) -> str:
        """Returns the end of what it logged."""
        if not self.log.exists():
            return ''
        return '\n'.join(
            self.log.read_text(errors='replace').splitlines()[-lines:]
        )
