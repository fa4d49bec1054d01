"""The event that ends an abandoned task."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import (
    Message,
    Part,
    Role,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)


if TYPE_CHECKING:
    from a2a_lease.model import TaskLease


METADATA_KEY = 'a2a_lease'
"""Under this key the metadata of event, message and task say what happened."""


class Cause(StrEnum):
    """Why a task was abandoned, for machines."""

    REPLICA_LOST = 'replica_lost'
    """Its replica was silent for too long, and is taken for dead."""
    REPLICA_CLOSED = 'replica_closed'
    """Its replica shut down before the turn was over."""
    TURN_DIED = 'turn_died'
    """Its replica lives, but the turn could not save any more."""


def failed_event(
    *,
    lease: TaskLease,
    context_id: str,
    reason: str,
    cause: Cause,
    silence: float,
    from_session: str,
) -> TaskStatusUpdateEvent:
    """Makes the event that ends a task as FAILED.

    Clients read it, so it names no host.

    Args:
        lease: The claimed lease.
        context_id: The context of the task.
        reason: For the user.
        cause: For machines.
        silence: Seconds for which the replica was not heard of.
        from_session: The random id of the session that left the task.
    """
    status = TaskStatus(state=TaskState.TASK_STATE_FAILED)
    status.timestamp.FromDatetime(datetime.now(UTC))
    status.message.CopyFrom(
        Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_AGENT,
            task_id=lease.task_id,
            context_id=context_id,
            parts=[Part(text=reason)],
        )
    )
    event = TaskStatusUpdateEvent(
        task_id=lease.task_id, context_id=context_id, status=status
    )
    details = {
        'reason': cause.value,
        'silence_seconds': round(silence, 3),
        'attempt': lease.attempt,
        'session': from_session,
    }
    event.metadata.update({METADATA_KEY: details})
    event.status.message.metadata.update({METADATA_KEY: details})
    return event
