"""`script/chaos`: walks through what can go wrong, or soaks in it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from pathlib import Path

from chaos.faults import Kind
from chaos.scenarios import SCENARIOS
from chaos.soak.run import soak
from chaos.walk import Walk
from support.databases import Servers, make_database


DATABASES = ['sqlite', 'postgresql', 'mariadb']


def main() -> int:
    """Reads the arguments, and walks."""
    parser = argparse.ArgumentParser(
        prog='script/chaos',
        description='Kills, stops and disturbs a replica at its database '
        'statements, and checks that every promise holds.',
    )
    parser.add_argument(
        '--database',
        action='append',
        choices=DATABASES,
        help='one or several; all by default',
    )
    parser.add_argument(
        '--minutes',
        type=float,
        help='soaks each database for so long instead: replicas and clients, '
        'and everything that can go wrong at random',
    )
    parser.add_argument(
        '--scenario',
        action='append',
        metavar='WORD',
        help='those with the word in their name, or of just that name: '
        f'{", ".join(SCENARIOS)}',
    )
    parser.add_argument(
        '--kinds',
        type=lambda text: [Kind(kind) for kind in text.split(',')],
        default=list(Kind),
        help=f'what goes wrong: {",".join(Kind)}',
    )
    parser.add_argument('--fault', action='append', help='such as kill@loop:7+')
    parser.add_argument('--times', type=int, default=1, help='of each --fault')
    parser.add_argument('--count', type=int, default=4, help='per scenario')
    parser.add_argument('--exhaustive', action='store_true')
    parser.add_argument('--seed', type=int, default=random.randrange(10**6))
    parser.add_argument('--at-once', type=int, default=4)
    parser.add_argument('--details', action='store_true', help='with logs')
    parser.add_argument(
        '--first', action='store_true', help='ends with the first that breaks'
    )
    parser.add_argument('--steps', action='store_true', help='list them')
    arguments = parser.parse_args()
    arguments.scenario = arguments.scenario or ['']
    arguments.databases = arguments.database or DATABASES
    with contextlib.closing(Servers()) as servers:
        if arguments.minutes is None:
            return asyncio.run(Walk(arguments, servers).run())
        held = [_soak(kind, servers, arguments) for kind in arguments.databases]
        return 0 if all(held) else 1


def _soak(kind: str, servers: Servers, arguments: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(prefix='a2a-lease-chaos-') as folder:
        database = make_database(kind, servers, Path(folder))
        return asyncio.run(
            soak(database, minutes=arguments.minutes, seed=arguments.seed)
        )


if __name__ == '__main__':
    sys.exit(main())
