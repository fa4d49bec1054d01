"""The one place where time enters."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only rise; a test turns them by hand."""

    def monotonic(self) -> float:
        """Returns seconds since some moment."""
        ...


class _SystemClock:
    def monotonic(self) -> float:
        # CLOCK_MONOTONIC stands still while the machine is suspended: a
        # replica that wakes would take its last beat for a fresh one.
        return time.clock_gettime(_BOOT_TIME)


_BOOT_TIME = getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC)

SYSTEM_CLOCK: Clock = _SystemClock()
