"""Push notifications, and whether a task's outcome was among them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from a2a.server.tasks import PushNotificationSender
from a2a.types.a2a_pb2 import Task, TaskStatusUpdateEvent

from a2a_lease.turns.marks import TERMINAL
from a2a_lease.turns.stopping import letting_go


if TYPE_CHECKING:
    from a2a.server.tasks import PushNotificationEvent


logger = logging.getLogger(__name__)

_REMEMBERED = 4096
_LONGEST = 60.0
"""Seconds that one push of ours may take, whatever the sender's own limit."""


class LeasedPushSender(PushNotificationSender):
    """Wraps the user's sender, and sends what the SDK does not.

    The SDK pushes what comes out of the agent's queue. FAILED after an
    exception, a cancel from elsewhere and a recovery are saved without it.
    """

    def __init__(self, inner: PushNotificationSender | None) -> None:
        self._inner = inner
        self._outcomes: OrderedDict[str, None] = OrderedDict()
        self._sending: Counter[str] = Counter()
        self._order: dict[str, asyncio.Lock] = {}
        """What is pushed of one task arrives in the order of the calls."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self._inner, name)

    async def send_notification(
        self, task_id: str, event: PushNotificationEvent
    ) -> None:
        """Sends one event to all that asked for it."""
        if (
            isinstance(event, Task | TaskStatusUpdateEvent)
            and event.status.state in TERMINAL
        ):
            self._outcomes[task_id] = None
            while len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        if self._inner is None:
            return
        self._sending[task_id] += 1
        try:
            async with self._order.setdefault(task_id, asyncio.Lock()):
                with letting_go():
                    await self._inner.send_notification(task_id, event)
        finally:
            self._sending[task_id] -= 1
            if not self._sending[task_id]:
                del self._sending[task_id]
                self._order.pop(task_id, None)

    def is_sending(self, task_id: str) -> bool:
        """Whether a push of the task is under way."""
        return task_id in self._sending

    async def send_outcome(
        self, task_id: str, event: PushNotificationEvent
    ) -> None:
        """Sends an event of ours; a failure is logged and changes nothing."""
        try:
            async with asyncio.timeout(_LONGEST):
                await self.send_notification(task_id, event)
        except Exception:
            logger.exception(
                'Could not push the outcome of task %s. Clients that only '
                'wait for push notifications must poll for it.',
                task_id,
                extra={'task_id': task_id},
            )

    def has_sent_outcome(self, task_id: str) -> bool:
        """Whether a terminal state of the task was pushed from here."""
        return task_id in self._outcomes


def outcome_event(task: Task) -> TaskStatusUpdateEvent:
    """The event that tells of the state the task is in."""
    return TaskStatusUpdateEvent(
        task_id=task.id, context_id=task.context_id, status=task.status
    )
