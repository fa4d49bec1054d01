"""The interface between the parts and the place where leases live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from a2a_lease.model import (
        ClaimedLease,
        LeaseRequest,
        LeaseState,
        LivenessLock,
        Look,
        Renewal,
        Session,
        StoredTurn,
        TaskLease,
    )


class LeaseStore(ABC):
    """Keeps sessions and leases for all replicas of a service.

    Every method is one short transaction. A write names the token or the
    session that it relies on and changes nothing when that no longer holds:
    it returns False or raises, as said below, and never waits for another
    replica's work.

    An error of the database or of the connection passes through as it is;
    it means that the outcome is *unknown*, and every method may be called
    again with the same arguments.

    `a2a_lease.testing.LeaseStoreConformance` is a test suite for implementers.
    """

    @abstractmethod
    async def initialize(self) -> None:
        """Makes ready what the store needs, such as its tables."""

    @abstractmethod
    def detached(self) -> LeaseStore:
        """Returns a store over the same leases for another thread.

        The heartbeat runs on a thread and an event loop of its own. The store
        that it gets here shares no connection, lock or pool with this one. It
        is made again whenever a call on it was given up, and then the one
        before is left to `close`, without being waited for.
        """

    @abstractmethod
    async def close(self) -> None:
        """Frees what this store opened itself.

        An engine that the user handed over stays open.
        """

    # Sessions

    @abstractmethod
    async def open_session(
        self,
        *,
        session_id: str,
        service: str,
        ttl: float,
        heartbeat_interval: float,
        label: str,
    ) -> None:
        """Records a new session as open.

        Opening a session that is already there does nothing.

        Args:
            session_id: Random, never used before.
            service: The agent that the replica serves.
            ttl: Seconds of silence after which it may be fenced.
            heartbeat_interval: Seconds between its beats.
            label: Host name and process id, for people.
        """

    @abstractmethod
    async def renew(
        self, session_id: str, *, lock: LivenessLock | None = None
    ) -> Renewal | None:
        """Beats: raises the session's counter with one small write.

        Args:
            session_id: Whose.
            lock: What `take_liveness_lock` returned, for `Session.lock`. Must
                raise if that is not held any more.

        Returns:
            The counters, or None if the session is not open any more. It is
            never created again here.
        """

    @abstractmethod
    async def close_session(self, session_id: str) -> bool:
        """Ends a session in order, so that others take over what it left.

        Returns:
            Whether it was open.
        """

    @abstractmethod
    async def fence(self, session_id: str, *, beat: int) -> bool:
        """Declares a session dead if its counter still stands at `beat`.

        Never queues behind a lock: if the row or its table is locked, that
        counts as "not fenced".

        Returns:
            Whether it is fenced now, by this call.
        """

    @abstractmethod
    async def look(
        self,
        service: str,
        session_id: str,
        *,
        everyone: bool,
        also: Collection[str] = (),
    ) -> Look:
        """Reads what the heartbeat needs to judge others.

        Args:
            service: Only sessions of this service are seen.
            session_id: The looker; left out of the answer.
            everyone: All open sessions. Otherwise the next three on the ring
                of session ids, which starts again after the last.
            also: Ids of sessions to look at besides, if they are open.
        """

    @abstractmethod
    async def forget_session(self, session_id: str) -> bool:
        """Marks an ended session as done if it holds no lease any more.

        It is no longer part of `Look.ended` then.

        Returns:
            Whether it holds none.
        """

    @abstractmethod
    async def prune_sessions(self, service: str, *, older_than: float) -> int:
        """Deletes sessions that are done and ended long ago.

        Args:
            service: Only its sessions.
            older_than: Seconds since the session ended.

        Returns:
            How many were deleted.
        """

    # The death of a process, where it shows sooner than by silence

    async def take_liveness_lock(
        self, session_id: str, *, number: int
    ) -> LivenessLock | None:
        """Takes a lock that goes when this process dies, and beats with it.

        The default has none, and death shows by silence alone.

        Args:
            session_id: Whose.
            number: One more than at the last call for this session.

        Returns:
            The lock, or None where none can be had.
        """
        del session_id, number
        return None

    async def released_locks(self, sessions: Sequence[Session]) -> set[str]:
        """Returns the ids of sessions whose lock nobody holds any more.

        Looks without taking them, through the connection that holds the own
        lock. Where that is not known, a session is not among them.

        Args:
            sessions: Each has a lock, of the server of the own one.
        """
        del sessions
        return set()

    # Leases

    @abstractmethod
    async def get(self, service: str, task_id: str) -> TaskLease | None:
        """Returns the lease on a task."""

    @abstractmethod
    async def holder(
        self, service: str, task_id: str
    ) -> tuple[TaskLease | None, bool]:
        """Returns the lease on a task and whether it may be acquired.

        It may be if there is none, if it is free or idle, or if its session
        is closed, fenced or missing.
        """

    @abstractmethod
    async def acquire(self, request: LeaseRequest) -> TaskLease:
        """Takes the lease on a task, running, with the next token.

        A repeated call with the same `acquire_id` returns what the first one
        took. The attempt is 1, there is no cancel request and no checkpoint,
        and `task_stored` is whether `before` is given.

        Raises:
            LeaseConflictError: The row is not the one that `expected_token`
                names, or it may not be acquired (see `holder`).
            SessionEndedError: The session that asks is not open.
        """

    @abstractmethod
    async def move(
        self, service: str, task_id: str, *, token: int, state: LeaseState
    ) -> bool:
        """Changes the state of a lease.

        Moving it to `FREE` takes it from its session, and drops what it kept
        for another attempt. Out of `FREE` it comes by `acquire` only: whoever
        held it may have lost it meanwhile. To `FREE` and `IDLE` it goes only
        if no cancel was requested, which its holder must still tell of.

        Returns:
            Whether the token was the current one, the lease is held, and no
            cancel stands against it.
        """

    @abstractmethod
    async def release(self, service: str, task_id: str, *, token: int) -> bool:
        """Deletes a lease.

        Returns:
            Whether the token was the current one.
        """

    @abstractmethod
    async def stored_turn(
        self, service: str, task_id: str, *, token: int
    ) -> StoredTurn | None:
        """Returns what a lease keeps for another attempt.

        Returns:
            It, or None if the token is not the current one.
        """

    @abstractmethod
    async def save_checkpoint(
        self, service: str, task_id: str, *, token: int, checkpoint: bytes
    ) -> bool:
        """Replaces the checkpoint of a lease. Claims keep it.

        Returns:
            Whether the token was the current one, and the lease is held.
        """

    @abstractmethod
    async def note_stored(
        self, service: str, tokens: Mapping[str, int]
    ) -> None:
        """Notes of many leases at once that their tasks were stored.

        Args:
            service: The service of the leases.
            tokens: Task id to token; those that differ are passed over.
        """

    @abstractmethod
    async def request_cancel(self, service: str, task_id: str) -> bool:
        """Tells the holder of a lease that its task was canceled.

        Sets `cancel_requested` and raises the `notices` of its session. An
        idle lease has nobody who works on it, and is left alone.

        Returns:
            Whether a session holds the lease and is at work on it.
        """

    @abstractmethod
    async def cancel_requests(
        self, service: str, session_id: str
    ) -> Sequence[TaskLease]:
        """Returns the leases of a session whose tasks were canceled."""

    @abstractmethod
    async def claim(
        self,
        service: str,
        *,
        session_id: str,
        limit: int,
        ended: Collection[str] | None,
    ) -> Sequence[ClaimedLease]:
        """Takes over leases of sessions that have ended.

        Running, idle and recovering leases get the claimer's session, the
        next token and the state `RECOVERING`. Only a running lease of a
        fenced or missing session counts an attempt: a closed session handed
        it over, an idle turn had ended, and a recovery that died is no crash
        of the turn. Parked leases of those sessions become free; one with a
        cancel request is claimed too, so that somebody tells of the cancel.

        Each lease is claimed by one caller only.

        Args:
            service: Only its leases.
            session_id: The claimer's.
            limit: How many at most.
            ended: Ids of ended sessions, or None for all leases whose session
                is closed, fenced or missing, which may scan the table.

        Raises:
            SessionEndedError: The claimer's session is not open.
        """

    @abstractmethod
    async def claimed_by(
        self, service: str, session_id: str
    ) -> Sequence[ClaimedLease]:
        """Returns what a session has claimed and is still `RECOVERING`.

        The answer to a claim may be lost after it has landed; this tells what
        it was. Leases that were reclaimed are among them.
        """

    @abstractmethod
    async def reclaim(
        self, service: str, task_id: str, *, token: int, session_id: str
    ) -> TaskLease | None:
        """Takes over a lease of one's own, whose turn died here.

        It gets the next token, the state `RECOVERING`, and counts an attempt.
        The same call again, whose answer may have been lost, changes nothing.

        Returns:
            The lease, or None if the token is not the current one.
        """

    @abstractmethod
    async def hand_over(
        self, service: str, tokens: Mapping[str, int], *, session_id: str
    ) -> None:
        """Leaves leases to others while their session lives on.

        They are put under a new session that is closed already, all or none,
        and the same call again is harmless. A free lease stays nobody's.

        Args:
            service: The service of the leases.
            tokens: Task id to token; those that differ are passed over.
            session_id: A random id for the closed session.
        """

    # For people

    @abstractmethod
    async def sessions(self, service: str | None = None) -> Sequence[Session]:
        """Returns all sessions on record, by start."""

    @abstractmethod
    async def leases(
        self, service: str | None = None, *, limit: int = 1000
    ) -> Sequence[TaskLease]:
        """Returns leases, by task id, free ones included."""
