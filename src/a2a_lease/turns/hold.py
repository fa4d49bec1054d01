"""The right to write a task, and how it is checked before each save."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING

from a2a.server.cluster import ConcurrentTaskModificationError, TaskVersion

from a2a_lease.model import LeaseState
from a2a_lease.outage import is_outage, pauses


if TYPE_CHECKING:
    from a2a_lease.model import TaskLease
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.stores.lease_store import LeaseStore


logger = logging.getLogger(__name__)


class Loss(StrEnum):
    """Why a hold ended before its time."""

    TAKEN_OVER = 'taken_over'
    """Another replica took this one for dead."""
    CANCELED = 'canceled'
    """The task was canceled through another replica, or without the agent."""
    HANDED_OVER = 'handed_over'
    """This replica shuts down."""
    DIED = 'died'
    """The turn can save nothing more, on a replica that lives."""
    SILENT = 'silent'
    """The agent was not heard of for too long, on a replica that lives."""


class Hold:
    """A lease in the hands of this process: a turn's, or a recovery's."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._lease: TaskLease | None = None
        self._session: LiveSession | None = None
        self._loss: Loss | None = None
        self._own_version: TaskVersion | None = None
        self._final_version: TaskVersion | None = None

    def hold(self, lease: TaskLease, session: LiveSession) -> None:
        """Begins: the lease was acquired or claimed under this session."""
        self._lease = lease
        self._session = session

    def hold_after(
        self, other: Hold, lease: TaskLease, version: TaskVersion
    ) -> None:
        """Begins where another hold of the same lease ends.

        Args:
            other: That hold; its session goes on.
            lease: The lease as it is now.
            version: What the other one saved last.
        """
        self.hold(lease, other.session)
        self._own_version = version

    @property
    def held(self) -> bool:
        """Whether a lease was acquired."""
        return self._lease is not None

    @property
    def lease(self) -> TaskLease:
        """The lease as it was acquired.

        Raises:
            RuntimeError: Nothing was acquired yet.
        """
        if self._lease is None:
            raise RuntimeError('No lease was acquired yet.')
        return self._lease

    @property
    def session(self) -> LiveSession:
        """The session that it was acquired under.

        Raises:
            RuntimeError: Nothing was acquired yet.
        """
        if self._session is None:
            raise RuntimeError('No lease was acquired yet.')
        return self._session

    @property
    def loss(self) -> Loss | None:
        """Why the lease was lost, or None while it is held."""
        return self._loss

    def lose(self, loss: Loss) -> None:
        """Refuses all saves from now on. Any thread may call it."""
        if self._loss is None:
            self._loss = loss

    def read(self, version: TaskVersion, *, terminal: bool) -> None:
        """Notes what the execution just read from the task store."""
        if terminal:
            self._final_version = version

    def wrote(self, version: TaskVersion, *, terminal: bool) -> None:
        """Notes a save of this execution that is durable."""
        self._own_version = version
        if terminal:
            self._final_version = version

    async def permit(
        self, prev_version: TaskVersion, *, must_look: bool = False
    ) -> None:
        """Lets one save pass, or refuses it.

        It passes without a query while the heartbeat is fresh and it builds
        on a version that this execution wrote itself. A process that was
        paused, or that builds on a version which the SDK merely read, looks
        its lease up first.

        Args:
            prev_version: What the save builds on.
            must_look: Look the lease up in any case.

        Raises:
            ConcurrentTaskModificationError: The lease is lost, or the task is
                in a terminal state already.
        """
        self._refuse_if_over(prev_version)
        if (
            not must_look
            and not self.must_look
            and self.session.fresh()
            and self._builds_on_own(prev_version)
        ):
            return
        await self._look_up()
        self._refuse_if_over(prev_version)

    def _builds_on_own(self, prev_version: TaskVersion) -> bool:
        if self._own_version is not None:
            return prev_version == self._own_version
        return prev_version.is_missing and not self.lease.task_stored

    def _refuse_if_over(self, prev_version: TaskVersion) -> None:
        if self._loss is not None or prev_version == self._final_version:
            self.refused()
            raise ConcurrentTaskModificationError(self.lease.task_id)

    @property
    def must_look(self) -> bool:
        """Whether others may take the lease while this one holds it."""
        return False

    def refused(self) -> None:
        """Follows a save that was refused."""

    def canceled(self) -> None:
        """Follows a cancel of the task through another replica."""
        self.lose(Loss.CANCELED)

    async def _look_up(self) -> None:
        lease = self.lease
        for pause in pauses():
            if self._loss is not None:
                return
            try:
                stored, may_be_acquired = await self._store.holder(
                    lease.service, lease.task_id
                )
                break
            except Exception as error:
                if not is_outage(error):
                    raise
                logger.debug(
                    'Looking up the lease on task %s waits for the database.',
                    lease.task_id,
                    exc_info=True,
                )
            await asyncio.sleep(pause)
        if (
            stored is None
            or stored.token != lease.token
            # Its session is over: whoever claims it next reads the task first.
            or (may_be_acquired and stored.state is not LeaseState.IDLE)
        ):
            self.lose(Loss.TAKEN_OVER)
        elif stored.cancel_requested:
            self.canceled()
