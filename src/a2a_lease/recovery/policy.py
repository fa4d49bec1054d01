"""Deciding what becomes of an abandoned task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from a2a_lease.errors import LeaseConfigurationError


if TYPE_CHECKING:
    from a2a.types.a2a_pb2 import Task

    from a2a_lease.model import TaskLease


_LONGEST_BACKOFF = 300.0
_SUSPECT_FROM = 3
"""The attempt from which on a turn is suspected to kill its replica."""
_STOPPED = (
    'The server that worked on this task stopped before it was finished. '
    'Nothing more will happen to it; please start again.'
)


@dataclass(frozen=True, slots=True)
class Fail:
    """Ends the task as FAILED."""

    reason: str
    """Said to the user of the task, in a full sentence."""

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if not isinstance(self.reason, str):
            raise LeaseConfigurationError(
                f'reason must be a text for the user, not {self.reason!r}.'
            )


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Runs the turn again, with the request that began it.

    If that was not stored, being too large, the task fails.
    """

    after: float = 0.0
    """Seconds to wait before. A turn that was handed over in good order does
    not wait."""
    apart: bool = False
    """Not beside any other turn that runs again on this replica, in case it is
    this one that kills its replicas."""

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if not (
            isinstance(self.after, int | float) and 0 <= self.after < math.inf
        ):
            raise LeaseConfigurationError(
                f'after must be 0 or more seconds, not {self.after!r}.'
            )


@dataclass(frozen=True, slots=True)
class Leave:
    """Leaves the task as it is, without a lease: something else cares for it.

    It stays in its state until then, and a message to it starts a new turn.
    """


Decision = Fail | RunAgain | Leave


class RecoveryPolicy(ABC):
    """What becomes of a task that its replica left behind.

    Subclass it to decide per task:

        class RunDraftsAgain(RecoveryPolicy):
            def decide(self, lease, task):
                if lease.attempt <= 3 and is_draft(task):
                    return RunAgain()
                return Fail('The server stopped. Please start again.')
    """

    may_run_again: bool = True
    """Whether `decide` ever returns `RunAgain`. If not, nothing of a request
    is stored with its lease."""

    @abstractmethod
    def decide(self, lease: TaskLease, task: Task | None) -> Decision:
        """Decides for one task.

        It runs on the event loop, at most once per claim and read; it must
        not block. If it raises, the task is set aside and tried again later.

        Args:
            lease: What is known of the turn that was abandoned. Its `attempt`
                is that of the next run: 2 after one crash.
            task: The task as stored, or None if it never was.
        """


class FailAbandoned(RecoveryPolicy):
    """Ends every abandoned task as FAILED, so that its user can go on."""

    may_run_again = False

    def __init__(self, reason: str = _STOPPED) -> None:
        """Makes the policy.

        Args:
            reason: Said to the user of the task.
        """
        self._reason = reason

    def decide(self, lease: TaskLease, task: Task | None) -> Decision:
        """Fails it."""
        del lease, task
        return Fail(self._reason)


class ReExecute(RecoveryPolicy):
    """Runs every abandoned turn again, up to a number of attempts.

    For agents that may do the same work twice, or that know from
    `current_lease()` how far they had come. A turn that was handed over at a
    shutdown costs no attempt; a crash does, and so does an agent that is
    silent for `inactivity_timeout`. After two crashes, or if it is
    the last attempt, a turn runs apart from others that run again, since it
    may be the one that kills its replicas.
    """

    def __init__(
        self,
        max_attempts: int = 3,
        *,
        backoff: float = 5.0,
        reason: str = 'The work on this task broke off {attempts} times, so '
        'it is not tried again.',
    ) -> None:
        """Makes the policy.

        Args:
            max_attempts: How often a turn runs at most, the first run
                included.
            backoff: Seconds before the third attempt, doubled for each one
                after it, up to 300. The second begins at once.
            reason: Said to the user after the last one; `{attempts}` is how
                many there were.

        Raises:
            LeaseConfigurationError: A number that cannot work.
        """
        if isinstance(max_attempts, bool) or not (
            isinstance(max_attempts, int) and max_attempts >= 1
        ):
            raise LeaseConfigurationError(
                f'max_attempts must be a whole number of 1 or more, not '
                f'{max_attempts!r}.'
            )
        if not backoff >= 0:
            raise LeaseConfigurationError(
                f'backoff must be 0 or more seconds, not {backoff!r}.'
            )
        try:
            str.format(reason, attempts=max_attempts)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise LeaseConfigurationError(
                f'reason may contain {{attempts}} and no other braces, not '
                f'{reason!r}.'
            ) from error
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._reason = reason
        self.may_run_again = max_attempts > 1

    def decide(self, lease: TaskLease, task: Task | None) -> Decision:
        """Runs it again, or fails it after the last attempt."""
        del task
        if lease.attempt > self._max_attempts:
            return Fail(self._reason.format(attempts=lease.attempt - 1))
        doubled = max(0, lease.attempt - _SUSPECT_FROM)
        return RunAgain(
            after=(
                min(_LONGEST_BACKOFF, self._backoff * 2.0 ** min(doubled, 30))
                if lease.attempt >= _SUSPECT_FROM
                else 0.0
            ),
            apart=lease.attempt >= min(_SUSPECT_FROM, self._max_attempts)
            and lease.attempt > 1,
        )
