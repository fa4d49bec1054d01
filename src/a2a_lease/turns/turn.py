"""One run of execute(): from the request to the save that settles it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import Message, Task, TaskStatus

from a2a_lease.errors import LeaseLostError
from a2a_lease.model import LeaseState
from a2a_lease.outage import is_outage, pauses
from a2a_lease.turns.hold import Hold, Loss
from a2a_lease.turns.marks import (
    INTERRUPTED,
    TERMINAL,
    has_settled,
    was_interrupted,
)
from a2a_lease.turns.shown import Shown


if TYPE_CHECKING:
    from collections.abc import Callable

    from a2a.server.agent_execution import RequestContext
    from a2a.server.cluster import TaskVersion
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.types.a2a_pb2 import SendMessageRequest
    from a2a.utils.errors import A2AError

    from a2a_lease.model import TaskLease
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.stores.lease_store import LeaseStore
    from a2a_lease.turns.record import TurnRecord


class Ending(StrEnum):
    """How execute() ended."""

    RETURNED = 'returned'
    RAISED = 'raised'
    CANCELED = 'canceled'


class Turn(Hold):
    """One request, and the run of the agent that answers it.

    It lives on the event loop of the server; only `lose` may be called from
    another thread.
    """

    idle = False
    """Whether execute() has ended and left the task as it was."""
    sent_back = False
    """Whether another turn was faster, and the request waits again."""
    parks = False
    """Whether its lease is parked once the pause is pushed."""
    over = False
    """Whether the lease goes: execute() has ended, and the task settled."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        context: ServerCallContext,
        owner: str,
        kept_context: bytes,
        until: float,
        checkpoint_limit: int,
        on_loss: Callable[[Turn], None],
    ) -> None:
        super().__init__(store)
        self.context = context
        """The call context of the request, without the turn in it."""
        self.owner = owner
        self.kept_context = kept_context
        """The call context as the lease keeps it."""
        self.until = until
        """How long the request may wait to begin, by the clock."""
        self.checkpoint_limit = checkpoint_limit
        self.request_context: RequestContext | None = None
        self.looked_at: TaskLease | None = None
        """The lease as admission saw it, which the acquire must find."""
        self.refusal: A2AError | None = None
        """What the client is told if the turn never began."""
        self.state = LeaseState.RUNNING
        self.lost = asyncio.Event()
        """Set when the lease is lost, or the turn is refused."""
        self.cancel_called = False
        self.agent: asyncio.Task[None] | None = None
        self.ending: Ending | None = None
        self.ended = asyncio.Event()
        """execute() is over; the agent does nothing any more."""
        self.saved = False
        """Whether a save of this turn is durable."""
        self.is_deaf: Callable[[], bool] = lambda: False
        """Whether the SDK has stopped to process what the agent emits."""
        self.status: TaskStatus | None = None
        """The status that this turn saved last."""
        self.shown = Shown()
        self.steps = 0
        """How often the SDK has done something for the task meanwhile."""
        self.noted_stored = False
        self.params: SendMessageRequest | None = None
        """The request, as the SDK is given it."""
        self.again: TurnRecord | None = None
        """How the turn began, if this is not its first run."""
        self.stored_task: Task | None = None
        """The task as the runs before have left it."""
        self.checkpoint: bytes | None = None
        """What the last attempt saved, or this one since."""
        self._checkpointing = asyncio.Lock()
        self.sounds = 0
        """How often the agent was heard of."""
        self._loop = asyncio.get_running_loop()
        self._on_loss = on_loss
        self._pending: deque[Event] = deque()
        self._unsaved: deque[Event] = deque()
        self._moved = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()

    def hold(self, lease: TaskLease, session: LiveSession) -> None:
        """Begins: the lease was acquired under this session."""
        super().hold(lease, session)
        self.noted_stored = lease.task_stored
        # Fenced between the acquire and its answer.
        if session.ended:
            self.lose(Loss.TAKEN_OVER)

    def run_again(
        self,
        claim: Hold,
        *,
        record: TurnRecord,
        stored: Task,
        version: TaskVersion,
        checkpoint: bytes | None,
    ) -> None:
        """Begins once more: recovery has claimed the lease and saved.

        Args:
            claim: Recovery's hold of the lease.
            record: How the turn began.
            stored: The task as recovery saved it.
            version: The version of that.
            checkpoint: What the last attempt left.
        """
        self.again = record
        self.checkpoint = checkpoint
        self.status = TaskStatus()
        self.status.CopyFrom(stored.status)
        self.saved = True
        self.shown.begin(version)
        self.hold_after(
            claim,
            dataclasses.replace(
                claim.lease, state=LeaseState.RUNNING, task_stored=True
            ),
            version,
        )

    def lose(self, loss: Loss) -> None:
        """Refuses all saves from now on and stops the agent.

        Any thread may call it: a blocked event loop must not let saves pass.
        """
        if self.loss is not None:
            return
        super().lose(loss)
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._announce_loss)

    @property
    def never_began(self) -> bool:
        """Whether it was refused, or sent back."""
        return self.refusal is not None or self.sent_back

    def refuse(self, error: A2AError) -> None:
        """Ends a turn that never began."""
        self.refusal = error
        self.lost.set()

    def send_back(self) -> None:
        """Ends a turn that never began, and whose request waits again."""
        self.sent_back = True
        self.lost.set()

    def _announce_loss(self) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._drained.set()
            self._moved.set()
            self._on_loss(self)

    def wrote(self, version: TaskVersion, *, terminal: bool) -> None:
        """Notes a save of this turn that is durable."""
        super().wrote(version, terminal=terminal)
        self.saved = True

    @property
    def settled(self) -> bool:
        """Whether an event of this turn settled the task, durably."""
        return self.status is not None and has_settled(
            self.status, self.lease.before
        )

    @property
    def settled_for_good(self) -> bool:
        """Whether this turn moved the task into a terminal state."""
        return self.status is not None and self.status.state in TERMINAL

    @property
    def must_look(self) -> bool:
        """Whether others may take the lease: anybody acquires an idle one."""
        return self.idle or self.over

    @property
    def changed_nothing(self) -> bool:
        """Whether the turn left no trace, as when it answers with a Message."""
        return not self.saved

    async def save_checkpoint(self, data: bytes) -> None:
        """Stores how far the agent has come, for another attempt.

        What it emitted before is durable first: otherwise a crash between the
        two would leave a checkpoint that stands for what is not there.

        Raises:
            LeaseLostError: The lease is lost; another turn may run by now.
        """
        self.sounds += 1
        async with self._checkpointing:
            await self._save_checkpoint(data)

    async def _save_checkpoint(self, data: bytes) -> None:
        lease = self.lease
        if not await self._emitted_is_saved() and not self.settled_for_good:
            self.lose(Loss.DIED)
        for pause in pauses():
            if self.loss is not None:
                raise LeaseLostError(lease.task_id)
            try:
                saved = await self._store.save_checkpoint(
                    lease.service,
                    lease.task_id,
                    token=lease.token,
                    checkpoint=data,
                )
                break
            except Exception as error:
                if not is_outage(error):
                    raise
            await asyncio.sleep(pause)
        if not saved:
            self.lose(Loss.TAKEN_OVER)
            raise LeaseLostError(lease.task_id)
        self.checkpoint = data

    @property
    def reads_paused(self) -> bool:
        """Whether the stored task waits for its user, settled or not.

        A resumed turn may answer with a Message, or add an artifact, and
        leave the task as it was.
        """
        if self.status is not None:
            return self.status.state in INTERRUPTED
        return was_interrupted(self.lease.before)

    # The agent's events, from its queue to the end of their processing.

    def enqueued(self, event: Event) -> None:
        """Notes an event that the agent put into its queue."""
        self.sounds += 1
        self._pending.append(event)
        # A plain reply is never saved.
        if not isinstance(event, Message):
            self._unsaved.append(event)
        self._drained.clear()

    @property
    def has_pending(self) -> bool:
        """Whether an event of the agent is not processed yet."""
        return bool(self._pending)

    def is_from_agent(self, event: Event | None) -> bool:
        """Whether this very event came out of the agent's queue."""
        return any(event is pending for pending in self._pending)

    def stored(self, event: Event | None) -> None:
        """Notes that an event of the agent is durable, and all before it."""
        if any(each is event for each in self._unsaved):
            while self._unsaved.popleft() is not event:
                continue
            self._moved.set()

    async def _emitted_is_saved(self) -> bool:
        """Waits until what was emitted so far is durable.

        Returns:
            Whether it is; if not, it never will be.
        """
        if not self._unsaved:
            return True
        last = self._unsaved[-1]
        while any(each is last for each in self._unsaved):
            if self.loss is not None or self.is_deaf():
                return False
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 0.05)
        return True

    def processed(self, event: Event, version: TaskVersion) -> bool:
        """Notes that the SDK is done with an event: saved, pushed, published.

        Returns:
            Whether it was the oldest one of this turn.
        """
        self.shown.add(event, version)
        if not self._pending or self.loss is not None:
            return False
        oldest = self._pending[0]
        # The SDK publishes a copy of a Task event, and any other as it is.
        if oldest is not event and not (
            isinstance(oldest, Task) and isinstance(event, Task)
        ):
            return False
        self._pending.popleft()
        self.stored(oldest)
        if not self._pending:
            self._drained.set()
        return True

    def refused(self) -> None:
        """Follows a refused save, after which the SDK processes no event."""
        self._pending.clear()
        self._unsaved.clear()
        self._moved.set()
        self._drained.set()

    async def drained(self) -> None:
        """Waits until every event of the agent was processed, or none is."""
        while not self._drained.is_set() and not self.is_deaf():
            try:
                await asyncio.wait_for(self._drained.wait(), 0.05)
            except TimeoutError:
                continue
