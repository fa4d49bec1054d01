"""What an agent can know of its own lease."""

from __future__ import annotations

import contextvars
import json
from typing import TYPE_CHECKING, Any

from a2a_lease.errors import LeaseError


if TYPE_CHECKING:
    import asyncio

    from a2a.types.a2a_pb2 import Task

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
    def checkpoint(self) -> Any:  # noqa: ANN401
        """What the last attempt saved, or this one since; None for nothing."""
        kept = self._turn.checkpoint
        return None if kept is None else json.loads(kept)

    async def save_checkpoint(self, value: Any) -> None:  # noqa: ANN401
        """Stores how far the agent has come, for another attempt.

        A turn that crashes and runs again finds it in `checkpoint`, as the
        details of a heartbeat in Temporal. Save it after the events that it
        stands for: they are durable before it is. A crash in between leaves
        such an event without its checkpoint; `stored_task` tells.

        Args:
            value: Anything that JSON can hold, up to the setting
                `checkpoint_limit`.

        Raises:
            LeaseLostError: The lease is lost; stop working.
            TypeError: JSON cannot hold the value.
            ValueError: It is too large, or holds a number that JSON has not.
        """
        data = json.dumps(
            value, separators=(',', ':'), allow_nan=False
        ).encode()
        limit = self._turn.checkpoint_limit
        if len(data) > limit:
            raise ValueError(
                f'The checkpoint has {len(data)} bytes as JSON; at most '
                f'{limit} are stored. Keep large things elsewhere, and save '
                f'where; or raise LeaseSettings(checkpoint_limit=...).'
            )
        await self._turn.save_checkpoint(data)

    @property
    def stored_task(self) -> Task | None:
        """The task as the attempts before have left it; None on the first.

        `RequestContext.current_task` reads as it did the first time.
        """
        return self._turn.stored_task

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
