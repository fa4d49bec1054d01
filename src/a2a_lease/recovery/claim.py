"""A lease that this replica took over, until its outcome is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2a_lease.model import LeaseState, SessionState
from a2a_lease.recovery.outcome import Cause
from a2a_lease.turns.hold import Hold


if TYPE_CHECKING:
    import asyncio

    from a2a.types.a2a_pb2 import TaskStatusUpdateEvent

    from a2a_lease.model import ClaimedLease, TaskLease
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.stores.lease_store import LeaseStore


class Claim(Hold):
    """The right to decide about an abandoned task."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        lease: TaskLease,
        session: LiveSession,
        cause: Cause,
        was_idle: bool = False,
        silence: float = 0.0,
        from_session: str,
        ended: asyncio.Event | None = None,
    ) -> None:
        super().__init__(store)
        self.ended = ended
        """Set when the turn has ended that was here, on this replica."""
        self.waited = False
        """Whether the turn need not wait any more before it runs again."""
        self.told: TaskStatusUpdateEvent | None = None
        """The event that says so, once it is saved."""
        self.hold(lease, session)
        self.cause = cause
        self.was_idle = was_idle
        """Whether the turn had ended, without settling, in good order."""
        self.silence = silence
        """Seconds for which the replica was not heard of."""
        self.from_session = from_session

    @property
    def attempts(self) -> int:
        """How often the turn has run."""
        if self.cause is Cause.REPLICA_CLOSED:
            return self.lease.attempt
        # The lease counts the next one already.
        return max(1, self.lease.attempt - 1)

    def canceled(self) -> None:
        """Goes on: what a cancel has saved makes the next save a conflict.

        The task is judged again then, and whoever waits for it is told.
        """

    def failed_to_begin(self, lease: TaskLease) -> None:
        """Goes on with the next attempt: the last one came to nothing."""
        self.hold(lease, self.session)
        self.cause = Cause.TURN_DIED
        self.from_session = self.session.id
        self.silence = 0.0
        self.waited = False
        self.told = None

    @classmethod
    def of_ended(
        cls,
        store: LeaseStore,
        claimed: ClaimedLease,
        *,
        session: LiveSession,
    ) -> Claim:
        """Makes the claim on what another session left."""
        ended = claimed.previous_session
        closed = claimed.previous_closed
        fenced = ended is not None and ended.state is SessionState.FENCED
        if claimed.previous_session_id == session.id:
            cause = Cause.TURN_DIED
        else:
            cause = Cause.REPLICA_CLOSED if closed else Cause.REPLICA_LOST
        claim = cls(
            store,
            lease=claimed.lease,
            session=session,
            cause=cause,
            was_idle=closed and claimed.previous_state is LeaseState.IDLE,
            silence=ended.silence if ended is not None and fenced else 0.0,
            from_session=claimed.previous_session_id,
        )
        claim.waited = claimed.given_back
        return claim
