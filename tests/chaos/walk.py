"""Walks through the points at which something can go wrong: `script/chaos`."""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.faults import EARLY, NOT_ON_SQLITE, Fault, Kind
from chaos.play import Result, play
from chaos.scenarios import SCENARIOS, Scenario
from support.databases import Servers, make_database


@dataclass(frozen=True)
class Point:
    """One fault in one scenario on one database."""

    database: str
    scenario: Scenario
    fault: Fault | None

    def __str__(self) -> str:
        """Returns the arguments that play it again."""
        fault = f' --fault {self.fault}' if self.fault else ''
        return (
            f'--database {self.database} --scenario {self.scenario.name}{fault}'
        )


def faults(
    kinds: list[Kind], database: str, counts: dict[str, int]
) -> Iterator[Fault]:
    """Yields every fault of some kinds.

    Args:
        kinds: Which.
        database: What it is on; not every kind comes on every database.
        counts: How many statements each thread makes.
    """
    for kind in kinds:
        if database == 'sqlite' and kind in NOT_ON_SQLITE:
            continue
        for thread, count in counts.items():
            for number in range(1, count + 1):
                yield Fault(kind, thread, number, after=False)
                if kind not in EARLY:
                    yield Fault(kind, thread, number, after=True)


class Walk:
    """Plays points, several at a time, and reports."""

    def __init__(self, arguments: argparse.Namespace, servers: Servers) -> None:
        """Takes the arguments of `script/chaos`."""
        self._arguments = arguments
        self._servers = servers
        self._random = random.Random(arguments.seed)
        self._broken: list[tuple[Point, Result]] = []
        self._played: collections.Counter[str] = collections.Counter()
        self._beyond = 0

    async def run(self) -> int:
        """Walks.

        Returns:
            The exit code: 0 only if every promise held at every point.
        """
        arguments = self._arguments
        began = time.monotonic()
        for database in arguments.databases:
            for scenario in SCENARIOS.values():
                if not any(
                    word == scenario.name
                    or (word not in SCENARIOS and word in scenario.name)
                    for word in arguments.scenario
                ):
                    continue
                if scenario.can_be_on(database) and not self._is_enough():
                    await self._scenario(database, scenario)
        self._conclude(time.monotonic() - began)
        return 1 if self._broken else 0

    def _is_enough(self) -> bool:
        return self._arguments.first and bool(self._broken)

    async def _scenario(self, database: str, scenario: Scenario) -> None:
        arguments = self._arguments
        if arguments.fault:
            points = [
                Point(database, scenario, Fault.parse(text))
                for text in arguments.fault
            ] * arguments.times
        else:
            counts = await self._count(database, scenario)
            every = list(faults(arguments.kinds, database, counts))
            points = [Point(database, scenario, fault) for fault in every]
            if not arguments.exhaustive:
                points = self._random.sample(
                    points, min(arguments.count, len(points))
                )
        room = asyncio.Semaphore(arguments.at_once)

        async def one(point: Point) -> None:
            async with room:
                if not self._is_enough():
                    await self._play(point)

        await asyncio.gather(*map(one, points))

    async def _count(self, database: str, scenario: Scenario) -> dict[str, int]:
        point = Point(database, scenario, None)
        result = await self._play(point)
        counts = {'loop': 0, 'beat': 0}
        for step in result.steps:
            thread = step.partition(':')[0]
            counts[thread] += 1
        print(
            f'{point}: {counts["loop"]} statements and {counts["beat"]} of '
            f'the heartbeat',
            flush=True,
        )
        if self._arguments.steps:
            print(*result.steps, sep='\n')
        return counts

    async def _play(self, point: Point) -> Result:
        with tempfile.TemporaryDirectory(prefix='a2a-lease-chaos-') as folder:
            database = await asyncio.to_thread(
                make_database, point.database, self._servers, Path(folder)
            )
            result = await play(
                point.scenario, point.fault, database, Path(folder)
            )
        if point.fault is not None:
            self._played[point.fault.kind] += 1
            self._beyond += not result.reached
        if result.broken:
            self._broken.append((point, result))
            print(f'BROKEN: script/chaos {point}', flush=True)
            for each in result.broken:
                print(f'    {each}', flush=True)
            if self._arguments.details:
                print('    ' + '\n    '.join(result.steps[-8:]))
                print(result.logs, flush=True)
        return result

    def _conclude(self, seconds: float) -> None:
        print(f'\nSeed {self._arguments.seed}; {seconds:.0f} s.')
        for kind, number in sorted(self._played.items()):
            print(f'{number:6} {kind}')
        if self._beyond:
            print(f'{self._beyond:6} of them ended before their fault came')
        print(f'{len(self._broken):6} points at which a promise broke')
        for point, _ in self._broken:
            print(f'       script/chaos {point}')
