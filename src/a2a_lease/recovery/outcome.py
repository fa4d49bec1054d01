"""The events by which recovery tells what became of a task."""

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

from a2a_lease.turns.marks import METADATA_KEY


if TYPE_CHECKING:
    from a2a_lease.recovery.claim import Claim


_Event = TaskStatusUpdateEvent


class Cause(StrEnum):
    """Why a task was abandoned, for machines."""

    REPLICA_LOST = 'replica_lost'
    """Its replica was silent for too long, and is taken for dead."""
    REPLICA_CLOSED = 'replica_closed'
    """Its replica shut down before the turn was over."""
    TURN_DIED = 'turn_died'
    """Its replica lives, but the turn could not save any more."""
    AGENT_SILENT = 'agent_silent'
    """Its replica lives, but the agent emitted nothing for too long."""


def failed_event(claim: Claim, *, context_id: str, reason: str) -> _Event:
    """Makes the event that ends a task as FAILED.

    Args:
        claim: The right to end it.
        context_id: The context of the task.
        reason: For the user.
    """
    event = _event(claim, TaskState.TASK_STATE_FAILED, context_id=context_id)
    event.status.message.CopyFrom(
        Message(
            message_id=str(uuid.uuid4()),
            role=Role.ROLE_AGENT,
            task_id=claim.lease.task_id,
            context_id=context_id,
            parts=[Part(text=reason)],
        )
    )
    event.status.message.metadata.update(event.metadata)
    return event


def running_event(claim: Claim, *, context_id: str) -> _Event:
    """Makes the event after which the turn runs again.

    Args:
        claim: The right to run it.
        context_id: The context of the task.
    """
    return _event(claim, TaskState.TASK_STATE_WORKING, context_id=context_id)


def _event(claim: Claim, state: TaskState, *, context_id: str) -> _Event:
    status = TaskStatus(state=state)
    status.timestamp.FromDatetime(datetime.now(UTC))
    event = TaskStatusUpdateEvent(
        task_id=claim.lease.task_id, context_id=context_id, status=status
    )
    event.metadata.update({METADATA_KEY: _details(claim, state)})
    return event


def _details(claim: Claim, state: TaskState) -> dict[str, str | float]:
    # Clients read it, so it names no host.
    return {
        'reason': claim.cause.value,
        'silence_seconds': round(claim.silence, 3),
        'attempt': (
            claim.attempts
            if state == TaskState.TASK_STATE_FAILED
            else claim.lease.attempt
        ),
        'session': claim.from_session,
    }
