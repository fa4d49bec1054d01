"""The event queue as the agent sees it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from a2a.server.events import EventQueue
from a2a.types.a2a_pb2 import (
    Message,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease.turns.hold import Loss


if TYPE_CHECKING:
    from a2a.server.events.event_queue import Event

    from a2a_lease.turns.record import TurnRecord
    from a2a_lease.turns.turn import Turn


logger = logging.getLogger(__name__)

_JUST_CREATED = frozenset(
    {
        TaskState.TASK_STATE_UNSPECIFIED,
        TaskState.TASK_STATE_SUBMITTED,
        TaskState.TASK_STATE_WORKING,
    }
)


class TurnQueue(EventQueue):
    """Passes the agent's events on as long as its turn holds the lease."""

    def __init__(self, inner: EventQueue, turn: Turn) -> None:
        self._inner = inner
        self._turn = turn
        self._first = True

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self._inner, name)

    async def enqueue_event(self, event: Event) -> None:
        """Enqueues an event, or drops it if nobody can save it any more."""
        turn = self._turn
        if turn.loss is not None:
            logger.debug('Task %s: dropped an event.', turn.lease.task_id)
            return
        if turn.over:
            logger.warning(
                'Task %s: an event that came after execute() had returned is '
                'dropped, since the turn is over. Let execute() return when '
                'all its work is done.',
                turn.lease.task_id,
                extra={'task_id': turn.lease.task_id},
            )
            return
        if self.closed():
            # The SDK would drop it without a word: its consumer has ended
            # while the agent goes on.
            if turn.ending is None and not turn.settled_for_good:
                turn.lose(Loss.DIED)
            return
        events = [event]
        if turn.again is not None:
            events = said_again(
                event,
                turn.again,
                known=turn.stored_task,
                first=self._first,
            )
        self._first = False
        for each in events:
            turn.enqueued(each)
            await self._inner.enqueue_event(each)

    def closed(self) -> bool:
        """Whether the SDK has stopped to process what is in the queue."""
        is_closed = getattr(self._inner, 'is_closed', None)
        return bool(is_closed()) if is_closed is not None else False


def said_again(
    event: Event, record: TurnRecord, *, known: Task | None, first: bool
) -> list[Event]:
    """Fits an event of a turn that runs again to the task that is there.

    Recovery has stored the task before. The SDK would pass a `Task` event on
    to clients but not save it, and would not take a `Message` for the end.

    Args:
        event: What the agent emitted.
        record: How the turn began.
        known: The task as it was before this run.
        first: Whether it is the first event of this run.
    """
    if isinstance(event, Task):
        return _changes(event, known or Task(), record.message)
    if isinstance(event, Message) and first:
        status = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
        if record.status is not None:
            # The reply changed nothing the first time: the task goes on to
            # wait for its user.
            status.state = record.status.state
        status.timestamp.FromDatetime(datetime.now(UTC))
        status.message.CopyFrom(event)
        status.message.task_id = record.message.task_id
        status.message.context_id = record.message.context_id
        return [
            TaskStatusUpdateEvent(
                task_id=record.message.task_id,
                context_id=record.message.context_id,
                status=status,
            )
        ]
    return [event]


def _changes(task: Task, known: Task, asked: Message) -> list[Event]:
    """Returns what a `Task` event brings beyond the creation of its task."""
    said = [asked, *known.history]
    if known.status.HasField('message'):
        said.append(known.status.message)
    # The SDK moves the message of a status into the history with the next one.
    events: list[Event] = [
        _working(task, message)
        for message in task.history
        if not _is_among(message, said)
    ]
    events += [
        TaskArtifactUpdateEvent(
            task_id=task.id,
            context_id=task.context_id,
            artifact=artifact,
            last_chunk=True,
        )
        for artifact in task.artifacts
    ]
    status = task.status
    if status.state in _JUST_CREATED:
        is_new = status.HasField('message') and not _is_among(
            status.message, said
        )
        if not is_new and not task.HasField('metadata'):
            return events
        # It was created before, and is not SUBMITTED again.
        last = _working(task, status.message if is_new else None)
    else:
        last = TaskStatusUpdateEvent(
            task_id=task.id, context_id=task.context_id, status=status
        )
    last.metadata.CopyFrom(task.metadata)
    events.append(last)
    return events


def _working(task: Task, message: Message | None) -> TaskStatusUpdateEvent:
    status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    status.timestamp.FromDatetime(datetime.now(UTC))
    if message is not None:
        status.message.CopyFrom(message)
    return TaskStatusUpdateEvent(
        task_id=task.id, context_id=task.context_id, status=status
    )


def _is_among(message: Message, said: list[Message]) -> bool:
    """Whether it was said, by an earlier run perhaps under another id."""
    return any(
        (message.message_id and message.message_id == other.message_id)
        or (message.role == other.role and message.parts == other.parts)
        for other in said
    )


class ClosedQueue(EventQueue):
    """For an agent that may clean up, but has no task to write to."""

    async def enqueue_event(self, event: Event) -> None:
        """Drops the event."""
        logger.debug('Dropped %s after a cancel.', type(event).__name__)
