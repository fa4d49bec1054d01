"""Telling an outage, which passes, from an error that stays."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from sqlalchemy.exc import (
    DBAPIError,
    DisconnectionError,
    InterfaceError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError


if TYPE_CHECKING:
    from collections.abc import Iterator


_OUTAGE_SQLSTATES = ('08', '40', '53', '55', '57')
"""PostgreSQL classes: connection, rollback, resources, object in use, operator.
Its driver reports them as a plain DBAPIError."""
_READ_ONLY_SQLSTATE = '25006'
"""A server that was just demoted to a standby answers writes like this."""

_LASTING_SQLITE = ('no such ', 'has no column', 'malformed', 'syntax error')
"""SQLite calls these operational errors, but no waiting mends them."""

_OUTAGE_MYSQL = frozenset(
    {1040, 1053, 1152, 1184, 1203, 1205, 1213, 1290, 1836, 2003, 2006, 2013}
)
"""Too many connections, shutdown, aborted, lock wait, deadlock, read-only,
and the client's codes for a server that cannot be reached or went away."""


def is_outage(error: BaseException) -> bool:
    """Whether trying again later can help.

    Lost connections, a database that is away, restarting, read-only or out of
    resources, contention, and an exhausted pool; not a value, statement or
    schema that the database refuses.
    """
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        sqlstate = str(getattr(error.orig, 'sqlstate', None) or '')
        if sqlstate:
            return (
                sqlstate[:2] in _OUTAGE_SQLSTATES
                or sqlstate == _READ_ONLY_SQLSTATE
            )
        code = error.orig.args[0] if error.orig and error.orig.args else None
        if isinstance(code, int):
            return code in _OUTAGE_MYSQL
        if isinstance(error, OperationalError):
            text = str(error.orig)
            return not any(mark in text for mark in _LASTING_SQLITE)
        return isinstance(error, InterfaceError)
    return isinstance(
        error,
        DisconnectionError | PoolTimeoutError | OSError | asyncio.TimeoutError,
    )


def pauses(*, first: float = 0.05, longest: float = 1.0) -> Iterator[float]:
    """Yields seconds to wait between tries: growing, spread, without end."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1.25)  # noqa: S311
        pause = min(longest, pause * 1.6)
