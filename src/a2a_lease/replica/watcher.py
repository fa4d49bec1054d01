"""Judging others by how long their counters were seen standing still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
    let_go_for: float | None = None
    """For how long its lock was seen free, if it is."""
    gap: float = 0.0
    """Between the last two looks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A session that counts as dead."""

    session: Session
    silence: float
    """Seconds for which it was seen silent."""
    let_go: bool = False
    """Whether its lock is free, or else it was silent for too long."""


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
            seen.gap = now - seen.looked_at
            seen.silence += min(seen.gap, 2 * self._settings.sweep_interval)
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

    def overdue(self, look: Look) -> list[Session]:
        """Returns those with a lock whose next beat should have come."""
        found = []
        for session in look.open:
            seen = self._seen.get(session.id)
            if session.lock is None or seen is None:
                continue
            # A beat comes a little early or late.
            if seen.silence >= 0.9 * session.heartbeat_interval:
                found.append(session)
            else:
                seen.let_go_for = None
        return found

    def certify(
        self, overdue: Sequence[Session], released: Collection[str]
    ) -> list[Verdict]:
        """Takes in whose lock is free, and says who is dead.

        A lock that goes is evidence. That no beat comes with a new one in two
        intervals more, in which this replica beats and looks, makes it enough.

        Args:
            overdue: What `overdue` returned, of which the locks were seen.
            released: The ids of those whose lock is free.
        """
        verdicts = []
        for session in overdue:
            seen = self._seen[session.id]
            if session.id not in released:
                seen.let_go_for = None
                continue
            if seen.let_go_for is None:
                seen.let_go_for = 0.0
                continue
            # Of a longer gap nobody knows who slept in it.
            seen.let_go_for += min(seen.gap, session.heartbeat_interval)
            # A look comes a little early or late.
            if seen.let_go_for >= 1.9 * session.heartbeat_interval:
                verdicts.append(Verdict(session, seen.silence, let_go=True))
        return verdicts

    @property
    def expects_death(self) -> bool:
        """Whether a lock is free, and a look is due with the next beat."""
        return any(seen.let_go_for is not None for seen in self._seen.values())
