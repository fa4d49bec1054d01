"""How many turns run again on this replica, and beside which."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Room:
    """Places for turns that run again, up to a limit.

    A turn that runs apart has all places to itself: if it is the one that
    kills its replicas, it takes no other one with it that has died before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._apart_waiting = 0
        self._apart = False
        self._changed = asyncio.Condition()

    @property
    def left(self) -> int:
        """How many places are free, whoever waits for one."""
        if self._apart or self._apart_waiting:
            return 0
        return max(0, self._limit - self._taken)

    @asynccontextmanager
    async def place(self, *, apart: bool) -> AsyncGenerator[None]:
        """Waits for a place, and keeps it within the block."""
        async with self._changed:
            if apart:
                self._apart_waiting += 1
            try:
                await self._changed.wait_for(
                    self._is_empty if apart else self._has_place
                )
            finally:
                if apart:
                    self._apart_waiting -= 1
                self._changed.notify_all()
            self._taken += 1
            self._apart = apart
        try:
            yield
        finally:
            # Not under the condition's lock: it must happen at once, even in
            # a task that is being cancelled.
            self._taken -= 1
            self._apart = False
            self._wake()

    def _is_empty(self) -> bool:
        return self._taken == 0

    def _has_place(self) -> bool:
        # Whoever waits to run apart would wait for ever if others went on.
        return (
            self._taken < self._limit
            and not self._apart
            and not self._apart_waiting
        )

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.create_task(wake())
        _waking.add(task)
        task.add_done_callback(_waking.discard)


_waking: set[asyncio.Task[None]] = set()
