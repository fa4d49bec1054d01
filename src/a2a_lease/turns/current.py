"""What an agent can know of its own lease."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

from a2a_lease.errors import LeaseError


if TYPE_CHECKING:
    import asyncio

    from a2a_lease.turns.turn import Turn


_current: contextvars.ContextVar[CurrentLease | None] = contextvars.ContextVar(
    'a2a_lease_current', default=None
)


class CurrentLease:
    """The lease under which the agent runs."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    @property
    def task_id(self) -> str:
        """The task that the lease is on."""
        return self._turn.lease.task_id

    @property
    def token(self) -> int:
        """The fencing number of this turn.

        Hand it to systems that the agent changes: for one task it never falls
        or repeats, so they can refuse a smaller one.
        """
        return self._turn.lease.token

    @property
    def attempt(self) -> int:
        """1, and one more for each time the turn crashed before."""
        return self._turn.lease.attempt

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease is lost; side effects should stop then."""
        return self._turn.lost


def current_lease() -> CurrentLease:
    """Returns the lease of the turn that runs here.

    Raises:
        LeaseError: No turn runs here. Call it within
            `AgentExecutor.execute()` of a `LeasedRequestHandler`.
    """
    lease = _current.get()
    if lease is None:
        raise LeaseError(
            'No lease is held here. Call current_lease() within '
            'AgentExecutor.execute(), on a LeasedRequestHandler.'
        )
    return lease


def set_current_lease(turn: Turn) -> None:
    """Makes the turn's lease the current one of this asyncio task."""
    _current.set(CurrentLease(turn))
