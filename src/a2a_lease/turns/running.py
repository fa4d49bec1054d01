"""The turns of this replica, from their acquire until their lease goes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from a2a.server.cluster import VersionedEvent
from a2a.types.a2a_pb2 import Task, TaskState

from a2a_lease.errors import LeaseConflictError, SessionEndedError
from a2a_lease.model import LeaseState
from a2a_lease.outage import is_outage, outlast, pauses
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.marks import was_interrupted
from a2a_lease.turns.push_sender import outcome_event
from a2a_lease.turns.saving import always, read_through_outages
from a2a_lease.turns.turn import Ending, Turn


if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Coroutine,
        Generator,
        Iterator,
        Sequence,
    )

    from a2a.server.cluster import (
        TaskEventStream,
        TaskVersion,
        VersionedTaskStore,
    )
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event

    from a2a_lease.model import LeaseRequest, TaskLease
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.stores.lease_store import LeaseStore
    from a2a_lease.turns.push_sender import LeasedPushSender


logger = logging.getLogger(__name__)

_LOOK_BACK = 0.05


class DeadTurns(Protocol):
    """What becomes of a turn that died on a replica that lives."""

    def adopt(self, turn: Turn) -> None:
        """Recovers the task of the turn."""

    def take_up(self, turn: Turn) -> None:
        """Recovers the task of a turn that saved after it had lost it."""


class Turns:
    """Every turn that this replica holds a lease for.

    Follows each through its states: running, parked while the agent goes on
    after a pause, and the end, which depends on what was saved and on how
    execute() ended. Runs on the event loop of the server, but for
    `session_lost` and `canceled`.
    """

    def __init__(
        self,
        *,
        service: str,
        store: LeaseStore,
        task_store: VersionedTaskStore,
        event_stream: TaskEventStream,
        push: LeasedPushSender,
        settings: LeaseSettings,
        clock: Clock,
    ) -> None:
        self.service = service
        self.store = store
        self.push = push
        self._task_store = task_store
        self._event_stream = event_stream
        self._settings = settings
        self._clock = clock
        self._by_task: dict[str, list[Turn]] = {}
        self._held: dict[Turn, None] = {}
        self._heard: dict[Turn, tuple[int, float]] = {}
        """How often each agent was heard of, and since when."""
        self._gone: dict[Turn, asyncio.Event] = {}
        self._reserved: dict[str, Turn] = {}
        """The turn of each task that is about to begin."""
        self._reserves: dict[Turn, str] = {}
        self._unreserved = asyncio.Event()
        self._order: dict[Turn, asyncio.Lock] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._signals: dict[str, set[asyncio.Event]] = {}
        self._at_work: Counter[str] = Counter()
        """How many calls of the SDK for a task are under way."""
        self._quiet: dict[Turn, tuple[int, float]] = {}
        """For how long the SDK has done nothing for a turn that ended."""
        self._checked = clock.monotonic()
        self._saving: set[Turn] = set()
        self._saved = asyncio.Event()
        self.handing_over = False
        """Whether this replica shuts down and lets no turn go on."""
        self.dead_turns: DeadTurns | None = None
        self.cancel_agent: Callable[[Turn], Awaitable[None]] | None = None

    # Which turns there are.

    def __iter__(self) -> Iterator[Turn]:
        """Iterates over a copy, which other threads may do too."""
        return iter(list(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def new_turn(
        self,
        *,
        context: ServerCallContext,
        owner: str,
        kept_context: bytes,
    ) -> Turn:
        """Makes a turn that has not begun.

        Args:
            context: The call context of the request.
            owner: Whose task it is.
            kept_context: The call context as the lease keeps it.
        """
        return Turn(
            self.store,
            context=context,
            owner=owner,
            kept_context=kept_context,
            until=self._clock.monotonic() + self._settings.acquire_timeout,
            checkpoint_limit=self._settings.checkpoint_limit,
            on_loss=self.lost,
        )

    def renewed(self, turn: Turn) -> Turn:
        """Makes a turn for the same request, which waits no longer for it."""
        new = self.new_turn(
            context=turn.context,
            owner=turn.owner,
            kept_context=turn.kept_context,
        )
        new.until = turn.until
        return new

    async def reserve(
        self, turn: Turn, task_id: str, *, timeout: float
    ) -> bool:
        """Waits until no turn of a task is here, and is the next one."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if (other := self.of(task_id)) is not None:
                        await self._gone[other].wait()
                    elif self._is_reserved(task_id):
                        self._unreserved.clear()
                        await self._unreserved.wait()
                    else:
                        break
        except TimeoutError:
            return False
        self._reserved[task_id] = turn
        self._reserves[turn] = task_id
        return True

    def _is_reserved(self, task_id: str) -> bool:
        turn = self._reserved.get(task_id)
        if turn is None:
            return False
        # Its client may have gone before the SDK came to it.
        if self.time_left(turn) < 0:
            self.unreserve(turn)
            return False
        return True

    def time_left(self, turn: Turn) -> float:
        """Returns the seconds for which a turn may still wait to begin."""
        return turn.until - self._clock.monotonic()

    def unreserve(self, turn: Turn) -> None:
        """Makes way for the next one: the turn has begun, or never will."""
        task_id = self._reserves.pop(turn, None)
        if task_id is not None:
            del self._reserved[task_id]
            self._unreserved.set()

    def begin(self, turn: Turn, task_id: str) -> None:
        """Takes in a turn that has acquired."""
        self._by_task.setdefault(task_id, []).append(turn)
        self._held[turn] = None
        self._gone[turn] = asyncio.Event()
        self._order[turn] = asyncio.Lock()
        # Fenced before the heartbeat's thread could see the turn here.
        if turn.held and turn.session.ended:
            turn.lose(Loss.TAKEN_OVER)
        elif self.handing_over:
            turn.lose(Loss.HANDED_OVER)

    def drop(self, turn: Turn, task_id: str) -> None:
        """Takes a turn out: its lease is gone, or never came."""
        turns = self._by_task.get(task_id, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._by_task.pop(task_id, None)
        self._held.pop(turn, None)
        self._heard.pop(turn, None)
        self._quiet.pop(turn, None)
        self._order.pop(turn, None)
        gone = self._gone.pop(turn, None)
        if gone is not None:
            gone.set()
        self._signal(task_id)

    def of(self, task_id: str) -> Turn | None:
        """Returns the newest turn of a task that is still here."""
        turns = self._by_task.get(task_id)
        return turns[-1] if turns else None

    def followed(self, task_id: str) -> Callable[[], Turn | None]:
        """Returns what tells which turn of a task a cancel has met last.

        The SDK saves what a turn emits in the call context of the cancel that
        came to it, and that may be a later turn than was here as it came in.
        """
        met: Turn | None = None

        def latest() -> Turn | None:
            nonlocal met
            turn = self.of(task_id)
            if turn is not None and not turn.idle and not turn.over:
                met = turn
            return met

        latest()
        return latest

    async def wait_gone(self, task_id: str, *, timeout: float) -> bool:
        """Waits until this replica holds no turn of the task any more."""
        try:
            async with asyncio.timeout(timeout):
                while (turn := self.of(task_id)) is not None:
                    await self._gone[turn].wait()
        except TimeoutError:
            return False
        return True

    async def wait_until_empty(self, *, timeout: float) -> bool:
        """Waits until this replica holds no turn at all."""
        try:
            async with asyncio.timeout(timeout):
                while self._held:
                    await self._gone[next(iter(self._held))].wait()
        except TimeoutError:
            return False
        return True

    # What the SDK's saves and events say.

    async def resume(self, turn: Turn) -> None:
        """Makes a parked lease run again, before the save that needs it."""

        async def run() -> None:
            if not await self.store.move(
                self.service,
                turn.lease.task_id,
                token=turn.lease.token,
                state=LeaseState.RUNNING,
            ):
                turn.lose(Loss.TAKEN_OVER)

        turn.state = LeaseState.RUNNING
        turn.parks = False
        async with self._order[turn]:
            await self._through_outages(turn, run)

    async def saved(
        self,
        turn: Turn,
        task: Task,
        event: Event | None,
        version: TaskVersion,
    ) -> None:
        """Follows a durable save of a turn."""
        if not turn.settled:
            return
        if turn.idle and not turn.over:
            # Something that the agent left behind ended its task after all.
            self._let_go(turn, keep_token=not turn.settled_for_good)
        elif turn.settled_for_good:
            if not turn.is_from_agent(event):
                # The SDK's own: FAILED after an exception, or CANCELED.
                outcome = outcome_event(task)
                await self._event_stream.publish(
                    task.id, VersionedEvent(event=outcome, version=version)
                )
                await self.push.send_outcome(task.id, outcome)
                self.conclude(turn)
        elif turn.state is LeaseState.RUNNING and turn.ending is None:
            turn.state = LeaseState.PARKED
            turn.parks = True

    def processed(self, task_id: str, event: VersionedEvent) -> None:
        """Follows an event that the SDK is done with: saved and pushed."""
        for turn in self._by_task.get(task_id, ()):
            if turn.processed(event.event, event.version):
                if turn.parks:
                    # Not before the push: of a parked lease that is left
                    # nobody tells.
                    turn.parks = False
                    if turn.ending is None:
                        self._move(turn, LeaseState.PARKED)
                if turn.ending in (Ending.RAISED, Ending.CANCELED):
                    self.conclude(turn)
                return

    @contextmanager
    def at_work(self, task_id: str) -> Generator[None]:
        """Notes that the SDK reads, saves or publishes for a task."""
        self._at_work[task_id] += 1
        try:
            yield
        finally:
            self._at_work[task_id] -= 1
            if not self._at_work[task_id]:
                del self._at_work[task_id]
            for turn in self._by_task.get(task_id, ()):
                turn.steps += 1

    @contextmanager
    def saving(self, turn: Turn) -> Generator[None]:
        """Notes that a save of a turn is under way, and looks back after it.

        A save may land long after it was permitted: the process was paused in
        the middle of it, or the database was slow. If the lease was recovered
        meanwhile without a save, as that of a paused task, nobody would look
        after what it has saved.
        """
        self._saving.add(turn)
        landed = False
        try:
            yield
            landed = True
        finally:
            self._saving.discard(turn)
            self._saved.set()
            if landed and not (turn.loss is None and turn.session.fresh()):
                self.spawn(self._look_back(turn))

    async def _look_back(self, turn: Turn) -> None:
        while turn.loss is None and not turn.session.fresh():
            if turn.session.ended:
                break
            await asyncio.sleep(_LOOK_BACK)
        lost = turn.loss in (Loss.TAKEN_OVER, Loss.HANDED_OVER)
        if (lost or turn.session.ended) and self.dead_turns is not None:
            self.dead_turns.take_up(turn)

    def is_saving(self, turn: Turn) -> bool:
        """Whether a save of a turn is under way."""
        return turn in self._saving

    async def wait_until_saved(self, *, timeout: float) -> bool:
        """Waits until no save is under way, of lost turns neither."""
        try:
            async with asyncio.timeout(timeout):
                while self._saving:
                    self._saved.clear()
                    await self._saved.wait()
        except TimeoutError:
            return False
        return True

    # The end of a turn.

    def conclude(self, turn: Turn) -> None:
        """Lets the lease go, or keeps it, by how the turn ended.

        Called when execute() is over and its events are processed, and again
        when the SDK saves what follows from an exception or a cancel.
        """
        if turn.ending is None or turn.loss is not None:
            return
        if turn.has_pending and not (
            turn.ending is Ending.RETURNED and turn.is_deaf()
        ):
            # What the agent emitted before its end is still to be saved, also
            # from a queue that the SDK closes after an exception or a cancel.
            return
        if turn.settled:
            self._let_go(turn, keep_token=not turn.settled_for_good)
        elif (
            turn.changed_nothing
            and turn.lease.before is None
            and turn.again is None
        ):
            # It answered with a Message, or with nothing: there is no task.
            # After an exception the SDK creates one as FAILED.
            if turn.ending is not Ending.RAISED:
                self._let_go(turn, keep_token=False)
        elif turn.ending is not Ending.RETURNED:
            # The SDK saves FAILED or CANCELED next; see `check` if not.
            return
        elif turn.reads_paused:
            self._let_go(turn, keep_token=True)
        elif turn.is_deaf():
            turn.lose(Loss.DIED)
        else:
            self._idle(turn)

    def _idle(self, turn: Turn) -> None:
        logger.warning(
            'The agent returned from execute() and left task %s in a state '
            'that is neither terminal nor interrupted. The next message to it '
            'goes on; if this replica dies first, the task is recovered. '
            'Let the agent end each turn with such a state.',
            turn.lease.task_id,
            extra=self._fields(turn),
        )

        turn.idle = True
        self._end(turn, lambda: self._rest(turn, LeaseState.IDLE))

    def _let_go(self, turn: Turn, *, keep_token: bool) -> None:
        turn.over = True
        if keep_token:
            self._end(turn, lambda: self._rest(turn, LeaseState.FREE))
        else:
            self._end(turn, lambda: self._release(turn))

    def _end(self, turn: Turn, step: Callable[[], Awaitable[None]]) -> None:
        async def end() -> None:
            try:
                await self._through_outages(turn, step)
            finally:
                self.drop(turn, turn.lease.task_id)

        self.spawn(self._in_order(turn, end))

    async def _release(self, turn: Turn) -> None:
        await self.store.release(
            self.service, turn.lease.task_id, token=turn.lease.token
        )

    async def goes_on(self, task_id: str) -> bool:
        """Whether a turn of a task is under way, or to be recovered."""
        try:
            lease = await self.store.get(self.service, task_id)
        except Exception as error:
            if not is_outage(error):
                raise
            return True
        return (
            lease is not None
            and lease.session_id is not None
            and lease.state in (LeaseState.RUNNING, LeaseState.RECOVERING)
        )

    async def _set(
        self, lease: TaskLease, context: ServerCallContext, state: LeaseState
    ) -> None:
        if await self.store.move(
            self.service, lease.task_id, token=lease.token, state=state
        ):
            return
        stored = await self.store.get(self.service, lease.task_id)
        if (
            stored is not None
            and stored.token == lease.token
            and stored.cancel_requested
        ):
            # It was canceled while it came to its own end.
            await self._tell_canceled(lease.task_id, context)
            await self.store.release(
                self.service, lease.task_id, token=lease.token
            )

    async def _rest(self, turn: Turn, state: LeaseState) -> None:
        await self._set(turn.lease, turn.context, state)

    def _move(self, turn: Turn, state: LeaseState) -> None:
        self.spawn(
            self._in_order(
                turn,
                lambda: self._through_outages(
                    turn, lambda: self._rest(turn, state)
                ),
            )
        )

    async def _in_order(
        self, turn: Turn, step: Callable[[], Awaitable[None]]
    ) -> None:
        # What happens to one lease happens in the order of the calls.
        async with self._order.get(turn) or asyncio.Lock():
            await step()

    async def _through_outages(
        self, turn: Turn, step: Callable[[], Awaitable[None]]
    ) -> None:
        # Whoever took over the session has the lease now.
        await outlast(step, is_over=lambda: turn.session.ended)

    async def undo(
        self,
        acquiring: asyncio.Future[TaskLease],
        request: LeaseRequest,
        context: ServerCallContext,
    ) -> None:
        """Lets go what a canceled request acquires after all."""
        for pause in pauses():
            try:
                lease = await acquiring
                break
            except (LeaseConflictError, SessionEndedError):
                return
            except Exception as error:
                if not is_outage(error):
                    raise
            # Whether it landed is unknown; the same request tells.
            await asyncio.sleep(pause)
            acquiring = asyncio.ensure_future(self.store.acquire(request))
        paused = was_interrupted(lease.before)

        async def let_go() -> None:
            if lease.before is None:
                await self.store.release(
                    self.service, lease.task_id, token=lease.token
                )
            else:
                await self._set(
                    lease,
                    context,
                    LeaseState.FREE if paused else LeaseState.IDLE,
                )

        await outlast(let_go)

    async def forget(self, task_id: str) -> None:
        """Deletes the lease row of a task that is deleted or over."""
        lease, may_be_acquired = await self.store.holder(self.service, task_id)
        if lease is not None and may_be_acquired:
            await self.store.release(self.service, task_id, token=lease.token)

    # Loss.

    def session_lost(self, session: LiveSession) -> None:
        """Loses every turn of a session. Called on the heartbeat's thread."""
        for turn in self:
            if turn.held and turn.session is session:
                turn.lose(Loss.TAKEN_OVER)

    def canceled(self, leases: Sequence[TaskLease]) -> None:
        """Loses turns that were canceled through another replica.

        Called on the heartbeat's thread.
        """
        tokens = {lease.task_id: lease.token for lease in leases}
        for turn in self:
            if turn.held and tokens.get(turn.lease.task_id) == turn.lease.token:
                turn.lose(Loss.CANCELED)

    def lost(self, turn: Turn) -> None:
        """Follows the loss of a turn, on the event loop."""
        if not turn.held:
            return
        task_id = turn.lease.task_id
        self._signal(task_id)
        if turn.loss is Loss.CANCELED:
            self.spawn(self._stop_canceled(turn))
        else:
            if turn.agent is not None:
                turn.agent.cancel()
            self.spawn(self._watch_stop(turn))
        if (
            turn.loss in (Loss.DIED, Loss.SILENT)
            and self.dead_turns is not None
        ):
            self.dead_turns.adopt(turn)
        if turn.ended.is_set():
            self.drop(turn, task_id)

    async def _stop_canceled(self, turn: Turn) -> None:
        # The lease goes last: if this replica dies before the push, recovery
        # does it.
        await asyncio.gather(
            self._tell_canceled(turn.lease.task_id, turn.context),
            self._stop_agent(turn),
        )
        await self._through_outages(turn, lambda: self._release(turn))

    async def _stop_agent(self, turn: Turn) -> None:
        if self.cancel_agent is not None and not turn.ended.is_set():
            await self.cancel_agent(turn)
        if turn.agent is not None:
            turn.agent.cancel()
        await self._watch_stop(turn)
        await turn.ended.wait()

    async def _tell_canceled(
        self, task_id: str, context: ServerCallContext
    ) -> None:
        """Pushes a cancel that came through another replica.

        Its holder does it, so that a recovery does it again if the holder
        dies.
        """
        stored = await read_through_outages(
            self._task_store, task_id, context, permit=always
        )
        if (
            stored is not None
            and stored.task.status.state == TaskState.TASK_STATE_CANCELED
            and not self.push.has_sent_outcome(task_id)
        ):
            await self.push.send_outcome(task_id, outcome_event(stored.task))

    async def _watch_stop(self, turn: Turn) -> None:
        try:
            async with asyncio.timeout(self._settings.stop_timeout):
                await turn.ended.wait()
        except TimeoutError:
            logger.warning(
                'The agent of task %s lost its lease and goes on: it ignores '
                'its cancellation. What it emits is dropped. Let the agent '
                'pass on asyncio.CancelledError, and check '
                'current_lease().lost in loops.',
                turn.lease.task_id,
                extra=self._fields(turn),
            )

    def ended(self, turn: Turn) -> None:
        """Follows the end of execute() of a turn."""
        turn.ended.set()
        if turn.loss is not None:
            self.drop(turn, turn.lease.task_id)

    def check(self) -> None:
        """Finds turns that died on this replica, which goes on living."""
        now = self._clock.monotonic()
        # A loop that was blocked gave nobody a chance to do something.
        passed = min(now - self._checked, self._settings.sweep_interval)
        self._checked = now
        for turn in self:
            if turn.loss is not None or not turn.held:
                continue
            if (
                turn.ending in (Ending.RAISED, Ending.CANCELED)
                and not turn.over
                and self._is_left(turn, passed)
            ):
                if turn.settled:
                    self._let_go(turn, keep_token=not turn.settled_for_good)
                else:
                    turn.lose(Loss.DIED)
            elif turn.ending is None and turn.is_deaf():
                # Nobody listens to the agent any more.
                if not turn.settled_for_good:
                    turn.lose(Loss.DIED)
                elif turn.agent is not None:
                    turn.agent.cancel()
            elif self._is_silent(turn, now):
                logger.warning(
                    'The agent of task %s emitted nothing for '
                    'inactivity_timeout (%g s). Its turn is stopped and '
                    'counts as abandoned.',
                    turn.lease.task_id,
                    self._settings.inactivity_timeout,
                    extra=self._fields(turn),
                )
                turn.lose(Loss.SILENT)

    def _is_left(self, turn: Turn, passed: float) -> bool:
        """Whether the SDK will not save how a turn ended.

        It saves FAILED or CANCELED once it is done with what the agent
        emitted before, however slow the database and the webhooks are.
        """
        task_id = turn.lease.task_id
        steps, quiet = self._quiet.get(turn, (turn.steps, 0.0))
        if (
            steps != turn.steps
            or task_id in self._at_work
            or self.push.is_sending(task_id)
        ):
            quiet = 0.0
        else:
            quiet += passed
        self._quiet[turn] = turn.steps, quiet
        return quiet > self._settings.stop_timeout

    def _is_silent(self, turn: Turn, now: float) -> bool:
        limit = self._settings.inactivity_timeout
        if limit is None or turn.ending is not None:
            return False
        sounds, since = self._heard.get(turn, (-1, now))
        # A pause may last, and what waits to be saved was emitted.
        if (
            sounds != turn.sounds
            or turn.state is not LeaseState.RUNNING
            or turn.has_pending
        ):
            self._heard[turn] = turn.sounds, now
            return False
        return now - since > limit

    def unnoted(self) -> dict[str, int]:
        """Tasks that were created here and whose leases do not say so yet."""
        found = {}
        for turn in self:
            if turn.held and turn.saved and not turn.noted_stored:
                found[turn.lease.task_id] = turn.lease.token
        return found

    def noted(self, tokens: dict[str, int]) -> None:
        """Follows `unnoted`, once that is durable."""
        for turn in self:
            if turn.held and tokens.get(turn.lease.task_id) == turn.lease.token:
                turn.noted_stored = True

    # For those who stream.

    def watch(self, task_id: str) -> asyncio.Event:
        """Returns an event that is set when a turn of the task is over.

        It was lost, or has ended.
        """
        signal = asyncio.Event()
        self._signals.setdefault(task_id, set()).add(signal)
        return signal

    def _signal(self, task_id: str) -> None:
        for signal in self._signals.get(task_id, ()):
            signal.set()

    def unwatch(self, task_id: str, signal: asyncio.Event) -> None:
        """Ends `watch`."""
        signals = self._signals.get(task_id)
        if signals is not None:
            signals.discard(signal)
            if not signals:
                del self._signals[task_id]

    # Work beside the requests.

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs something in the background; its errors are logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error(
                'Work on leases in the background failed; what is left of it '
                'goes when this replica ends.',
                exc_info=task.exception(),
            )

    async def flush(self, *, timeout: float) -> None:
        """Waits until the work in the background is done."""
        if self._background:
            await asyncio.wait(set(self._background), timeout=timeout)

    def stop_background(self) -> None:
        """Ends what is still under way."""
        for task in self._background:
            task.cancel()

    def _fields(self, turn: Turn) -> dict[str, object]:
        lease = turn.lease
        return {
            'task_id': lease.task_id,
            'owner': lease.owner,
            'token': lease.token,
            'attempt': lease.attempt,
            'session_id': lease.session_id,
        }
