"""Replica processes in a tenth of a second: forked after their imports.

They are processes like any others: uvicorn in each, a pid of their own, killed
and stopped by signals. Importing everything anew for each of them took most of
the time of the tests.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from a2a_lease.demo.processes import ServerProcess


class ForkedProcess:
    """What `ServerProcess` uses of `subprocess.Popen`."""

    def __init__(self, pid: int, lifeline: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(lifeline, 'wb')
        self._handle = os.pidfd_open(pid)
        self._ended = False

    def poll(self) -> int | None:
        if not self._ended:
            self._ended = bool(select.select([self._handle], [], [], 0)[0])
        return 0 if self._ended else None

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 3600)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired('replica', timeout or 0)
            select.select([self._handle], [], [], 0.5)
        return 0

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One process that has imported everything, and forks on request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'support.forkserver',
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    'PYTHONPATH': os.pathsep.join(
                        [
                            str(Path(__file__).parent.parent),
                            os.environ.get('PYTHONPATH', ''),
                        ]
                    ).strip(os.pathsep),
                },
                start_new_session=True,
            )
        atexit.register(self._process.kill)

    def fork(self, listener: int, log: int) -> ForkedProcess:
        lifeline_out, lifeline_in = os.pipe()
        # The child finds the listener under the number that it has here.
        socket.send_fds(
            self._socket,
            [str(listener).encode()],
            [listener, log, lifeline_out],
        )
        os.close(lifeline_out)
        return ForkedProcess(int(self._socket.recv(64)), lifeline_in)


_server: ForkServer | None = None


class ForkedServer(ServerProcess):
    """A replica of `support.replica_app`, forked."""

    def _spawn(self, listener: int, log: int) -> Any:
        global _server  # noqa: PLW0603
        if _server is None:
            _server = ForkServer()
        return _server.fork(listener, log)


def main(number: int) -> None:
    from a2a_lease.demo.serving import serve
    from support.replica_app import make_app

    # Nobody waits for the children here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=number)
    while True:
        said, handles, _, _ = socket.recv_fds(requests, 64, 3)
        if not said:
            return
        listener, log, lifeline = handles
        pid = os.fork()
        if pid:
            requests.send(str(pid).encode())
            for handle in handles:
                os.close(handle)
            continue
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for source, target in ((lifeline, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        wanted = int(said)
        if wanted != listener:
            os.dup2(listener, wanted)
            # A copy would go on to take connections that nobody serves.
            os.close(listener)
        os.set_inheritable(wanted, True)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        try:
            serve(make_app)
        finally:
            os._exit(0)


if __name__ == '__main__':
    main(int(sys.argv[1]))
