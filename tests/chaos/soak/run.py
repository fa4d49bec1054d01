"""Clients, replicas and trouble, for as long as it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

from a2a_lease.demo.webserver import webhook
from chaos.soak.checker import Checker, Detection
from chaos.soak.customers import Customers
from chaos.soak.fleet import SETTINGS, TTL, Fleet
from chaos.soak.trouble import Troubles
from chaos.soak.verdict import MAX_ATTEMPTS


if TYPE_CHECKING:
    from support.databases import Database


_TELLS_EVERY = 60.0
_COMES_TO_REST = 180.0
"""Seconds in which all settles once nothing goes wrong any more."""


class Soak:
    """One of them."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        seed: int,
        replicas: int = 4,
        clients: int = 6,
        trouble_every: float = 2.0,
    ) -> None:
        """Prepares everything.

        Args:
            database: An empty one, whose server may be restarted.
            folder: For logs.
            seed: Of what happens when. What comes of it differs each time.
            replicas: How many there are.
            clients: How many errands go on at once.
            trouble_every: Seconds between two troubles, on average.
        """
        self._database = database
        self._size = clients
        self._every = trouble_every
        self.seed = seed
        self.fleet = Fleet(database, folder, replicas)
        self.troubles = Troubles(
            self.fleet, database, random.Random(f'{seed} trouble')
        )
        self.checker = Checker(self.fleet, self.troubles, database)
        self.seconds = 0.0

    async def run(self, *, seconds: float) -> list[str]:
        """Soaks, and waits until all has come to rest.

        Returns:
            The promises that broke.
        """
        await self._cut_off_who_stands_still()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.checker.close)
            webhook_url = await stack.enter_async_context(
                webhook(self.checker.hear)
            )
            stack.push_async_callback(self.fleet.close)
            await self.fleet.start(
                {'mixed': {'max_attempts': MAX_ATTEMPTS, 'backoff': 0.2}}
            )
            customers = Customers(
                self.fleet,
                webhook_url,
                random.Random(f'{self.seed} clients'),
                self.checker.take,
            )
            self.customers = customers
            stack.push_async_callback(customers.close)
            await self._soak(customers, seconds)
        return self.checker.violations

    async def _soak(self, customers: Customers, seconds: float) -> None:
        began = time.monotonic()
        looking = asyncio.create_task(self.checker.run())
        telling = asyncio.create_task(self._tell())
        asking = [
            asyncio.create_task(customers.serve()) for _ in range(self._size)
        ]
        troubling = asyncio.create_task(self.troubles.run(every=self._every))
        done, _ = await asyncio.wait(
            [looking, telling, troubling, *asking],
            timeout=seconds,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for task in done:
            task.result()
        customers.closing = True
        troubling.cancel()
        await asyncio.gather(troubling, return_exceptions=True)
        _, waiting = await asyncio.wait(asking, timeout=_COMES_TO_REST)
        if waiting:
            self.checker.violations.append(
                f'1 (nothing is left behind): clients wait: '
                f'{customers.under_way}'
            )
        for task in (looking, telling, *waiting):
            task.cancel()
        await asyncio.gather(looking, telling, *waiting, return_exceptions=True)
        await self._rest()
        await self.checker.finish()
        self.seconds = time.monotonic() - began
        self.checker.violations += self.troubles.faults

    async def _rest(self) -> None:
        unsettled = 'nothing'
        try:
            async with asyncio.timeout(_COMES_TO_REST):
                while unsettled := await self.checker.outlast(
                    self.checker.unsettled
                ):
                    await asyncio.sleep(0.5)
        except TimeoutError:
            self.checker.violations.append(
                f'1 (nothing is left behind): {unsettled}'
            )

    async def _cut_off_who_stands_still(self) -> None:
        """As the README advises: a stopped process keeps what it has locked."""
        engine = self._database.engine()
        name = engine.url.database
        async with engine.begin() as connection:
            if self._database.kind == 'postgresql':
                await connection.execute(
                    text(
                        f'ALTER DATABASE {name} SET '
                        f"idle_in_transaction_session_timeout = '{TTL:.0f}s'"
                    )
                )
        await engine.dispose()
        if self._database.kind == 'mariadb':
            self._database.url += (
                f'&init_command=SET idle_transaction_timeout = {TTL:.0f}'
            )

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELLS_EVERY)
            print(
                f'{time.strftime("%T")} {self.troubles.counts.total()} '
                f'troubles, {self.checker.outcomes.total()} tasks, '
                f'{len(self.customers.under_way)} errands under way, '
                f'{len(self.checker.violations)} violations',
                flush=True,
            )

    # The table.

    def table(self) -> str:
        """Returns what happened, as Markdown."""
        checker = self.checker
        deaths = sum(life.was_killed for life in self.fleet.lives)
        lines = [
            (
                f'{self.seconds / 60:.0f} minutes on {self._database.kind}, seed '
                f'{self.seed}, {self.fleet.size} replicas, {self._size} clients, '
                f'TTL {TTL:g} s, sweep interval '
                f'{SETTINGS["sweep_interval"]:g} s.'
            ),
            '',
            '| | |',
            '|---|---:|',
            *(
                f'| {kind} | {count} |'
                for kind, count in sorted(self.troubles.counts.items())
            ),
            f'| processes that died | {deaths} |',
            f'| processes in all | {len(self.fleet.lives)} |',
            *(
                f'| tasks, {kind} | {count} |'
                for kind, count in sorted(checker.outcomes.items())
            ),
            f'| tasks in all | {checker.outcomes.total()} |',
            *(
                f'| {kind} | {count} |'
                for kind, count in sorted(self.customers.counts.items())
                if kind.startswith(('requests', 'cancels'))
            ),
            *_detected('all', checker.detections),
            *_detected(
                'while the database was there',
                [each for each in checker.detections if each.quiet],
            ),
            f'| violations | {len(checker.violations)} |',
        ]
        return '\n'.join(lines)


def _detected(which: str, detections: list[Detection]) -> list[str]:
    seconds = sorted(each.seconds for each in detections)
    if not seconds:
        return []
    return [
        (
            f'| SIGKILL to declared dead, {which}: median | '
            f'{statistics.median(seconds):.1f} s |'
        ),
        f'| the same: worst of {len(seconds)} | {seconds[-1]:.1f} s |',
    ]


async def soak(database: Database, *, minutes: float, seed: int) -> bool:
    """Soaks, and prints what came of it.

    Returns:
        Whether every promise held.
    """
    folder = Path(tempfile.mkdtemp(prefix='a2a-lease-soak-'))
    print(f'Seed {seed}; logs are in {folder}.', flush=True)
    one = Soak(database, folder, seed=seed)
    await one.run(seconds=minutes * 60)
    print(one.table(), flush=True)
    for violation in one.checker.violations:
        print(f'BROKEN: {violation}')
    return not one.checker.violations
