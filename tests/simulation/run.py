"""Plays simulations by the thousand: `script/simulate`."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulation.check import broken
from simulation.schedule import Schedule, make_schedule, shrink
from simulation.world import World


@dataclass(frozen=True)
class Result:
    """What came of a simulation."""

    broken: tuple[str, ...]
    trace: tuple[str, ...]


def simulate(schedule: Schedule, *, tell: bool = False) -> Result:
    """Plays a schedule, on a thread: signals are for the main one."""
    results: list[Result | BaseException] = []

    def play() -> None:
        try:
            results.append(_result(schedule, tell=tell))
        except BaseException as error:
            results.append(error)
        finally:
            # What the killed left unfinished ends when it is collected: not
            # before the end, and on the thread that has its locks.
            gc.collect()

    gc.disable()
    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    gc.enable()
    [result] = results
    if isinstance(result, BaseException):
        raise result
    return result


def _result(schedule: Schedule, *, tell: bool) -> Result:
    world = World(schedule, tell=tell)
    try:
        world.run()
        found = world.loop.run_until_complete(broken(world))
        return Result(tuple(found), tuple(world.trace))
    finally:
        world.close()


def _play(seed: int) -> tuple[int, tuple[str, ...]]:
    logging.disable()
    # The coroutines of killed replicas outlive their loop, and complain.
    sys.unraisablehook = lambda _: None
    return seed, simulate(make_schedule(seed)).broken


def main() -> int:
    """Reads the arguments, and plays."""
    parser = argparse.ArgumentParser(
        prog='script/simulate',
        description='Plays seeded schedules of replicas and clients in '
        'virtual time, and checks that every promise holds.',
    )
    parser.add_argument('--count', type=int, default=1000)
    parser.add_argument('--seed', type=int, default=random.randrange(10**9))
    parser.add_argument('--at-once', type=int, default=2)
    parser.add_argument('--play', metavar='JSON', help='one schedule')
    parser.add_argument(
        '--first', action='store_true', help='ends with the first that fails'
    )
    arguments = parser.parse_args()
    if arguments.play:
        return _show(Schedule.of_json(arguments.play))
    began = time.monotonic()
    failed = []
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    gc.freeze()  # What is there already needs no look after each schedule.
    with ProcessPoolExecutor(arguments.at_once) as workers:
        for seed, found in workers.map(_play, seeds, chunksize=8):
            if found:
                failed.append(seed)
                print(f'Seed {seed}: {found[0]}', flush=True)
                if arguments.first:
                    workers.shutdown(cancel_futures=True)
                    return 1
    print(
        f'{arguments.count} schedules from seed {arguments.seed} on, '
        f'{time.monotonic() - began:.0f} s; {len(failed)} broke a promise.'
    )
    if failed:
        logging.disable()
        smallest = shrink(
            make_schedule(failed[0]), lambda s: simulate(s).broken
        )
        print(f"\nscript/simulate --play '{smallest.to_json()}'")
        logging.disable(logging.NOTSET)
        _show(smallest)
    return 1 if failed else 0


def _show(schedule: Schedule) -> int:
    logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s')
    found = simulate(schedule, tell=True).broken
    print(*found, sep='\n')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
