"""Errors of this package."""

from __future__ import annotations


class LeaseError(Exception):
    """Base of all errors that this package raises itself."""


class LeaseConflictError(LeaseError):
    """The lease is held by another turn, or was acquired in between."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f'The lease on task {task_id} is held elsewhere.')
        self.task_id = task_id


class SessionEndedError(LeaseError):
    """The session was closed or fenced, so it can acquire nothing more."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f'Session {session_id} has ended.')
        self.session_id = session_id


class LeaseLostError(LeaseError):
    """The turn lost its lease; another one may run by now."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f'The lease on task {task_id} is lost; stop working on it.'
        )
        self.task_id = task_id


class LeaseConfigurationError(LeaseError, ValueError):
    """The parts were put together in a way that cannot work."""
