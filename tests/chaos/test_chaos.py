"""Points at which something goes wrong: some at random, and those that failed.

`script/chaos --exhaustive` goes through all of them.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from chaos.faults import EARLY, NOT_ON_SQLITE, Fault, Kind
from chaos.play import Result, play
from chaos.scenarios import SCENARIOS, Scenario


if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


SEED = int(os.environ.get('CHAOS_SEED') or random.randrange(10**9))


@pytest.mark.parametrize('number', range(2))
async def test_whatever_goes_wrong_the_promises_hold(
    number: int, database: Database, tmp_path: Path
):
    seed = f'{SEED}-{number}-{database.kind}'
    chance = random.Random(seed)
    scenario = chance.choice(
        [
            scenario
            for scenario in SCENARIOS.values()
            if scenario.can_be_on(database.kind)
        ]
    )
    kind = chance.choice(
        [
            kind
            for kind in Kind
            if database.kind != 'sqlite' or kind not in NOT_ON_SQLITE
        ]
    )
    thread = chance.choices(['loop', 'beat'], [4, 1])[0]
    fault = Fault(
        kind,
        thread,
        chance.randint(1, 45 if thread == 'loop' else 12),
        after=kind not in EARLY and chance.random() < 0.5,
    )
    await _holds(database, scenario, fault, tmp_path)


KEPT = [
    # A checkpoint was durable before the event that it stands for.
    (
        'postgresql',
        'new-task-that-may-run-again',
        'kill@loop:/SET checkpoint=/1+',
    ),
    # A session whose end was not heard of stayed open.
    ('postgresql', 'shutdown', 'lost@beat:/SET state=/0+'),
    # A server that took no writes, or a lock that timed out, counted as an
    # error that stays: the lease was not released.
    ('mariadb', 'new-task', 'readonly@loop:/DELETE FROM a2a_lease_leases/0'),
    ('mariadb', 'new-task', 'locked@loop:/DELETE FROM a2a_lease_leases/0'),
    # A replica that was stopped in its beat kept its row locked.
    ('mariadb', 'hand-over', 'stop@beat:/SET beat=/0+'),
]
"""Points at which a promise broke once."""


@pytest.mark.parametrize(('kind', 'scenario', 'fault'), KEPT)
async def test_where_a_promise_broke_it_holds(
    kind: str,
    scenario: str,
    fault: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
):
    database = request.getfixturevalue(kind)
    result = await _holds(
        database, SCENARIOS[scenario], Fault.parse(fault), tmp_path
    )
    assert result.reached


async def _holds(
    database: Database, scenario: Scenario, fault: Fault, folder: Path
) -> Result:
    result = await play(scenario, fault, database, folder)
    assert not result.broken, (
        f'script/chaos --database {database.kind} --scenario {scenario.name} '
        f'--fault {fault}: {result.broken}\n{result.logs}'
    )
    return result
