"""Deciding what becomes of an abandoned task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from a2a.types.a2a_pb2 import Task

    from a2a_lease.model import TaskLease


@dataclass(frozen=True, slots=True)
class Fail:
    """Ends the task as FAILED."""

    reason: str
    """Said to the user of the task, in a full sentence."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leaves the task as it is, without a lease: something else cares for it.

    It stays in its state until then, and a message to it starts a new turn.
    """


Decision = Fail | Leave


class RecoveryPolicy(ABC):
    """What becomes of a task that its replica left behind.

    Subclass it to decide per task:

        class FailAllButDrafts(RecoveryPolicy):
            def decide(self, lease, task):
                if task is not None and 'draft' in task.metadata:
                    return Leave()
                return Fail('The server stopped. Please start again.')
    """

    @abstractmethod
    def decide(self, lease: TaskLease, task: Task | None) -> Decision:
        """Decides for one task.

        It runs on the event loop, at most once per claim and read; it must
        not block. If it raises, the task is set aside and tried again later.

        Args:
            lease: What is known of the turn that was abandoned.
            task: The task as stored, or None if it never was.
        """


class FailAbandoned(RecoveryPolicy):
    """Ends every abandoned task as FAILED, so that its user can go on."""

    def __init__(
        self,
        reason: str = 'The server that worked on this task stopped before it '
        'was finished. Nothing more will happen to it; please start again.',
    ) -> None:
        """Makes the policy.

        Args:
            reason: Said to the user of the task.
        """
        self._reason = reason

    def decide(self, lease: TaskLease, task: Task | None) -> Decision:
        """Fails it."""
        del lease, task
        return Fail(self._reason)
