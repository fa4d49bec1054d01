"""The event queue as the agent sees it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from a2a.server.events import EventQueue

from a2a_lease.turns.hold import Loss


if TYPE_CHECKING:
    from a2a.server.events.event_queue import Event

    from a2a_lease.turns.turn import Turn


logger = logging.getLogger(__name__)


class TurnQueue(EventQueue):
    """Passes the agent's events on as long as its turn holds the lease."""

    def __init__(self, inner: EventQueue, turn: Turn) -> None:
        self._inner = inner
        self._turn = turn

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self._inner, name)

    async def enqueue_event(self, event: Event) -> None:
        """Enqueues an event, or drops it if nobody can save it any more."""
        turn = self._turn
        if turn.loss is not None:
            logger.debug('Task %s: dropped an event.', turn.lease.task_id)
            return
        if self.closed():
            # The SDK would drop it without a word: its consumer has ended
            # while the agent goes on.
            if not turn.settled_for_good:
                turn.lose(Loss.DIED)
            return
        turn.enqueued(event)
        await self._inner.enqueue_event(event)

    def closed(self) -> bool:
        """Whether the SDK has stopped to process what is in the queue."""
        is_closed = getattr(self._inner, 'is_closed', None)
        return bool(is_closed()) if is_closed is not None else False


class ClosedQueue(EventQueue):
    """For an agent that may clean up, but has no task to write to."""

    async def enqueue_event(self, event: Event) -> None:
        """Drops the event."""
        logger.debug('Dropped %s after a cancel.', type(event).__name__)
