"""This replica's own session, as the event loop and the heartbeat see it."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from a2a_lease.replica.clock import Clock


class LiveSession:
    """One life of this replica.

    The heartbeat's thread writes it and any thread reads it; each field is
    written whole.
    """

    def __init__(self, session_id: str, *, trust: float, clock: Clock) -> None:
        """Makes a session that was just opened.

        Args:
            session_id: Its random id.
            trust: Seconds for which a confirmed beat stands for being alive.
            clock: Tells how long ago that was.
        """
        self.id = session_id
        self.ended = False
        """Whether it was closed, or lost to others."""
        self._trust = trust
        self._clock = clock
        self._confirmed_at = float('-inf')

    def confirm(self, *, sent_at: float) -> None:
        """Notes a beat that landed, by the time at which it was sent."""
        self._confirmed_at = sent_at

    @property
    def silence(self) -> float:
        """Seconds since the last beat that landed was sent."""
        return self._clock.monotonic() - self._confirmed_at

    def fresh(self) -> bool:
        """Whether saves may pass without asking."""
        return not self.ended and self.silence < self._trust
