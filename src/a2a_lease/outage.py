"""Telling an outage, which passes, from an error that stays."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


logger = logging.getLogger(__name__)

_OUTAGE_SQLSTATES = ('08', '40', '53', '55', '57', '58', '25P')
"""PostgreSQL classes: connection, rollback, resources, object in use, operator,
system, and sessions that the server ended.
Its driver reports them as a plain DBAPIError."""
_READ_ONLY_SQLSTATE = '25006'
"""A server that was just demoted to a standby answers writes like this."""

_OUTAGES = (
    DisconnectionError,
    PoolTimeoutError,
    OSError,
    asyncio.TimeoutError,
)
_DRIVER_ERRORS = frozenset(
    {'DBAPIError', 'DatabaseError', 'InterfaceError', 'PostgresError'}
)
"""Names of classes of SQLAlchemy, of PEP 249, and of asyncpg beneath it."""

_LASTING_SQLITE = ('no such ', 'has no column', 'malformed', 'syntax error')
"""SQLite calls these operational errors, but no waiting mends them."""

_OUTAGE_MYSQL = frozenset(
    {
        1020,
        1021,
        1040,
        1047,
        1053,
        1152,
        1184,
        1203,
        1205,
        1213,
        1226,
        1290,
        1317,
        1836,
        1927,
        1969,
        2003,
        2006,
        2013,
    }
)
"""Too many connections, no resources, shutdown, killed, aborted, lock wait,
deadlock, a changed row, read-only, a cluster that is not ready, and the
client's codes for a server that cannot be reached or went away."""


def is_outage(error: BaseException) -> bool:
    """Whether trying again later can help.

    Lost connections, a database that is away, restarting, read-only or out of
    resources, contention, and an exhausted pool; not a value, statement or
    schema that the database refuses.
    """
    if isinstance(error, _OUTAGES):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    # What goes wrong while SQLAlchemy prepares a connection, its isolation
    # level for instance, comes as the driver raised it.
    original = getattr(error, 'orig', None) or error
    kinds = {
        kind.__name__
        for raised in (error, original)
        for kind in type(raised).__mro__
    }
    if not kinds & _DRIVER_ERRORS:
        return False
    # MySQL's own number first: it calls most of these HY000, a general error.
    code = original.args[0] if original.args else None
    if isinstance(code, int):
        return code in _OUTAGE_MYSQL
    sqlstate = str(getattr(original, 'sqlstate', None) or '')
    if sqlstate:
        return (
            sqlstate.startswith(_OUTAGE_SQLSTATES)
            or sqlstate == _READ_ONLY_SQLSTATE
        )
    if 'OperationalError' in kinds:
        return not any(mark in str(original) for mark in _LASTING_SQLITE)
    return 'InterfaceError' in kinds


def pauses(*, first: float = 0.05, longest: float = 1.0) -> Iterator[float]:
    """Yields seconds to wait between tries: growing, spread, without end."""
    pause = first
    while True:
        yield pause * random.uniform(0.75, 1.25)  # noqa: S311
        pause = min(longest, pause * 1.6)


async def outlast(
    call: Callable[[], Awaitable[object]],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Makes a call again as long as the database is away.

    Args:
        call: Harmless if it is made again after it landed.
        is_over: Whether it need not be made any more, after all.

    Raises:
        Exception: What is no outage.
    """
    for pause in pauses():
        try:
            await call()
            return
        except Exception as error:
            if not is_outage(error):
                raise
            logger.debug('A call waits for the database.', exc_info=True)
        if is_over():
            return
        await asyncio.sleep(pause)


async def insist(
    call: Callable[[], Awaitable[object]], *, timeout: float
) -> None:
    """Makes a call until it passes, for what has no second chance.

    Args:
        call: Harmless if it is made again after it landed.
        timeout: Seconds after which it is not tried again.

    Raises:
        Exception: What the last try raised.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    for pause in pauses():
        try:
            await call()
        except Exception as error:
            if loop.time() + pause >= until:
                raise
            logger.info('It is tried again: %s', error or type(error).__name__)
        else:
            return
        await asyncio.sleep(pause)
