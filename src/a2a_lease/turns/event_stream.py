"""The event stream between replicas: what goes in, and what comes out."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from a2a.server.cluster import TaskEventStream
from a2a.types.a2a_pb2 import Task

from a2a_lease.outage import is_outage, pauses
from a2a_lease.turns.marks import INTERRUPTED
from a2a_lease.turns.stopping import letting_go


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from a2a.server.cluster import TaskVersion, VersionedEvent

    from a2a_lease.turns.running import Turns


logger = logging.getLogger(__name__)


class LeasedEventStream(TaskEventStream):
    """Wraps the user's stream.

    Subscriptions outlast outages of the database. The SDK publishes an event
    when it is done with it, which is how a turn learns that its events were
    saved and pushed.
    """

    def __init__(self, inner: TaskEventStream, turns: Turns) -> None:
        self.inner = inner
        self._turns = turns

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self.inner, name)

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        """Publishes an event; a failure does not fail the task."""
        try:
            with self._turns.at_work(task_id):
                await self.inner.publish(task_id, event)
        except Exception:
            logger.exception(
                'Could not publish an event of task %s to other replicas; '
                'their subscribers miss it. The task itself is saved.',
                task_id,
                extra={'task_id': task_id},
            )
        self._turns.processed(task_id, event)

    async def subscribe(  # type: ignore[override]
        self, task_id: str, *, after: TaskVersion
    ) -> AsyncGenerator[VersionedEvent, None]:
        """Yields events newer than `after`, however often it must reconnect.

        The flush of a user's message to a paused task carries the old, paused
        state; it is left out, since a subscriber would take it for the end.
        """
        known = not after.is_missing
        tries = pauses()
        while True:
            try:
                async with aclosing(
                    self.inner.subscribe(task_id, after=after)
                ) as events:
                    while True:
                        with letting_go():
                            event = await anext(events)
                        tries = pauses()
                        after = event.version
                        if known and _is_flush(event):
                            continue
                        known = True
                        yield event
            except StopAsyncIteration:
                return
            except Exception as error:
                if not is_outage(error):
                    raise
                logger.debug(
                    'The subscription to task %s waits for the database.',
                    task_id,
                    exc_info=True,
                )
            await asyncio.sleep(next(tries))

    async def destroy(self, task_id: str) -> None:
        """Releases what the wrapped stream keeps for a task."""
        await self.inner.destroy(task_id)


def _is_flush(event: VersionedEvent) -> bool:
    return (
        isinstance(event.event, Task)
        and event.event.status.state in INTERRUPTED
    )
