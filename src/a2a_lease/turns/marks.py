"""Reading a task's status: is it over, does it pause, has it moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import (
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease.model import TaskMark


if TYPE_CHECKING:
    from a2a_lease.model import TaskLease


TERMINAL = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_REJECTED,
    }
)
INTERRUPTED = frozenset(
    {
        TaskState.TASK_STATE_INPUT_REQUIRED,
        TaskState.TASK_STATE_AUTH_REQUIRED,
    }
)


METADATA_KEY = 'a2a_lease'
"""Under this key the metadata of event, message and task say what happened."""


def is_taken_over(event: object) -> bool:
    """Whether this is the event after which a turn runs again."""
    return (
        isinstance(event, TaskStatusUpdateEvent)
        and event.status.state == TaskState.TASK_STATE_WORKING
        and METADATA_KEY in event.metadata
    )


def is_terminal(task: Task) -> bool:
    """Whether the task is over for good."""
    return task.status.state in TERMINAL


def rests(task: Task) -> bool:
    """Whether the task is over or waits for its user."""
    return task.status.state in TERMINAL | INTERRUPTED


_INTERRUPTED_NAMES = frozenset(TaskState.Name(state) for state in INTERRUPTED)


def was_interrupted(mark: TaskMark | None) -> bool:
    """Whether the task waited for its user at that mark."""
    return mark is not None and mark.state in _INTERRUPTED_NAMES


def mark_of(status: TaskStatus) -> TaskMark:
    """What tells this status from another one of the same task."""
    return TaskMark(
        state=TaskState.Name(status.state),
        timestamp=(
            str(status.timestamp.ToNanoseconds())
            if status.HasField('timestamp')
            else ''
        ),
    )


def has_settled(status: TaskStatus, before: TaskMark | None) -> bool:
    """Whether a turn that began at `before` has settled the task.

    The saved state alone does not tell: the first save of a resumed turn
    writes the user's message and the old, interrupted state again.
    """
    return (
        status.state in TERMINAL or status.state in INTERRUPTED
    ) and mark_of(status) != before


def lease_settled(task: Task, lease: TaskLease) -> bool:
    """Whether the turn of this lease has settled the stored task."""
    return has_settled(task.status, lease.before)
