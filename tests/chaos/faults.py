"""What goes wrong in a replica, and at which of its database statements.

A replica that is told to `install` a fault counts its statements and commits
once a file says that it counts, for its event loop and for the thread of its
heartbeat by themselves. When it comes to the one that the fault names it dies,
stands still, or gets an error that the server itself makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Engine, event
from sqlalchemy.util import await_only


if TYPE_CHECKING:
    from collections.abc import Callable


class Kind(StrEnum):
    """What goes wrong."""

    KILL = 'kill'
    """The process dies."""
    STOP = 'stop'
    """The process stands still, and is woken when all seems over."""
    LOST = 'lost'
    """The server drops the connection."""
    DEADLOCK = 'deadlock'
    """The server chooses the transaction as the victim of a deadlock."""
    LOCKED = 'locked'
    """The statement waited too long for a lock."""
    READ_ONLY = 'readonly'
    """The server takes no writes."""
    STALL = 'stall'
    """The statement takes twice the time to live."""
    FREEZE = 'freeze'
    """From here on all writes stall, for twice the time to live."""


DEADLY = (Kind.KILL, Kind.STOP)
EARLY = (
    Kind.DEADLOCK,
    Kind.LOCKED,
    Kind.READ_ONLY,
    Kind.STALL,
    Kind.FREEZE,
)
"""What can only happen instead of a statement, not after it."""
NOT_ON_SQLITE = (Kind.LOST, Kind.DEADLOCK)
"""A file has no connections to lose, and one writer at a time."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once."""

    kind: Kind
    thread: str
    """`loop`, or `beat` for the heartbeat's."""
    number: int
    """Of the statement or commit, from 1."""
    after: bool
    """Whether just after it instead of just before it."""
    text: str = ''
    """If given: the number is counted from the first statement with it."""

    def __str__(self) -> str:
        """Returns it as it is given to `script/chaos`: `kill@loop:12+`."""
        plus = '+' if self.after else ''
        text = f'/{self.text}/' if self.text else ''
        return f'{self.kind}@{self.thread}:{text}{self.number}{plus}'

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one.

        Raises:
            ValueError: It is none.
        """
        found = re.fullmatch(
            r'(\w+)@(loop|beat):(?:/([^/]+)/)?(\d+)(\+?)', text
        )
        if found is None:
            raise ValueError(
                'A fault reads like kill@loop:12+, or like '
                f'kill@loop:/SET attempt=/1+, not {text!r}.'
            )
        kind, thread, words, number, plus = found.groups()
        return cls(Kind(kind), thread, int(number), bool(plus), words or '')


def install(fault: str, first: str, folder: str, seconds: float) -> None:
    """Makes this process count, and fail.

    Args:
        fault: As it reads, or '' to count only.
        first: What goes wrong besides, in every play; '' for nothing.
        folder: The file `armed` there says when to begin; `steps` is written,
            `reached` when the fault happens, and `first` when the other does.
        seconds: How long a statement stalls.
    """
    steps = _Steps(
        {
            name: Fault.parse(text)
            for name, text in (('first', first), ('reached', fault))
            if text
        },
        Path(folder),
        seconds,
    )

    def do_execute(cursor: Any, statement: str, values: Any, ctx: Any) -> bool:
        steps.take(
            ctx.dialect,
            cursor,
            statement,
            lambda: ctx.dialect.do_execute(cursor, statement, values, ctx),
        )
        return True

    def do_executemany(
        cursor: Any, statement: str, values: Any, ctx: Any
    ) -> bool:
        steps.take(
            ctx.dialect,
            cursor,
            statement,
            lambda: ctx.dialect.do_executemany(cursor, statement, values, ctx),
        )
        return True

    def do_execute_no_params(cursor: Any, statement: str, ctx: Any) -> bool:
        steps.take(
            ctx.dialect,
            cursor,
            statement,
            lambda: ctx.dialect.do_execute_no_params(cursor, statement, ctx),
        )
        return True

    def commits(connection: Any) -> None:
        # SQLAlchemy has no event that fires after a commit.
        dialect = connection.dialect
        if 'do_commit' in vars(dialect):
            return
        plain = dialect.do_commit

        def do_commit(raw: Any) -> None:
            cursor = raw.cursor()
            try:
                steps.take(dialect, cursor, 'COMMIT', lambda: plain(raw))
            finally:
                with contextlib.suppress(Exception):
                    cursor.close()

        dialect.do_commit = do_commit

    event.listen(Engine, 'do_execute', do_execute)
    event.listen(Engine, 'do_executemany', do_executemany)
    event.listen(Engine, 'do_execute_no_params', do_execute_no_params)
    event.listen(Engine, 'engine_connect', commits)


class _Steps:
    def __init__(
        self, faults: dict[str, Fault], folder: Path, seconds: float
    ) -> None:
        # Each comes once, though the process may have to be started again.
        self._faults = {
            name: fault
            for name, fault in faults.items()
            if not (folder / name).exists()
        }
        self._folder = folder
        self._seconds = seconds
        self._numbers: Counter[str] = Counter()
        self._since: dict[Fault, int] = {}
        """At which number the statement came from which a fault counts."""
        self._armed = False

    def take(
        self,
        dialect: Any,
        cursor: Any,
        statement: str,
        run: Callable[[], None],
    ) -> None:
        self._armed = self._armed or (self._folder / 'armed').exists()
        if not self._armed:
            run()
            return
        main = threading.current_thread() is threading.main_thread()
        thread = 'loop' if main else 'beat'
        self._numbers[thread] += 1
        number = self._numbers[thread]
        statement = ' '.join(statement.split())
        self._note('steps', f'{thread}:{number} {statement}')
        here = [
            (name, fault)
            for name, fault in self._faults.items()
            if fault.thread == thread and self._comes(fault, number, statement)
        ]
        for after in (False, True):
            for name, fault in here:
                if fault.after is after:
                    self._note(name, statement)
                    self._happens(fault.kind, dialect, cursor)
            if not after:
                run()

    def _comes(self, fault: Fault, number: int, statement: str) -> bool:
        """Whether a fault is at a statement of its thread."""
        if not fault.text:
            return number == fault.number
        if fault.text in statement:
            self._since.setdefault(fault, number)
        since = self._since.get(fault)
        return since is not None and number - since == fault.number

    def _note(self, file: str, text: str) -> None:
        with (self._folder / file).open('a') as notes:
            notes.write(f'{text}\n')

    def _happens(self, kind: Kind, dialect: Any, cursor: Any) -> None:
        if kind is Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is Kind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind is Kind.STALL:
            await_only(asyncio.sleep(self._seconds))
        elif kind is Kind.FREEZE:
            # Whoever locks the tables waits for this transaction, and it does
            # not wait for them.
            await_only(asyncio.sleep(0.1))
        elif dialect.name == 'sqlite':
            raise dialect.dbapi.OperationalError(_SQLITE[kind])
        else:
            # MariaDB is a dialect of its own to SQLAlchemy.
            name = 'mysql' if dialect.name == 'mariadb' else dialect.name
            for sql in _SQL[name, kind]:
                _run(cursor, sql)
            raise AssertionError(f'The server did not answer with {kind}.')


def _run(cursor: Any, sql: str) -> None:
    if sql.startswith('KILL'):
        # It answers that it was interrupted; what comes next fails.
        with contextlib.suppress(Exception):
            cursor.execute(sql)
    else:
        cursor.execute(sql)


def _raises(sqlstate: str, text: str) -> list[str]:
    body = f"RAISE EXCEPTION '{text}' USING ERRCODE = '{sqlstate}';"
    return [f'DO $$ BEGIN {body} END $$']


def _signals(sqlstate: str, number: int, text: str) -> str:
    return (
        f"SIGNAL SQLSTATE '{sqlstate}' SET MYSQL_ERRNO = {number}, "
        f"MESSAGE_TEXT = '{text}'"
    )


_SQL = {
    ('postgresql', Kind.LOST): [
        'SELECT pg_terminate_backend(pg_backend_pid())'
    ],
    ('postgresql', Kind.DEADLOCK): _raises('40P01', 'deadlock detected'),
    ('postgresql', Kind.LOCKED): _raises('55P03', 'lock timeout'),
    ('postgresql', Kind.READ_ONLY): _raises(
        '25006', 'cannot execute UPDATE in a read-only transaction'
    ),
    ('mysql', Kind.LOST): ['KILL CONNECTION_ID()', 'SELECT 1'],
    # The server has rolled the transaction back when it says so.
    ('mysql', Kind.DEADLOCK): [
        'ROLLBACK',
        _signals('40001', 1213, 'Deadlock found when trying to get lock'),
    ],
    ('mysql', Kind.LOCKED): [
        _signals('HY000', 1205, 'Lock wait timeout exceeded')
    ],
    ('mysql', Kind.READ_ONLY): [
        _signals('HY000', 1290, 'The server runs with --read-only')
    ],
}
_SQLITE = {
    Kind.LOCKED: 'database is locked',
    Kind.READ_ONLY: 'attempt to write a readonly database',
}
