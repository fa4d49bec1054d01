"""Applies each mutant to a copy of the code and looks who notices.

That is the tests it names, or with `--rig` those parts of the tests that know
the promises only: simulations, and replicas that are killed or disturbed at
their statements. A mutant that nobody notices survives: then a promise is not
tested. The exit code is 0 only if none does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants.mutants import MUTANTS, Mutant


ROOT = Path(__file__).parent.parent.parent


Notice = Callable[[Mutant, Path], 'str | None']


def main() -> int:
    parser = argparse.ArgumentParser(prog='script/mutants')
    parser.add_argument('words', nargs='*', help='that their names contain')
    parser.add_argument('--rig', action='store_true')
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if all(word in mutant.name for word in arguments.words)
        and not (arguments.rig and mutant.beyond_the_rig)
    ]
    for mutant in chosen:
        check(mutant)
    look: Notice = notice_by_rig if arguments.rig else notice_by_tests
    survivors = []
    # The tests wait more than they compute.
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as threads:
        found = threads.map(lambda mutant: _notice(mutant, look), chosen)
        for number, (mutant, noticed) in enumerate(
            zip(chosen, found, strict=True), start=1
        ):
            print(
                f'{number:3}/{len(chosen)}  {mutant.name}\n'
                f'         {noticed or "SURVIVED"}',
                flush=True,
            )
            if noticed is None:
                survivors.append(mutant)
    print(f'\n{len(chosen) - len(survivors)} of {len(chosen)} were noticed.')
    for mutant in survivors:
        print(f'Survived: {mutant.name}')
    return 1 if survivors else 0


def check(mutant: Mutant) -> None:
    """Makes sure that the code to change is there."""
    text = (ROOT / 'src' / 'a2a_lease' / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        sys.exit(
            f'{mutant.name}: the code to change is there '
            f'{text.count(mutant.old)} times in {mutant.file}.'
        )


def _notice(mutant: Mutant, look: Notice) -> str | None:
    with tempfile.TemporaryDirectory(prefix='a2a-lease-mutant-') as folder:
        copy = Path(folder)
        for name in ('src', 'tests', 'pyproject.toml'):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source,
                    copy / name,
                    ignore=shutil.ignore_patterns('__pycache__'),
                )
            else:
                shutil.copy(source, copy / name)
        file = copy / 'src' / 'a2a_lease' / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        return look(mutant, copy)


def _run(
    copy: Path, *command: str, seconds: int
) -> subprocess.CompletedProcess[str] | None:
    """Runs Python on a copy; returns None if it does not end."""
    try:
        return subprocess.run(
            [sys.executable, '-m', *command],
            timeout=seconds,
            check=False,
            cwd=copy,
            env={
                **os.environ,
                'PYTHONPATH': f'{copy / "src"}:{copy / "tests"}',
                'PYTHONDONTWRITEBYTECODE': '1',
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return None


def _first_failure(mutant: Mutant, copy: Path, *arguments: str) -> str | None:
    done = _run(
        copy,
        *('pytest', '-x', '-q', '-n0', '--timeout=40', '--tb=no', *arguments),
        seconds=240,
    )
    if done is None:
        return 'the tests hang'
    for line in done.stdout.splitlines():
        if line.startswith(('FAILED', 'ERROR')):
            return line.partition(' - ')[0]
    if done.returncode not in (0, 1):
        sys.exit(f'{mutant.name}: pytest could not run\n{done.stdout}')
    return None


def notice_by_tests(mutant: Mutant, copy: Path) -> str | None:
    """Returns the test of its own that fails, or None."""
    only = ['-k', mutant.only] if mutant.only else []
    return _first_failure(mutant, copy, *only, *mutant.tests)


def notice_by_rig(mutant: Mutant, copy: Path) -> str | None:
    """Returns what of a rig breaks, or None."""
    if kept := _first_failure(
        mutant,
        copy,
        'tests/simulation/test_simulation.py',
        'tests/chaos/test_chaos.py',
        '-k',
        'found_stays_away or where_a_promise',
    ):
        return kept
    for command in (
        ('simulation.run', '--seed=1', '--count=2000', '--at-once=1'),
        ('chaos', '--seed=1', '--count=6', '--at-once=2'),
    ):
        done = _run(copy, *command, '--first', seconds=1800)
        if done is None:
            return f'{command[0]} does not end'
        if done.returncode:
            for line in done.stdout.splitlines():
                if line.startswith(('Seed', 'BROKEN')) or '(' in line:
                    return line
            return done.stdout[-500:]
    return None


if __name__ == '__main__':
    sys.exit(main())
