"""Replicas that die and come back, as under an orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from a2a_lease.demo.processes import ServerProcess
from support.proxy import Proxy


if TYPE_CHECKING:
    from support.databases import Database


SETTINGS = {
    'ttl': 5.0,
    'heartbeat_interval': 0.5,
    'sweep_interval': 0.5,
    'acquire_timeout': 20.0,
    'drain_timeout': 1.0,
    'stop_timeout': 2.0,
}
TTL = SETTINGS['ttl']
INTERVAL = SETTINGS['heartbeat_interval']
SLACK = 2.0
"""Seconds in which a beat lands once nothing is in its way any more."""
_CLOCKS = '/usr/lib/*/faketime/libfaketimeMT.so.1'
_SKEW = '{:+.0f}s'


@dataclass(eq=False)
class Life:
    """One process, from its start to its end."""

    number: int
    pid: int
    began: float
    ended: float | None = None
    was_killed: bool = False
    told_to_end: bool = False
    silences: list[tuple[float, float | None]] = field(default_factory=list)
    """From when to when it was stopped, or away from its database."""
    breaks: list[float] = field(default_factory=list)
    """When its connections were broken."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.ended is not None or self.told_to_end

    def die(self) -> None:
        """Notes that it was killed."""
        self.was_killed = True
        self.ended = time.time()

    @contextlib.contextmanager
    def silent(self) -> Generator[None]:
        """Notes that it cannot be heard."""
        number = len(self.silences)
        began = time.time()
        self.silences.append((began, None))
        try:
            yield
        finally:
            self.silences[number] = began, time.time()

    def may_count_as_dead(self) -> bool:
        """Whether it was killed, or silent for as long as that takes.

        Less is enough if its connections were broken, since its lock is free.
        """
        return (
            self.was_killed
            or self.told_to_end
            or self.was_silent(TTL - SLACK)
            or any(
                ended - max(began, at) >= INTERVAL and at >= began - SLACK
                for began, ended in self._spans()
                for at in self.breaks
            )
        )

    def was_silent(self, seconds: float) -> bool:
        """Whether it was not heard for so many seconds."""
        return any(ended - began >= seconds for began, ended in self._spans())

    def _spans(self) -> list[tuple[float, float]]:
        """Returns its silences.

        Those with less between them than a beat may need are one.
        """
        now = time.time()
        spans: list[tuple[float, float]] = []
        for began, ended in sorted(self.silences, key=lambda each: each[0]):
            if spans and began <= spans[-1][1] + SLACK:
                first, last = spans.pop()
                spans.append((first, max(ended or now, last)))
            else:
                spans.append((began, ended or now))
        return spans


class Fleet:
    """Several replicas over one database, each with a line of its own."""

    def __init__(self, database: Database, folder: Path, size: int) -> None:
        """Names the replicas; none is started."""
        self.size = size
        self.folder = folder
        self.lives: list[Life] = []
        self.now: dict[int, Life] = {}
        """The process that is each replica, if it serves."""
        self.by_pid: dict[int, Life] = {}
        self.closing = False
        self._database = database
        self.proxies: list[Proxy] = []
        self.servers: list[ServerProcess] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, config: dict[str, Any]) -> None:
        """Starts all replicas.

        Args:
            config: For `support.replica_app`.
        """
        for number in range(self.size):
            name = 'ABCDEFGH'[number]
            self.servers.append(
                ServerProcess(
                    name,
                    module='support.replica_app',
                    folder=self.folder,
                    config={
                        'database_url': await self._line(),
                        'pooled': False,
                        'folder': str(self.folder),
                        'service': 'commanded',
                        'settings': SETTINGS,
                        **config,
                    },
                    environment=self._clock(number),
                )
            )
        await asyncio.gather(*map(self._start, range(self.size)))

    async def close(self) -> None:
        """Ends all replicas."""
        self.closing = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for server in self.servers:
            server.end()
        for proxy in self.proxies:
            await proxy.close()

    async def _line(self) -> str:
        """Returns the address of the database for one replica."""
        if self._database.kind == 'sqlite':
            return self._database.url
        proxy = Proxy(self._database)
        await proxy.start()
        self.proxies.append(proxy)
        return proxy.url

    # Clocks.

    @staticmethod
    def has_clocks() -> bool:
        """Whether clocks can be set for single processes."""
        return _find_clocks() is not None

    def _clock(self, number: int) -> dict[str, str]:
        library = _find_clocks()
        if library is None:
            return {}
        self.set_clock(number, 0)
        return {
            'LD_PRELOAD': library,
            'FAKETIME_TIMESTAMP_FILE': str(self._clock_file(number)),
            'FAKETIME_CACHE_DURATION': '1',
            # What machines measure spans with does not jump.
            'FAKETIME_DONT_FAKE_MONOTONIC': '1',
        }

    def _clock_file(self, number: int) -> Path:
        return self.folder / f'clock-{number}'

    def set_clock(self, number: int, seconds: float) -> None:
        """Sets the clock of a replica apart from the true time."""
        new = self._clock_file(number).with_suffix('.new')
        new.write_text(_SKEW.format(seconds))
        new.replace(self._clock_file(number))

    # Processes.

    def serving(self) -> list[Life]:
        """Returns those to which a load balancer sends requests."""
        return list(self.now.values())

    def url(self, life: Life) -> str:
        """Returns where a process serves."""
        return self.servers[life.number].url

    async def _start(self, number: int) -> None:
        server = self.servers[number]
        while not self.closing:
            server.end()
            server.start()
            life = Life(number, server.pid, time.time())
            self.lives.append(life)
            self.by_pid[life.pid] = life
            try:
                await server.ready(timeout=60.0)
            except RuntimeError:
                # It ends if its database is away, and is started again.
                server.end()
                life.die()
                await asyncio.sleep(0.5)
                continue
            self.now[number] = life
            return

    def _start_later(self, number: int, seconds: float) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            await self._start(number)

        task = asyncio.create_task(later())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def kill(self, life: Life, *, back_after: float) -> None:
        """Kills a process; another one comes in its place."""
        if self.now.pop(life.number, None) is not life:
            return
        self.servers[life.number].kill()
        life.die()
        self._start_later(life.number, back_after)

    def look(self) -> None:
        """Finds processes that have died by themselves."""
        for life in list(self.now.values()):
            if not self.servers[life.number].is_running:
                del self.now[life.number]
                life.die()
                self._start_later(life.number, 0.5)

    async def terminate(self, life: Life, *, back_after: float) -> bool:
        """Tells a process to end; another one comes in its place.

        Returns:
            Whether it has ended in time.
        """
        if self.now.pop(life.number, None) is not life:
            return True
        life.told_to_end = True
        server = self.servers[life.number]
        server.send_signal(signal.SIGTERM)
        in_time = True
        try:
            await server.ended(timeout=60.0)
        except Exception:
            # As an orchestrator does when the grace is over.
            in_time = False
            life.was_killed = True
            server.kill()
        life.ended = time.time()
        self._start_later(life.number, back_after)
        return in_time

    @contextlib.contextmanager
    def stopped(self, life: Life) -> Generator[None]:
        """Stops a process."""
        server = self.servers[life.number]
        with life.silent():
            server.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                if life.ended is None:
                    server.send_signal(signal.SIGCONT)


def _find_clocks() -> str | None:
    root = Path('/')
    found = sorted(root.glob(_CLOCKS.removeprefix('/')))
    return str(found[0]) if found else None
