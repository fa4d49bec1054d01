"""Ending asyncio tasks for sure, and what they hold with them."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


_AGAIN = 1.0
"""Seconds after which a task is cancelled once more.

Not sooner: SQLAlchemy closes the connection of a cancelled call of SQLite in
order, and a cancel meanwhile has it wait for ever.
"""


async def stop(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks until they have ended.

    Once is not enough: a driver may report a cancelled query as a lost
    connection, and a loop that outlasts those goes on.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN)


@contextmanager
def letting_go() -> Generator[None]:
    """Frees what a canceled call of the database still holds.

    Its traceback keeps its frames, and they its cursor. On SQLite an open
    cursor keeps the file locked against all who write, until the garbage
    collector comes by; closing the connection does not change that.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        raised: BaseException | None = error
        while raised is not None:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__context__
        raise
