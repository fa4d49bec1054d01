"""What happens in a simulation, and when: made from a seed, and shrunk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self


LENGTH = 40.0
"""Virtual seconds in which things go wrong."""
OF_CLIENTS = ('talk', 'ask', 'again', 'hurry', 'listen', 'cancel')


@dataclass(frozen=True)
class Action:
    """One thing that happens."""

    at: float
    kind: str
    """Of a client: `talk` (and stream), `ask` (and wait), `again` (the first
    message), `hurry` (the last one, for its task), `listen`, `cancel`. Of a
    process: `kill`, `term`, `stop`, `block`, `cut`, `reset`, `unheard`,
    `lossy`. Of the database: `down`, `freeze`."""
    who: int
    """Which client, or which process."""
    seconds: float = 0.0
    """How long it lasts, or how long until a process is started again."""
    where: int = 0
    """Which process a client asks."""
    scripts: tuple[str, ...] = ()
    """What the agent is told to do: the message, and the answers."""


@dataclass(frozen=True)
class Schedule:
    """All that happens."""

    seed: int
    """Of what chance decides on the way."""
    replicas: int
    runs_again: bool
    actions: tuple[Action, ...] = field(default=())

    def to_json(self) -> str:
        """Returns it as one line, to be played again."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Reads such a line."""
        data = json.loads(text)
        actions = tuple(
            Action(**{**action, 'scripts': tuple(action['scripts'])})
            for action in data.pop('actions')
        )
        return cls(**data, actions=actions)


def make_schedule(seed: int) -> Schedule:
    """Draws a schedule."""
    chance = random.Random(seed)
    replicas = chance.randint(2, 4)
    clients = chance.randint(1, 5)
    actions = []
    for client in range(clients):
        at = chance.uniform(0, LENGTH / 2)
        actions.append(
            Action(
                at,
                chance.choice(['talk', 'talk', 'ask']),
                client,
                where=chance.randrange(replicas),
                scripts=tuple(_scripts(chance)),
            )
        )
        for kind, often in (
            ('again', 0.2),
            ('hurry', 0.3),
            ('listen', 0.5),
            ('cancel', 0.15),
        ):
            if chance.random() < often:
                actions.append(
                    Action(
                        at + chance.expovariate(1 / 4),
                        kind,
                        client,
                        where=chance.randrange(replicas),
                    )
                )
    for _ in range(chance.choice([0, 1, 1, 2, 3, 4])):
        kind = chance.choices(*zip(*_FAULTS, strict=True))[0]
        actions.append(
            Action(
                chance.uniform(1, LENGTH),
                kind,
                chance.randrange(replicas),
                seconds=chance.choice(
                    [
                        chance.uniform(0.1, 2),
                        chance.uniform(2, 5),
                        chance.uniform(5, 15),
                    ]
                ),
            )
        )
    return Schedule(
        seed=seed,
        replicas=replicas,
        runs_again=chance.random() < 0.6,
        actions=tuple(sorted(actions, key=lambda action: action.at)),
    )


_FAULTS: list[tuple[str, float]] = [
    ('kill', 4),
    ('term', 3),
    ('stop', 3),
    ('block', 2),
    ('cut', 2),
    ('reset', 2),
    ('unheard', 1),
    ('lossy', 2),
    ('down', 1),
    ('freeze', 1),
]


def _scripts(chance: random.Random) -> list[str]:
    scripts = []
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        pause = chance.choice(['input', 'input', 'auth'])
        scripts.append(f'{_work(chance)}; {pause}')
    end = chance.choices(
        ['complete', 'fail', 'raise', 'message', 'poison'], [10, 1, 1, 1, 0.5]
    )[0]
    work = _work(chance)
    if chance.random() < 0.2:
        work += f'; auth; sleep {chance.uniform(0, 8):.1f}; working'
    if end == 'message' and not scripts:
        return ['message']
    scripts.append(f'{work}; {"complete" if end == "message" else end}')
    return scripts


def _work(chance: random.Random) -> str:
    steps = chance.randint(1, 5)
    pause = chance.choice([0, chance.uniform(0, 1), chance.uniform(0, 5)])
    work = f'count {steps} {pause:.2f}'
    if chance.random() < 0.1:
        work += f'; stubborn {chance.uniform(0, 6):.1f}'
    return work


def shrink(schedule: Schedule, fails: Callable[[Schedule], Any]) -> Schedule:
    """Takes out what a failure does not need.

    Args:
        schedule: One that fails.
        fails: Whether another one fails too.
    """
    size = max(1, len(schedule.actions) // 2)
    while True:
        start = 0
        while start < len(schedule.actions):
            actions = schedule.actions
            smaller = Schedule(
                schedule.seed,
                schedule.replicas,
                schedule.runs_again,
                actions[:start] + actions[start + size :],
            )
            if fails(smaller):
                schedule = smaller
            else:
                start += size
        if size == 1:
            return schedule
        size //= 2
