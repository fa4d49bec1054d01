"""What goes wrong while clients are served."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from a2a_lease.outage import is_outage
from chaos.soak.fleet import TTL, Fleet, Life
from chaos.writes import frozen
from support.databases import can_begin, drop_connections


if TYPE_CHECKING:
    from support.databases import Database
    from support.proxy import Proxy


_Trouble = Callable[[], Awaitable[None]]
_DAY = 86400.0


class Troubles:
    """Makes trouble, one after another, at random."""

    def __init__(
        self, fleet: Fleet, database: Database, chance: random.Random
    ) -> None:
        """Takes whom to trouble."""
        self._fleet = fleet
        self._database = database
        self._chance = chance
        self.counts: Counter[str] = Counter()
        self.global_silences: list[tuple[float, float | None]] = []
        """From when to when the database was away."""
        self.faults: list[str] = []
        """What did not happen as it should."""
        self._troubled: set[int] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self._engine = database.engine()

    async def run(self, *, every: float) -> None:
        """Makes trouble until it is cancelled, and waits for its end.

        Args:
            every: Seconds between two of them, on average.
        """
        kinds = self._kinds()
        try:
            while True:
                await asyncio.sleep(self._chance.expovariate(1 / every))
                name, weight = zip(*kinds.items(), strict=True)
                [kind] = self._chance.choices(name, [w for w, _ in weight])
                task = asyncio.create_task(
                    self._one(kind, kinds[kind][1]), name=kind
                )
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
        finally:
            await asyncio.gather(*self._under_way)
            await self._engine.dispose()

    async def _one(self, kind: str, trouble: _Trouble) -> None:
        self._note('begins')
        try:
            await trouble()
        except _NotNow:
            return
        except Exception as error:
            if is_outage(error):
                # It met another one.
                self.counts[f'{kind}, cut short'] += 1
            else:
                self.faults.append(f'{kind}: {error!r}')
            return
        finally:
            self._note('ends')
        self.counts[kind] += 1

    def _note(self, what: str) -> None:
        """Writes down what happens, beside the logs of the replicas."""
        task = asyncio.current_task()
        assert task is not None
        now = datetime.now(tz=UTC).isoformat(timespec='milliseconds')
        with (self._fleet.folder / 'troubles.log').open('a') as file:
            file.write(f'{now} {task.get_name()}: {what}\n')

    def _kinds(self) -> dict[str, tuple[float, _Trouble]]:
        kinds: dict[str, tuple[float, _Trouble]] = {
            'SIGKILL': (6, self._kill),
            'SIGTERM': (3, self._terminate),
            'SIGSTOP, short': (3, self._stop_briefly),
            'SIGSTOP, longer than the TTL': (3, self._stop_for_long),
            'writes stall': (1, self._freeze),
        }
        if self._fleet.has_clocks():
            kinds['clock jumps'] = 3, self._jump
        if self._database.kind != 'sqlite':
            kinds |= {
                'connections dropped': (2, self._drop),
                'connections reset': (2, self._reset),
                'connections half open': (2, self._half_open),
                'line stalls, short': (2, self._stall_briefly),
                'line stalls, longer than the TTL': (2, self._stall_for_long),
                'line refuses': (2, self._refuse),
                'connections killed by the server': (2, self._kill_all),
                'database restarts': (1, self._restart),
            }
        return kinds

    # Processes.

    def _somebody(self, *, spare: bool = False) -> Life:
        """Returns a process that nothing happens to.

        Args:
            spare: Whether another one must be left that serves.
        """
        able = [
            life
            for life in self._fleet.serving()
            if life.number not in self._troubled
        ]
        if len(able) < (2 if spare else 1):
            raise _NotNow
        life = self._chance.choice(able)
        self._note(f'replica {life.number}, process {life.pid}')
        return life

    @contextmanager
    def _keeping(self, life: Life) -> Generator[Life]:
        """Lets nothing else happen to a process meanwhile."""
        self._troubled.add(life.number)
        try:
            yield life
        finally:
            self._troubled.discard(life.number)

    async def _kill(self) -> None:
        life = self._somebody(spare=True)
        self._fleet.kill(life, back_after=self._chance.uniform(0.2, 4))

    async def _terminate(self) -> None:
        life = self._somebody(spare=True)
        back_after = self._chance.uniform(0.2, 4)
        if not await self._fleet.terminate(life, back_after=back_after):
            self.faults.append(f'replica {life.number} did not end on SIGTERM')

    async def _stop_briefly(self) -> None:
        await self._stop(self._chance.uniform(0.1, TTL / 3))

    async def _stop_for_long(self) -> None:
        await self._stop(self._chance.uniform(1.5, 3) * TTL)

    async def _stop(self, seconds: float) -> None:
        with self._keeping(self._somebody(spare=True)) as life:
            while life.ended is None:
                with self._fleet.stopped(life):
                    if await self._is_free():
                        await asyncio.sleep(seconds)
                        return
                await asyncio.sleep(0.05)

    async def _is_free(self) -> bool:
        """Whether no file is locked by whom was stopped.

        A server ends the connection of whoever stands still in a transaction.
        """
        if self._database.kind != 'sqlite':
            return True
        path = Path(self._database.url.partition('///')[2])
        return await asyncio.to_thread(can_begin, path, 'IMMEDIATE')

    async def _jump(self) -> None:
        life = self._somebody()
        self._fleet.set_clock(life.number, self._chance.uniform(-_DAY, _DAY))

    # Lines.

    async def _drop(self) -> None:
        self._proxy(self._somebody()).drop()

    async def _reset(self) -> None:
        self._proxy(self._somebody()).reset()

    def _proxy(self, life: Life) -> Proxy:
        """Returns the line of a process, which is about to break."""
        life.breaks.append(time.time())
        return self._fleet.proxies[life.number]

    async def _half_open(self) -> None:
        with self._keeping(self._somebody()) as life:
            async with self._proxy(life).half_open():
                await asyncio.sleep(self._chance.uniform(1, 3) * TTL)

    async def _stall_briefly(self) -> None:
        await self._stall(self._chance.uniform(0.1, TTL / 3))

    async def _stall_for_long(self) -> None:
        await self._stall(self._chance.uniform(1.5, 3) * TTL)

    async def _stall(self, seconds: float) -> None:
        with self._keeping(self._somebody(spare=True)) as life, life.silent():
            async with self._fleet.proxies[life.number].stalled():
                await asyncio.sleep(seconds)

    async def _refuse(self) -> None:
        with self._keeping(self._somebody(spare=True)) as life, life.silent():
            async with self._proxy(life).refusing():
                await asyncio.sleep(self._chance.uniform(0.5, 2) * TTL)

    # The database.

    async def _away(self, seconds: Callable[[], Awaitable[None]]) -> None:
        if self.global_silences and self.global_silences[-1][1] is None:
            raise _NotNow
        began = time.time()
        self.global_silences.append((began, None))
        try:
            await seconds()
        finally:
            self.global_silences[-1] = began, time.time()

    async def _freeze(self) -> None:
        seconds = self._chance.uniform(0.2, 2) * TTL

        async def freeze() -> None:
            async with frozen(self._engine, self._database.kind):
                await asyncio.sleep(seconds)

        await self._away(freeze)

    async def _restart(self) -> None:
        seconds = self._chance.uniform(0, TTL)

        async def restart() -> None:
            server = self._database.server
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(server.start)

        await self._away(restart)

    async def _kill_all(self) -> None:
        for life in self._fleet.lives:
            life.breaks.append(time.time())
        await drop_connections(self._engine, self._database.kind)


class _NotNow(Exception):
    """There is nobody whom it could happen to."""
