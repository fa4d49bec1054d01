"""The values that pass between the parts: sessions, leases, their states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datetime import datetime


class SessionState(StrEnum):
    """A session is open once; closed and fenced are for good."""

    OPEN = 'open'
    CLOSED = 'closed'
    FENCED = 'fenced'


class LeaseState(StrEnum):
    """What the holder of a lease is doing with it."""

    RUNNING = 'running'
    """execute() is under way and the turn has not settled."""
    PARKED = 'parked'
    """The turn settled into an interrupted state and execute() goes on."""
    IDLE = 'idle'
    """execute() ended without settling, on a replica that lives."""
    RECOVERING = 'recovering'
    """Claimed; the outcome is not durable yet."""
    FREE = 'free'
    """Nobody's. The row stays only to keep the token of a paused task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMark:
    """What tells one status of a task from another.

    Two marks that differ mean that an event moved the task in between, even
    if it paused twice in the same state.
    """

    state: str
    """Name of the A2A task state, such as `TASK_STATE_INPUT_REQUIRED`."""
    timestamp: str
    """The status timestamp in nanoseconds since the epoch, or '' for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """What a replica brings to acquire a lease."""

    service: str
    task_id: str
    context_id: str
    owner: str
    session_id: str
    acquire_id: str
    """Random, made for this one acquisition: an acquire whose answer was lost
    recognises itself by it."""
    expected_token: int | None
    """The token of the row that was looked at before, or None where there was
    none. Whoever acquires in between makes this acquire fail."""
    before: TaskMark | None
    """The stored task when the turn begins, or None if there is none yet."""
    call_context: bytes
    """The owner's call context as the context codec wrote it."""
    turn: bytes | None = None
    """What is needed to run the turn again; None if it never is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTurn:
    """What a lease keeps for another attempt. It may be large."""

    turn: bytes | None
    """As it was acquired with."""
    checkpoint: bytes | None
    """What the last attempt saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLease:
    """The right to run one turn of one task."""

    service: str
    task_id: str
    context_id: str
    owner: str
    session_id: str | None
    """The session that holds it; None when it is free."""
    acquire_id: str
    token: int
    """The fencing number: rises with each acquisition and each claim."""
    attempt: int
    """1 for the first run of a turn; one more for each crash since."""
    state: LeaseState
    before: TaskMark | None
    """The stored task when the turn began, or None if there was none."""
    task_stored: bool
    """Whether the task is known to have been stored at some time."""
    cancel_requested: bool
    """Whether the task was canceled through another replica."""
    call_context: bytes
    acquired_at: datetime
    """By the database's clock, for people; nothing is decided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessLock:
    """What the operating system frees when the process of a session dies."""

    server: str
    """Who keeps it, in which life: it means nothing elsewhere."""
    number: int
    """Rises with each connection that holds it: a server may keep what is
    left of the last one, lock and all."""
    of_connection: bool = field(default=True, compare=False)
    """Whether it goes when its connection does, though the process lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One life of a replica."""

    id: str
    service: str
    state: SessionState
    beat: int
    """Rises with each renewal."""
    ttl: float
    """Seconds of silence after which others may fence it."""
    heartbeat_interval: float
    """Seconds between its beats."""
    lock: LivenessLock | None
    """What it held when it beat last, if anything."""
    label: str
    """Who this is, for people: host name and process id."""
    started_at: datetime
    renewed_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    """The times are the database's, for people; nothing is decided by them."""

    @property
    def silence(self) -> float:
        """Seconds from the last beat to the end, as the database saw it."""
        if self.ended_at is None:
            return 0.0
        return max(0.0, (self.ended_at - self.renewed_at).total_seconds())


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """The answer to a beat that landed."""

    beat: int
    notices: int
    """Rises each time a lease of the session is given a cancel request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one replica sees of the others."""

    open: tuple[Session, ...]
    """The open sessions that were asked for, the looker's own excepted."""
    ended: tuple[Session, ...]
    """Closed and fenced sessions that may still hold leases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedLease:
    """A lease taken over, and whom it was taken from."""

    lease: TaskLease
    """As it is now: the claimer's session and a new token."""
    previous_session_id: str
    """Whose turn it was; a recovery that died in between changes nothing."""
    previous_state: LeaseState
    """What the lease was doing when that session ended."""
    previous_closed: bool
    """Whether that session ended in good order."""
    previous_session: Session | None
    """How that session ended; None if its row is missing."""
    given_back: bool = False
    """Whether who had it last let go of it in good order.

    Only the answer to the claim itself tells.
    """
