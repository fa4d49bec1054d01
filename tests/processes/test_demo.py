"""The demo is right, says what it misses, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Self

import pytest


class Demo:
    """The demo as a process that can be found again with its children."""

    def __init__(self, *arguments: str) -> None:
        self.mark = f'A2A_LEASE_DEMO_TEST={uuid.uuid4().hex}'
        name, value = self.mark.split('=')
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'a2a_lease.demo', *arguments],
            env={**os.environ, name: value, 'COLUMNS': '120'},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Whatever the test came to: a thread may still read what it says.
        self.process.kill()
        await self.leaves_nothing()

    async def until_says(self, text: str) -> str:
        def read() -> str:
            assert self.process.stdout is not None
            said = ''
            for line in self.process.stdout:
                said += line
                if text in line:
                    return said
            raise AssertionError(f'It never said {text!r}.')

        return await asyncio.wait_for(asyncio.to_thread(read), 60)

    async def ends(self) -> tuple[int, str]:
        out, _ = await asyncio.wait_for(
            asyncio.to_thread(self.process.communicate), 120
        )
        return self.process.returncode, out

    async def leaves_nothing(self) -> None:
        for _ in range(100):
            left = self._processes()
            if not left:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f'Processes are left: {left}')

    def _processes(self) -> list[str]:
        found = []
        for folder in Path('/proc').iterdir():
            try:
                if self.mark.encode() in (folder / 'environ').read_bytes():
                    state = (folder / 'stat').read_text().rpartition(')')[2]
                    if state.split()[0] != 'Z':
                        command = (folder / 'cmdline').read_bytes()
                        found.append(f'{folder.name} {command!r}')
            except OSError:
                continue
        return found


@pytest.mark.parametrize('database', ['sqlite', 'postgresql'])
async def test_it_shows_what_must_be_seen(database: str):
    async with Demo('--database', database) as demo:
        code, out = await demo.ends()
        assert code == 0, out
        assert 'SIGKILL to replica A' in out
        assert 'Missed' not in out
        await demo.leaves_nothing()


async def test_it_shows_that_a_task_goes_on_and_can_be_kept():
    async with Demo('--policy', 're-execute', '--keep') as demo:
        out = await demo.until_says('Still up, until Ctrl-C')
        assert '16 of 16 chapters' in out
        assert 'attempt 2' in out
        assert 'Missed' not in out
        demo.process.send_signal(signal.SIGINT)
        code, out = await demo.ends()
        assert code == 130, out
        assert 'curl' in out
        await demo.leaves_nothing()


async def test_it_says_what_is_missed_without_the_sweep():
    async with Demo('--sabotage') as demo:
        code, out = await demo.ends()
        assert code == 1, out
        assert 'Missed: the webhook is told FAILED, once' in out
        assert out.count('Missed:') == 3
        await demo.leaves_nothing()


@pytest.mark.parametrize(
    ('moment', 'number'),
    [
        ('Three replicas', signal.SIGTERM),
        ('is paused on A', signal.SIGINT),
        ('SIGKILL to', signal.SIGINT),
        ('seen:', signal.SIGTERM),
    ],
)
async def test_an_interrupt_leaves_nothing(moment: str, number: signal.Signals):
    async with Demo() as demo:
        await demo.until_says(moment)
        demo.process.send_signal(number)
        code, out = await demo.ends()
        assert code == 130, out
        assert 'Traceback' not in out, out
        await demo.leaves_nothing()


async def test_even_its_own_death_leaves_nothing():
    async with Demo() as demo:
        await demo.until_says('works on A')
        demo.process.kill()
        await demo.ends()
        await demo.leaves_nothing()
