"""Applies each mutant to a copy of the code and runs the tests it names.

A mutant that no test notices survives: then a promise is not tested. The exit
code is 0 only if none does. Arguments: words that the names of the mutants to
run must contain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants.mutants import MUTANTS, Mutant


ROOT = Path(__file__).parent.parent.parent


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
    survivors = []
    for mutant in chosen:
        check(mutant)
    # The tests wait more than they compute.
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as threads:
        for number, (mutant, noticed) in enumerate(
            zip(chosen, threads.map(notice, chosen), strict=True), start=1
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


def _run(
    command: list[str], **options: Any
) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, timeout=240, check=False, **options)
    except subprocess.TimeoutExpired:
        return None


def check(mutant: Mutant) -> None:
    """Makes sure that the code to change is there."""
    text = (ROOT / 'src' / 'a2a_lease' / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        sys.exit(
            f'{mutant.name}: the code to change is there '
            f'{text.count(mutant.old)} times in {mutant.file}.'
        )


def notice(mutant: Mutant) -> str | None:
    """Returns the test that fails, or None."""
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
        done = _run(
            [
                sys.executable,
                '-m',
                'pytest',
                '-x',
                '-q',
                '-n0',
                '--timeout=40',
                '--tb=no',
                *(['-k', mutant.only] if mutant.only else []),
                *mutant.tests,
            ],
            cwd=copy,
            env={
                **os.environ,
                'PYTHONPATH': str(copy / 'src'),
                'PYTHONDONTWRITEBYTECODE': '1',
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done is None:
        return 'the tests hang'
    for line in done.stdout.splitlines():
        if line.startswith(('FAILED', 'ERROR')):
            return line.partition(' - ')[0]
    if done.returncode not in (0, 1):
        sys.exit(f'{mutant.name}: pytest could not run\n{done.stdout}')
    return None


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
