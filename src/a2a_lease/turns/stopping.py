"""Ending an asyncio task for sure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Iterable


_AGAIN = 0.25


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
