"""Judging others by how long their counters were seen standing still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from a2a_lease.model import Look, Session
    from a2a_lease.settings import LeaseSettings


_SUSPECT_AFTER_BEATS = 3


@dataclass(slots=True)
class _Seen:
    beat: int
    since: float
    """When this beat was seen first."""
    looked_at: float
    silence: float = 0.0
    """What may be held against it; a gap between looks counts in part."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A session that was silent for too long."""

    session: Session
    silence: float
    """Seconds."""


class Watcher:
    """Sums the silence of other sessions on this replica's own clock.

    No wall clock is compared with another. Call `observe` only after an own
    beat was confirmed: a database that takes nobody's writes makes everybody
    silent. client-go's leader election and the DynamoDB lock client judge in
    the same way.
    """

    def __init__(self, settings: LeaseSettings) -> None:
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self._everyone_at = float('-inf')

    def wants_everyone(self, now: float) -> bool:
        """Whether to look at all sessions, and not at the neighbours only."""
        return now >= self._everyone_at or bool(self.suspects(now))

    def suspects(self, now: float) -> list[str]:
        """Returns the ids of sessions whose next beat is overdue."""
        overdue = _SUSPECT_AFTER_BEATS * self._settings.heartbeat_interval
        return [
            session_id
            for session_id, seen in self._seen.items()
            if seen.looked_at > seen.since and now - seen.since > overdue
        ]

    def observe(
        self, look: Look, *, now: float, everyone: bool
    ) -> list[Verdict]:
        """Takes in a look, and says who is to be fenced.

        Args:
            look: What was seen.
            now: When, by this replica's clock.
            everyone: Whether all open sessions were asked for.
        """
        verdicts = []
        for session in look.open:
            seen = self._seen.get(session.id)
            if seen is None or seen.beat != session.beat:
                self._seen[session.id] = _Seen(
                    beat=session.beat, since=now, looked_at=now
                )
                continue
            # Whoever slept saw nothing meanwhile.
            seen.silence += min(
                now - seen.looked_at, 2 * self._settings.sweep_interval
            )
            seen.looked_at = now
            if seen.silence > max(self._settings.ttl, session.ttl):
                verdicts.append(Verdict(session, seen.silence))
        if everyone:
            there = {session.id for session in look.open}
            self._seen = {
                session_id: seen
                for session_id, seen in self._seen.items()
                if session_id in there
            }
            self._everyone_at = now + self._settings.ttl
        return verdicts
