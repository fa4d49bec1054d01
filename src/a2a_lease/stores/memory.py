"""Leases in memory: one process, tests, and tasks that need not survive it."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from a2a_lease.errors import LeaseConflictError, SessionEndedError
from a2a_lease.model import (
    ClaimedLease,
    LeaseState,
    LivenessLock,
    Look,
    Renewal,
    Session,
    SessionState,
    StoredTurn,
    TaskLease,
)
from a2a_lease.stores.lease_store import LeaseStore


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from a2a_lease.model import LeaseRequest


_RING = 3
_LETTING_GO = (LeaseState.FREE, LeaseState.IDLE)


class InMemoryLeaseStore(LeaseStore):
    """Keeps sessions and leases in this process.

    Several handlers of one process may share it. Nothing survives the
    process, so nothing is recovered after its death.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._notices: dict[str, int] = {}
        self._done: set[str] = set()
        self._leases: dict[tuple[str, str], TaskLease] = {}
        self._turns: dict[tuple[str, str], StoredTurn] = {}
        self._claims: dict[tuple[str, str], ClaimedLease] = {}
        """How each lease was claimed last."""

    async def initialize(self) -> None:
        """Does nothing."""

    def detached(self) -> LeaseStore:
        """Returns this store; any thread may use it."""
        return self

    async def close(self) -> None:
        """Does nothing."""

    async def open_session(
        self,
        *,
        session_id: str,
        service: str,
        ttl: float,
        heartbeat_interval: float,
        label: str,
    ) -> None:
        """Records a new session as open."""
        with self._lock:
            self._open(session_id, service, ttl, heartbeat_interval, label)

    def _open(
        self,
        session_id: str,
        service: str,
        ttl: float,
        heartbeat_interval: float,
        label: str,
    ) -> None:
        now = datetime.now(UTC)
        self._sessions.setdefault(
            session_id,
            Session(
                id=session_id,
                service=service,
                state=SessionState.OPEN,
                beat=0,
                ttl=ttl,
                heartbeat_interval=heartbeat_interval,
                lock=None,
                label=label,
                started_at=now,
                renewed_at=now,
                expires_at=now + timedelta(seconds=ttl),
            ),
        )
        self._notices.setdefault(session_id, 0)

    async def renew(
        self, session_id: str, *, lock: LivenessLock | None = None
    ) -> Renewal | None:
        """Beats."""
        now = datetime.now(UTC)
        with self._lock:
            if not self._is_open(session_id):
                return None
            session = self._sessions[session_id]
            session = dataclasses.replace(
                session,
                beat=session.beat + 1,
                lock=lock,
                renewed_at=now,
                expires_at=now + timedelta(seconds=session.ttl),
            )
            self._sessions[session_id] = session
            return Renewal(beat=session.beat, notices=self._notices[session_id])

    async def close_session(self, session_id: str) -> bool:
        """Ends a session in order."""
        with self._lock:
            return self._end(session_id, SessionState.CLOSED)

    async def fence(self, session_id: str, *, beat: int) -> bool:
        """Declares a session dead if its counter still stands at `beat`."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.beat != beat:
                return False
            return self._end(session_id, SessionState.FENCED)

    def _end(self, session_id: str, state: SessionState) -> bool:
        if not self._is_open(session_id):
            return False
        self._sessions[session_id] = dataclasses.replace(
            self._sessions[session_id],
            state=state,
            ended_at=datetime.now(UTC),
        )
        return True

    def _is_open(self, session_id: str | None) -> bool:
        session = self._sessions.get(session_id or '')
        return session is not None and session.state is SessionState.OPEN

    async def look(
        self,
        service: str,
        session_id: str,
        *,
        everyone: bool,
        also: Collection[str] = (),
    ) -> Look:
        """Reads what the heartbeat needs to judge others."""
        with self._lock:
            mine = sorted(
                (s for s in self._sessions.values() if s.service == service),
                key=lambda session: session.id,
            )
            ended = tuple(
                s
                for s in mine
                if s.state is not SessionState.OPEN and s.id not in self._done
            )
        others = [
            s
            for s in mine
            if s.state is SessionState.OPEN and s.id != session_id
        ]
        if not everyone:
            ring = [s for s in others if s.id > session_id] + [
                s for s in others if s.id < session_id
            ]
            near = {s.id for s in ring[:_RING]} | set(also)
            others = [s for s in others if s.id in near]
        return Look(open=tuple(others), ended=ended)

    async def forget_session(self, session_id: str) -> bool:
        """Marks an ended session as done if it holds no lease any more."""
        with self._lock:
            if any(
                lease.session_id == session_id
                for lease in self._leases.values()
            ):
                return False
            if not self._is_open(session_id):
                self._done.add(session_id)
            return True

    async def prune_sessions(self, service: str, *, older_than: float) -> int:
        """Deletes sessions that are done and ended long ago."""
        before = datetime.now(UTC) - timedelta(seconds=older_than)
        with self._lock:
            old = [
                s.id
                for s in self._sessions.values()
                if s.service == service
                and s.id in self._done
                and s.ended_at is not None
                and s.ended_at <= before
            ]
            for session_id in old:
                del self._sessions[session_id]
                self._done.discard(session_id)
                self._notices.pop(session_id, None)
            return len(old)

    async def get(self, service: str, task_id: str) -> TaskLease | None:
        """Returns the lease on a task."""
        with self._lock:
            return self._leases.get((service, task_id))

    async def holder(
        self, service: str, task_id: str
    ) -> tuple[TaskLease | None, bool]:
        """Returns the lease on a task and whether it may be acquired."""
        with self._lock:
            lease = self._leases.get((service, task_id))
            return lease, self._may_be_acquired(lease)

    def _may_be_acquired(self, lease: TaskLease | None) -> bool:
        return (
            lease is None
            or lease.state in (LeaseState.FREE, LeaseState.IDLE)
            or not self._is_open(lease.session_id)
        )

    async def acquire(self, request: LeaseRequest) -> TaskLease:
        """Takes the lease on a task, running, with the next token."""
        key = (request.service, request.task_id)
        with self._lock:
            lease = self._leases.get(key)
            if (
                lease is not None
                and lease.acquire_id == request.acquire_id
                and lease.session_id == request.session_id
            ):
                return lease
            if not self._is_open(request.session_id):
                raise SessionEndedError(request.session_id)
            token = lease.token if lease is not None else None
            if token != request.expected_token or not self._may_be_acquired(
                lease
            ):
                raise LeaseConflictError(request.task_id)
            taken = TaskLease(
                service=request.service,
                task_id=request.task_id,
                context_id=request.context_id,
                owner=request.owner,
                session_id=request.session_id,
                acquire_id=request.acquire_id,
                token=(token or 0) + 1,
                attempt=1,
                state=LeaseState.RUNNING,
                before=request.before,
                task_stored=request.before is not None,
                cancel_requested=False,
                call_context=request.call_context,
                acquired_at=datetime.now(UTC),
            )
            self._leases[key] = taken
            self._turns[key] = StoredTurn(turn=request.turn, checkpoint=None)
            return taken

    def _held_with(
        self, service: str, task_id: str, token: int
    ) -> TaskLease | None:
        lease = self._leases.get((service, task_id))
        return lease if lease is not None and lease.token == token else None

    async def move(
        self, service: str, task_id: str, *, token: int, state: LeaseState
    ) -> bool:
        """Changes the state of a lease."""
        with self._lock:
            lease = self._held_with(service, task_id, token)
            if lease is None:
                return False
            if lease.session_id is None and state is not LeaseState.FREE:
                return False
            if lease.cancel_requested and state in _LETTING_GO:
                return False
            if state is LeaseState.FREE:
                self._turns.pop((service, task_id), None)
            self._leases[service, task_id] = dataclasses.replace(
                lease,
                state=state,
                session_id=(
                    None if state is LeaseState.FREE else lease.session_id
                ),
            )
            return True

    async def release(self, service: str, task_id: str, *, token: int) -> bool:
        """Deletes a lease."""
        with self._lock:
            if self._held_with(service, task_id, token) is None:
                return False
            del self._leases[service, task_id]
            self._turns.pop((service, task_id), None)
            return True

    async def stored_turn(
        self, service: str, task_id: str, *, token: int
    ) -> StoredTurn | None:
        """Returns what a lease keeps for another attempt."""
        with self._lock:
            if self._held_with(service, task_id, token) is None:
                return None
            return self._turns.get(
                (service, task_id), StoredTurn(turn=None, checkpoint=None)
            )

    async def save_checkpoint(
        self, service: str, task_id: str, *, token: int, checkpoint: bytes
    ) -> bool:
        """Replaces the checkpoint of a lease."""
        with self._lock:
            lease = self._held_with(service, task_id, token)
            if lease is None or lease.session_id is None:
                return False
            self._turns[service, task_id] = dataclasses.replace(
                self._turns[service, task_id], checkpoint=checkpoint
            )
            return True

    async def note_stored(
        self, service: str, tokens: Mapping[str, int]
    ) -> None:
        """Notes of many leases at once that their tasks were stored."""
        with self._lock:
            for task_id, token in tokens.items():
                lease = self._held_with(service, task_id, token)
                if lease is not None:
                    self._leases[service, task_id] = dataclasses.replace(
                        lease, task_stored=True
                    )

    async def request_cancel(self, service: str, task_id: str) -> bool:
        """Tells the holder of a lease that its task was canceled."""
        with self._lock:
            lease = self._leases.get((service, task_id))
            if (
                lease is None
                or lease.session_id is None
                or lease.state is LeaseState.IDLE
            ):
                return False
            self._leases[service, task_id] = dataclasses.replace(
                lease, cancel_requested=True
            )
            if lease.session_id in self._notices:
                self._notices[lease.session_id] += 1
            return True

    async def cancel_requests(
        self, service: str, session_id: str
    ) -> Sequence[TaskLease]:
        """Returns the leases of a session whose tasks were canceled."""
        with self._lock:
            return [
                lease
                for lease in self._leases.values()
                if lease.service == service
                and lease.session_id == session_id
                and lease.cancel_requested
            ]

    async def claim(
        self,
        service: str,
        *,
        session_id: str,
        limit: int,
        ended: Collection[str] | None,
    ) -> Sequence[ClaimedLease]:
        """Takes over leases of sessions that have ended."""
        claimed: list[ClaimedLease] = []
        with self._lock:
            if not self._is_open(session_id):
                raise SessionEndedError(session_id)
            for key, lease in sorted(self._leases.items()):
                previous = lease.session_id
                if (
                    lease.service != service
                    or previous is None
                    or self._is_open(previous)
                    or (ended is not None and previous not in ended)
                ):
                    continue
                if (
                    lease.state is LeaseState.PARKED
                    and not lease.cancel_requested
                ):
                    self._leases[key] = dataclasses.replace(
                        lease, state=LeaseState.FREE, session_id=None
                    )
                    self._turns.pop(key, None)
                elif len(claimed) < limit:
                    session = self._sessions.get(previous)
                    closed = (
                        session is not None
                        and session.state is SessionState.CLOSED
                    )
                    crashed = lease.state is LeaseState.RUNNING and not closed
                    taken = dataclasses.replace(
                        lease,
                        session_id=session_id,
                        token=lease.token + 1,
                        attempt=lease.attempt + crashed,
                        state=LeaseState.RECOVERING,
                    )
                    claim = ClaimedLease(
                        lease=taken,
                        previous_session_id=previous,
                        previous_state=lease.state,
                        previous_closed=closed,
                        previous_session=session,
                        given_back=closed,
                    )
                    before = self._claims.get(key)
                    if (
                        before is not None
                        and before.lease.token == lease.token
                        and lease.state is LeaseState.RECOVERING
                    ):
                        # It was claimed, and that recovery died.
                        claim = self._as_it_is(before, taken, given_back=closed)
                    self._leases[key] = taken
                    self._claims[key] = claim
                    claimed.append(claim)
        return claimed

    def _as_it_is(
        self,
        claim: ClaimedLease,
        lease: TaskLease,
        *,
        given_back: bool = False,
    ) -> ClaimedLease:
        return dataclasses.replace(
            claim,
            lease=lease,
            given_back=given_back,
            previous_session=self._sessions.get(claim.previous_session_id),
        )

    async def claimed_by(
        self, service: str, session_id: str
    ) -> Sequence[ClaimedLease]:
        """Returns what a session has claimed and still recovers."""
        with self._lock:
            return [
                self._as_it_is(self._claims[key], lease)
                for key, lease in sorted(self._leases.items())
                if lease.service == service
                and lease.session_id == session_id
                and lease.state is LeaseState.RECOVERING
                and key in self._claims
            ]

    async def reclaim(
        self, service: str, task_id: str, *, token: int, session_id: str
    ) -> TaskLease | None:
        """Takes over a lease of one's own, whose turn died here."""
        with self._lock:
            key = service, task_id
            lease = self._leases.get(key)
            if lease is None or lease.session_id != session_id:
                return None
            if (
                lease.token == token + 1
                and lease.state is LeaseState.RECOVERING
            ):
                return lease
            if lease.token != token:
                return None
            taken = dataclasses.replace(
                lease,
                token=token + 1,
                attempt=lease.attempt + 1,
                state=LeaseState.RECOVERING,
            )
            self._leases[key] = taken
            self._claims[key] = ClaimedLease(
                lease=taken,
                previous_session_id=session_id,
                previous_state=lease.state,
                previous_closed=False,
                previous_session=self._sessions.get(session_id),
            )
            return taken

    async def hand_over(
        self, service: str, tokens: Mapping[str, int], *, session_id: str
    ) -> None:
        """Leaves leases to others while their session lives on."""
        with self._lock:
            self._open(
                session_id,
                service,
                ttl=0.0,
                heartbeat_interval=0.0,
                label='hand-over',
            )
            for task_id, token in tokens.items():
                lease = self._held_with(service, task_id, token)
                if lease is not None and lease.session_id is not None:
                    self._leases[service, task_id] = dataclasses.replace(
                        lease, session_id=session_id
                    )
            self._end(session_id, SessionState.CLOSED)

    async def sessions(self, service: str | None = None) -> Sequence[Session]:
        """Returns all sessions on record, by start."""
        with self._lock:
            return sorted(
                (
                    s
                    for s in self._sessions.values()
                    if service is None or s.service == service
                ),
                key=lambda session: session.started_at,
            )

    async def leases(
        self, service: str | None = None, *, limit: int = 1000
    ) -> Sequence[TaskLease]:
        """Returns leases, by task id, free ones included."""
        with self._lock:
            return [
                lease
                for _, lease in sorted(self._leases.items())
                if service is None or lease.service == service
            ][:limit]
