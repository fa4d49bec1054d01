"""What those who stream a turn on this replica were given."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from a2a.server.cluster import TaskVersion


if TYPE_CHECKING:
    from a2a.server.events.event_queue import Event


_REMEMBERED = 64
"""More events than wait anywhere between the SDK and a client."""


class Shown:
    """The events of a turn that were handed out, with the task's versions.

    It lags behind what was saved: between the two the SDK pushes, and a
    webhook may be slow. A stream that must go on elsewhere begins there after
    what its client was given, not after what was saved.
    """

    def __init__(self) -> None:
        self.begun = TaskVersion.MISSING
        """The version of the task before the turn."""
        self.version = TaskVersion.MISSING
        """That of the last event."""
        self._events: deque[tuple[Event, TaskVersion]] = deque(
            maxlen=_REMEMBERED
        )

    def begin(self, version: TaskVersion) -> None:
        """Notes what the task is when the turn begins."""
        self.begun = self.version = version

    def add(self, event: Event, version: TaskVersion) -> None:
        """Notes an event that was handed out."""
        self.version = version
        self._events.append((event, version))

    def version_of(self, event: Event) -> TaskVersion | None:
        """Returns what the task was after an event."""
        for shown, version in reversed(self._events):
            if shown is event:
                return version
        return None
