"""The task store as the SDK sees it: no save passes without a lease."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    VersionedTaskStore,
)
from a2a.types.a2a_pb2 import Task, TaskState, TaskStatusUpdateEvent
from a2a.utils.errors import InternalError

from a2a_lease.model import LeaseState
from a2a_lease.turns.call_context import hold_of, is_queued, saving_outcome
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.marks import (
    INTERRUPTED,
    has_settled,
    is_terminal,
    mark_of,
)
from a2a_lease.turns.saving import read_through_outages, save_through_outages
from a2a_lease.turns.stopping import letting_go
from a2a_lease.turns.turn import Turn


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from a2a.server.cluster import StoredTask, TaskVersion
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.types.a2a_pb2 import ListTasksRequest, ListTasksResponse

    from a2a_lease.turns.hold import Hold
    from a2a_lease.turns.running import Turns


logger = logging.getLogger(__name__)

_TRIES_WITHOUT_LEASE = 4
"""How often a client's read, or a cancel from elsewhere, meets an outage
before it is told so; it has nobody to wait for."""


class LeasedTaskStore(VersionedTaskStore):
    """Wraps the user's store; every save of a turn is asked for its lease."""

    def __init__(self, inner: VersionedTaskStore, turns: Turns) -> None:
        self.inner = inner
        self._turns = turns

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self.inner, name)

    async def get(
        self, task_id: str, context: ServerCallContext
    ) -> StoredTask | None:
        """Reads a task; a turn's read outlasts outages."""
        hold = hold_of(context)
        with (
            # Not a client's poll, which says nothing of the turn.
            self._turns.at_work(task_id)
            if isinstance(hold, Turn)
            else nullcontext()
        ):
            stored = await self._read(task_id, context, hold)
        if stored is not None and stored.task.id != task_id:
            # MySQL compares ids without case; the lease is on the other one.
            return None
        if stored is None or hold is None:
            return stored
        if isinstance(hold, Turn) and not hold.held:
            # What the client has seen when the turn begins.
            hold.shown.begin(stored.version)
        elif hold.held:
            terminal = is_terminal(stored.task)
            hold.read(stored.version, terminal=terminal)
            if (
                terminal
                and isinstance(hold, Turn)
                and not hold.settled_for_good
            ):
                # Canceled elsewhere, and noticed before the heartbeat told.
                hold.lose(Loss.CANCELED)
        return stored

    async def _read(
        self, task_id: str, context: ServerCallContext, hold: Hold | None
    ) -> StoredTask | None:
        permit = _while_held(hold, task_id)
        if not (
            isinstance(hold, Turn) and not hold.held and is_queued(context)
        ):
            return await read_through_outages(
                self.inner, task_id, context, permit=permit, tries=_tries(hold)
            )

        async def permit_in_time() -> None:
            await permit()
            if self._turns.time_left(hold) < 0:
                raise TimeoutError('The database was away for too long.')

        try:
            return await read_through_outages(
                self.inner, task_id, context, permit=permit_in_time
            )
        except Exception as error:
            # Raised to the SDK it would fail a task whose turn never began.
            logger.warning(
                'Task %s could not be read, so a message for it is refused; '
                'the task is untouched: %s',
                task_id,
                error or type(error).__name__,
                extra={'task_id': task_id},
            )
            hold.refuse(
                InternalError(
                    message='The message was not delivered, since its task '
                    'could not be read. Send it again.'
                )
            )
            raise asyncio.CancelledError from error

    async def save(
        self,
        task: Task,
        *,
        event: Event | None,
        prev: Task | None,
        prev_version: TaskVersion,
        context: ServerCallContext,
    ) -> TaskVersion:
        """Saves a task if the lease of its writer allows it.

        Raises:
            ConcurrentTaskModificationError: The writer lost its lease, the
                task is over, or somebody else wrote.
        """
        hold = hold_of(context)

        # A save to CANCELED is the one that skips the SDK's version check.
        must_look = task.status.state == TaskState.TASK_STATE_CANCELED

        async def permit() -> None:
            if hold is not None and hold.held:
                await hold.permit(prev_version, must_look=must_look)

        async def save() -> TaskVersion:
            return await save_through_outages(
                self.inner,
                task,
                event=event,
                prev=prev,
                prev_version=prev_version,
                context=context,
                permit=permit,
                tries=_tries(hold),
            )

        if hold is None or not hold.held:
            if must_look:
                # The SDK leaves the time of the status before. With its own,
                # a cancel is told from another one at the same time.
                task.status.timestamp.FromDatetime(datetime.now(UTC))
            if not is_terminal(task):
                return await save()
            with saving_outcome(context):
                return await save()

        if not isinstance(hold, Turn):
            version = await save()
            hold.wrote(version, terminal=is_terminal(task))
            return version

        _tell_apart(task, event, hold)
        goes_on = hold.state is LeaseState.PARKED and not has_settled(
            task.status, hold.lease.before
        )
        try:
            with self._turns.at_work(task.id):
                if goes_on:
                    await self._turns.resume(hold)
                with self._turns.saving(hold):
                    version = await save()
        except ConcurrentTaskModificationError:
            raise
        except Exception:
            # The SDK stops listening to the agent after this.
            hold.lose(Loss.DIED)
            raise
        hold.status = type(task.status)()
        hold.status.CopyFrom(task.status)
        hold.wrote(version, terminal=is_terminal(task))
        hold.stored(event)
        await self._turns.saved(hold, task, event, version)
        return version

    async def list(
        self, params: ListTasksRequest, context: ServerCallContext
    ) -> ListTasksResponse:
        """Lists tasks as the wrapped store does."""
        with letting_go():
            return await self.inner.list(params, context)

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        """Deletes a task, and with it the token that its lease kept."""
        with letting_go():
            await self.inner.delete(task_id, context)
        await self._turns.forget(task_id)


def _tell_apart(task: Task, event: Event | None, turn: Turn) -> None:
    """Stamps a pause that could not be told from the one before it.

    An agent may pause a task many times in the same state, with no timestamp
    or always the same. Whether this turn paused it is judged from the stored
    status alone when its replica is gone.
    """
    if (
        not isinstance(event, TaskStatusUpdateEvent | Task)
        or task.status.state not in INTERRUPTED
    ):
        return
    # The flush of the user's message carries the status from before.
    if event is task and turn.lease.before is not None:
        return
    if (
        task.status.HasField('timestamp')
        and mark_of(task.status) != turn.lease.before
    ):
        return
    now = datetime.now(UTC)
    task.status.timestamp.FromDatetime(now)
    event.status.timestamp.FromDatetime(now)


def _tries(hold: Hold | None) -> int | None:
    return None if hold is not None and hold.held else _TRIES_WITHOUT_LEASE


def _while_held(
    hold: Hold | None, task_id: str
) -> Callable[[], Awaitable[None]]:
    async def permit() -> None:
        if hold is not None and hold.loss is not None:
            raise ConcurrentTaskModificationError(task_id)

    return permit
