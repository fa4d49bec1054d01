"""Schedules in virtual time: some at random, and those that found a fault.

`script/simulate` plays as many as you like.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from simulation.run import simulate
from simulation.schedule import Action, Schedule, make_schedule, shrink


SEED = int(os.environ.get('CHAOS_SEED') or random.randrange(10**9))
FOUND = (Path(__file__).parent / 'found.jsonl').read_text().splitlines()
"""Schedules that found a fault; a new one is added as it is printed."""


@pytest.mark.parametrize(
    'line', FOUND, ids=[str(json.loads(line)['seed']) for line in FOUND]
)
def test_a_fault_that_was_found_stays_away(line: str):
    assert not simulate(Schedule.of_json(line)).broken


@pytest.mark.parametrize('number', range(10))
def test_whatever_happens_the_promises_hold(number: int):
    schedule = make_schedule(SEED + number)
    broken = simulate(schedule).broken
    assert not broken, f'script/simulate --play {schedule.to_json()!r}'


def test_a_schedule_replays_exactly():
    schedule = make_schedule(5026)
    again = Schedule.of_json(schedule.to_json())
    assert again == schedule
    assert simulate(schedule).trace == simulate(again).trace


def test_a_schedule_is_shrunk_to_what_fails():
    kill = Action(2.0, 'kill', 1)
    cut = Action(9.0, 'cut', 0)
    schedule = make_schedule(7)
    schedule = replace(
        schedule, actions=(*schedule.actions[:3], kill, cut, kill)
    )
    smallest = shrink(
        schedule, lambda s: cut in s.actions and kill in s.actions
    )
    assert sorted(action.kind for action in smallest.actions) == ['cut', 'kill']


def test_what_breaks_is_told(monkeypatch: pytest.MonkeyPatch):
    """A rig that finds nothing may be one that looks at nothing."""
    monkeypatch.setattr(
        'a2a_lease.recovery.recovery.Recovery.run_once', _does_nothing
    )
    schedule = Schedule(
        seed=1,
        replicas=2,
        runs_again=False,
        actions=(
            Action(1.0, 'talk', 0, where=0, scripts=('count 5 2; complete',)),
            Action(4.0, 'kill', 0, seconds=1.0),
        ),
    )
    [first, *_] = simulate(schedule).broken
    assert first.startswith('1 (nothing is left behind)')


async def _does_nothing(recovery: object) -> None:
    del recovery
