"""Points at which something goes wrong: some at random, and those that failed.

`script/chaos --exhaustive` goes through all of them.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from chaos.faults import EARLY, NOT_ON_SQLITE, Fault, Kind
from chaos.play import play
from chaos.scenarios import SCENARIOS


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
    scenario = SCENARIOS[chance.choice(list(SCENARIOS))]
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
    result = await play(scenario, fault, database, tmp_path)
    assert not result.broken, (
        f'script/chaos --database {database.kind} --scenario {scenario.name} '
        f'--fault {fault}: {result.broken}\n{result.logs}'
    )
