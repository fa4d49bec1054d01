"""Taking over what an ended session left, and bringing it to an end."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    VersionedEvent,
)
from a2a.server.tasks import TaskManager
from a2a.types.a2a_pb2 import Task, TaskState, TaskStatus

from a2a_lease.errors import (
    LeaseConflictError,
    LeaseError,
    SessionEndedError,
)
from a2a_lease.model import LeaseRequest, LeaseState
from a2a_lease.outage import is_outage, pauses
from a2a_lease.recovery.claim import Claim
from a2a_lease.recovery.outcome import Cause, failed_event, running_event
from a2a_lease.recovery.policy import Fail, Leave, RunAgain
from a2a_lease.recovery.room import Room
from a2a_lease.turns.call_context import with_hold
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.marks import is_terminal, lease_settled, rests
from a2a_lease.turns.push_sender import outcome_event
from a2a_lease.turns.record import TurnRecord
from a2a_lease.turns.stopping import stop


if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Coroutine,
        Generator,
        Iterable,
        Sequence,
    )

    from a2a.server.cluster import TaskEventStream, VersionedTaskStore
    from a2a.server.tasks import PushNotificationConfigStore

    from a2a_lease.model import Session, TaskLease
    from a2a_lease.recovery.policy import RecoveryPolicy
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.replica import Replica
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.turns.codec import ContextCodec
    from a2a_lease.turns.push_sender import LeasedPushSender
    from a2a_lease.turns.running import Turns
    from a2a_lease.turns.turn import Turn


logger = logging.getLogger(__name__)

_SET_ASIDE = 1.0
_LONGEST_SET_ASIDE = 300.0
_SWEEPS_FOR_OTHERS = 3
_CONFLICTS = 5
"""How often another writer may be faster before that is an error."""
_NOT_STORED = (
    'The server that worked on this task stopped before it was finished, and '
    'its request was not kept, so that it cannot go on. Please start again.'
)
_STILL_RUNS = (
    'The server lost touch with the agent that works on this task and could '
    'not stop it. Please start again.'
)


class RunTurn(Protocol):
    """Runs a turn that was taken over, through the request handler."""

    async def __call__(self, turn: Turn, record: TurnRecord) -> None:
        """Returns when it has ended, or could not begin."""


class Recovery:
    """Recovers abandoned tasks, several at a time, on the server's loop."""

    def __init__(
        self,
        *,
        turns: Turns,
        replica: Replica,
        task_store: VersionedTaskStore,
        event_stream: TaskEventStream,
        push: LeasedPushSender,
        push_config_store: PushNotificationConfigStore | None,
        codec: ContextCodec,
        policy: RecoveryPolicy,
        settings: LeaseSettings,
        clock: Clock,
        run_turn: RunTurn,
        is_closed: Callable[[], bool],
    ) -> None:
        self._turns = turns
        self._store = turns.store
        self._service = turns.service
        self._replica = replica
        self._task_store = task_store
        self._event_stream = event_stream
        self._push = push
        self._push_config_store = push_config_store
        self._codec = codec
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._ended: dict[str, Session] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._run_turn = run_turn
        self._is_closed = is_closed
        self._room = Room(settings.run_again_limit)
        self._claims: set[Claim] = set()
        """What is still to be decided."""
        self._at_hand: Counter[str] = Counter()
        """How many here look after each task."""
        self._may_have_claimed = False
        """Whether the answer to a claim was lost, which may have landed."""
        self._waiting: dict[asyncio.Task[None], Claim] = {}
        self._aside: set[Claim] = set()
        """What failed, and is tried again after a while."""
        self._not_busy = 0
        """Recoveries that wait, or whose turn runs."""
        self._thorough_at = 0.0
        self._claims_at = 0.0
        """When this replica may claim again."""
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._round: asyncio.Task[None] | None = None
        turns.dead_turns = self

    def start(self) -> None:
        """Begins to sweep."""
        self._thorough_at = self._clock.monotonic() + self._settings.ttl
        self._round = asyncio.create_task(self._sweep())

    async def stop(self, *, timeout: float) -> dict[str, int]:
        """Claims nothing more, and lets what is under way come to its end.

        Returns:
            What did not, as task ids and the tokens of their leases.
        """
        if self._round is not None:
            await stop({self._round})
            self._round = None
        if self._working:
            await asyncio.wait(set(self._working), timeout=timeout)
        left = set(self._working)
        for task in left:
            task.cancel()
        if left:
            # What had yet to begin is among the claims again after that.
            await asyncio.wait(left, timeout=timeout)
        return _tokens(self._claims)

    async def give_back(self) -> None:
        """Leaves to others what only waits here, since this replica ends."""
        waiting = dict(self._waiting)
        await stop(waiting)
        if not waiting:
            return
        try:
            await self._replica.hand_over(_tokens(waiting.values()))
        except Exception as error:  # noqa: BLE001 - the shutdown goes on
            logger.warning(
                'What waits here is left to others when the session is '
                'closed: %s',
                error,
            )
            return
        self._claims -= set(waiting.values())

    def sessions_ended(self, sessions: Sequence[Session]) -> None:
        """Notes sessions that left something. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._note_ended, sessions)

    def _note_ended(self, sessions: Iterable[Session]) -> None:
        self._ended = {session.id: session for session in sessions}
        self._wake.set()

    async def _sweep(self) -> None:
        waits = pauses(
            first=self._settings.sweep_interval,
            longest=max(self._settings.sweep_interval, self._settings.ttl / 4),
        )
        while True:
            pause = self._settings.sweep_interval
            try:
                await self.run_once()
            except Exception as error:
                pause = next(waits)
                if is_outage(error):
                    logger.warning(
                        'The sweep could not reach the database; it goes on '
                        'in %.1f s: %s',
                        pause,
                        error,
                    )
                else:
                    logger.exception(
                        'A round of the sweep failed; it goes on in %.1f s.',
                        pause,
                    )
            else:
                waits = pauses(
                    first=self._settings.sweep_interval,
                    longest=max(
                        self._settings.sweep_interval, self._settings.ttl / 4
                    ),
                )
            self._wake.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def run_once(self) -> None:
        """One round: own dead turns, what ended sessions left, lost ends."""
        self._turns.check()
        unnoted = self._turns.unnoted()
        if unnoted:
            await self._store.note_stored(self._service, unnoted)
            self._turns.noted(unnoted)
        if self._may_have_claimed:
            await self._find_claims()
        if self._ended:
            await self._claim(self._ended)
        if self._clock.monotonic() >= self._thorough_at:
            await self._claim(None)
            self._thorough_at = self._clock.monotonic() + self._settings.ttl

    async def _claim(self, ended: dict[str, Session] | None) -> None:
        session = self._replica.session
        if session is None or not session.fresh():
            return
        if self._clock.monotonic() < self._claims_at:
            return
        if self._turns.handing_over:
            # It would take back what it leaves to others.
            return
        room = (
            self._settings.recovery_limit - len(self._working) + self._not_busy
        )
        if self._policy.may_run_again:
            # What this replica cannot run soon stays for others.
            if self._is_closed():
                return
            room = min(room, self._room.left - self._pending)
        if room <= 0:
            return
        try:
            claimed = await self._store.claim(
                self._service,
                session_id=session.id,
                limit=room,
                ended=list(ended) if ended is not None else None,
            )
        except SessionEndedError:
            return
        except Exception:
            self._may_have_claimed = True
            raise
        for one in claimed:
            self._begin(Claim.of_ended(self._store, one, session=session))
        if ended is not None and len(claimed) < room:
            for session_id in list(ended):
                if await self._store.forget_session(session_id):
                    self._ended.pop(session_id, None)

    async def _find_claims(self) -> None:
        """Takes in what was claimed without an answer."""
        session = self._replica.session
        if (
            session is None
            or not session.fresh()
            or self._turns.handing_over
            or self._is_closed()
        ):
            return
        at_hand = self._tasks_at_hand()
        claimed = await self._store.claimed_by(self._service, session.id)
        at_hand |= self._tasks_at_hand()
        self._may_have_claimed = False
        for one in claimed:
            if one.lease.task_id in at_hand:
                # Perhaps under another token; it is seen when that is over.
                self._may_have_claimed = True
            else:
                self._begin(Claim.of_ended(self._store, one, session=session))

    def _tasks_at_hand(self) -> set[str]:
        return {claim.lease.task_id for claim in self._claims} | set(
            self._at_hand
        )

    @contextmanager
    def _looking_after(self, task_id: str) -> Generator[None]:
        self._at_hand[task_id] += 1
        try:
            yield
        finally:
            self._at_hand[task_id] -= 1
            if not self._at_hand[task_id]:
                del self._at_hand[task_id]

    def adopt(self, turn: Turn) -> None:
        """Recovers a turn that died here."""
        self._spawn(self._adopt(turn))

    async def _adopt(self, turn: Turn) -> None:
        with self._looking_after(turn.lease.task_id):
            await self._reclaim_and_recover(turn)

    async def _reclaim_and_recover(self, turn: Turn) -> None:
        lease = turn.lease
        for pause in pauses():
            if turn.session.ended:
                return  # Whoever fenced this replica recovers it.
            try:
                reclaimed = await self._store.reclaim(
                    self._service,
                    lease.task_id,
                    token=lease.token,
                    session_id=turn.session.id,
                )
                break
            except Exception as error:
                if not is_outage(error):
                    raise
            await asyncio.sleep(pause)
        if reclaimed is None:
            return
        await self._recover(
            Claim(
                self._store,
                lease=reclaimed,
                session=turn.session,
                cause=(
                    Cause.AGENT_SILENT
                    if turn.loss is Loss.SILENT
                    else Cause.TURN_DIED
                ),
                from_session=turn.session.id,
                ended=turn.ended,
            )
        )

    def take_up(self, turn: Turn) -> None:
        """Looks after a task that was saved by a turn that had lost it."""
        self._spawn(self._take_up(turn))

    async def _take_up(self, turn: Turn) -> None:
        with self._looking_after(turn.lease.task_id):
            await self._acquire_and_recover(turn)

    async def _acquire_and_recover(self, turn: Turn) -> None:
        lease = turn.lease
        acquire_id = uuid.uuid4().hex
        for pause in pauses(
            first=self._settings.sweep_interval, longest=self._settings.ttl
        ):
            try:
                found, may_be_acquired = await self._store.holder(
                    self._service, lease.task_id
                )
                if found is not None and found.acquire_id == acquire_id:
                    # The answer to that was lost.
                    claim = await self._reclaim(turn, found)
                    if claim is not None:
                        await self._recover(claim)
                    return
                if found is not None and found.state is LeaseState.RECOVERING:
                    # It may be about to let the lease go without a save.
                    pass
                elif not may_be_acquired or (
                    found is not None and found.state is not LeaseState.FREE
                ):
                    return  # Somebody looks after the task.
                else:
                    stored = await self._task_store.get(
                        lease.task_id, turn.context
                    )
                    if stored is None or rests(stored.task):
                        return
                    claim = await self._acquire(turn, found, acquire_id)
                    if claim is not None:
                        await self._recover(claim)
                        return
            except (LeaseConflictError, SessionEndedError):
                logger.debug('Taking up a task is tried again.', exc_info=True)
            except Exception as error:
                if not is_outage(error):
                    raise
            with self._letting_others_work():
                await asyncio.sleep(pause)

    async def _acquire(
        self, turn: Turn, found: TaskLease | None, acquire_id: str
    ) -> Claim | None:
        session = self._replica.session
        if session is None or session.ended:
            return None
        lease = turn.lease
        taken = await self._store.acquire(
            LeaseRequest(
                service=self._service,
                task_id=lease.task_id,
                context_id=lease.context_id,
                owner=lease.owner,
                session_id=session.id,
                acquire_id=acquire_id,
                expected_token=found.token if found is not None else None,
                before=lease.before,
                call_context=lease.call_context,
            )
        )
        return await self._reclaim(turn, taken)

    async def _reclaim(self, turn: Turn, taken: TaskLease) -> Claim | None:
        session = self._replica.session
        if session is None or session.id != taken.session_id:
            return None
        landed = taken.state is LeaseState.RECOVERING
        reclaimed = await self._store.reclaim(
            self._service,
            taken.task_id,
            token=taken.token - landed,
            session_id=session.id,
        )
        if reclaimed is None:
            return None
        return Claim(
            self._store,
            lease=reclaimed,
            session=session,
            cause=Cause.REPLICA_LOST,
            from_session=turn.session.id,
        )

    def _begin(self, claim: Claim) -> None:
        # Now, not when its task first runs: the next claim counts it.
        self._claims.add(claim)
        self._spawn(self._recover(claim))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            logger.error('A recovery failed.', exc_info=task.exception())

    async def _recover(self, claim: Claim) -> None:
        """Brings one task to its end, however often that must be tried.

        What fails for good is set aside, ever longer, and leaves its place to
        the others meanwhile.
        """
        with self._looking_after(claim.lease.task_id):
            await self._recover_in_the_end(claim)

    async def _recover_in_the_end(self, claim: Claim) -> None:
        self._claims.add(claim)
        tries = 0
        for pause in pauses(first=_SET_ASIDE, longest=_LONGEST_SET_ASIDE):
            try:
                wait = await self._recover_once(claim)
                if wait is None:
                    self._claims.discard(claim)
                    return
                tries = 0
            except ConcurrentTaskModificationError:
                if claim.loss is not None:
                    self._claims.discard(claim)
                    self._log(claim, 'Another replica took over')
                    return
                # The old owner's last save came first; judge again.
                tries += 1
                wait = 0.0 if tries < _CONFLICTS else pause
            except Exception as error:
                tries += 1
                wait = pause
                if claim.session.ended:
                    self._claims.discard(claim)
                    return
                if is_outage(error):
                    logger.debug('A recovery waits.', exc_info=True)
                else:
                    logger.exception(
                        'Task %s cannot be recovered; it is set aside and '
                        'tried again in %.0f s (try %d). The error below '
                        'tells whether the policy fails, or what is stored '
                        'of the task cannot be used.',
                        claim.lease.task_id,
                        pause,
                        tries,
                        extra=self._fields(claim, action='set_aside'),
                    )
            if wait:
                if tries:
                    self._aside.add(claim)
                try:
                    with self._letting_others_work(claim):
                        await asyncio.sleep(wait)
                finally:
                    self._aside.discard(claim)
            if claim.session.ended:
                self._claims.discard(claim)
                return

    @property
    def _pending(self) -> int:
        """How many may still run again here, delayed ones too."""
        return sum(
            not claim.session.ended for claim in self._claims - self._aside
        )

    @contextmanager
    def _letting_others_work(
        self, waiting: Claim | None = None
    ) -> Generator[None]:
        this = asyncio.current_task()
        if this is not None and waiting is not None:
            self._waiting[this] = waiting
        self._not_busy += 1
        self._wake.set()
        try:
            yield
        finally:
            self._not_busy -= 1
            self._waiting.pop(this, None)  # type: ignore[arg-type]

    async def _recover_once(self, claim: Claim) -> float | None:
        """Decides about one task, and does it.

        Returns:
            None if that was it, or the seconds after which to decide again.
        """
        lease = claim.lease
        context = with_hold(self._codec.load(lease.call_context), claim)
        manager = TaskManager(
            task_store=self._task_store,
            context=context,
            task_id=lease.task_id,
            context_id=None,
            initial_message=None,
        )
        task = await manager.get_task()
        if task is None:
            if not await self._expected(claim):
                await self._release(claim, 'There is no task to recover')
                return None
        elif lease_settled(task, lease):
            await self._push_again(claim, task)
            return None
        elif claim.was_idle:
            # Its agent had returned in good order, and so did its replica.
            await self._let_go(claim, LeaseState.IDLE)
            return None
        decision = self._policy.decide(lease, task)
        if isinstance(decision, RunAgain):
            return await self._run_again(claim, manager, task, decision)
        if isinstance(decision, Fail):
            await self._fail(claim, manager, task, decision.reason)
        elif isinstance(decision, Leave):
            await self._free(claim, 'The policy leaves it as it is', warn=True)
        else:
            raise LeaseError(
                f'{type(self._policy).__name__}.decide() returned '
                f'{decision!r}, not Fail, RunAgain or Leave.'
            )
        return None

    async def _expected(self, claim: Claim) -> bool:
        """Whether somebody waits for a task that was never stored."""
        if claim.lease.task_stored:
            return False
        if self._policy.may_run_again and (await self._record(claim))[0]:
            return True
        return self._push_config_store is not None and bool(
            await self._push_config_store.get_info_for_dispatch(
                claim.lease.task_id
            )
        )

    # Running the turn again.

    async def _record(
        self, claim: Claim
    ) -> tuple[TurnRecord | None, bytes | None]:
        """Returns how the turn began, and how far it had come."""
        lease = claim.lease
        kept = await self._store.stored_turn(
            self._service, lease.task_id, token=lease.token
        )
        if kept is None:
            claim.lose(Loss.TAKEN_OVER)
            raise ConcurrentTaskModificationError(lease.task_id)
        record = TurnRecord.load(kept.turn) if kept.turn is not None else None
        return record, kept.checkpoint

    async def _run_again(
        self,
        claim: Claim,
        manager: TaskManager,
        task: Task | None,
        decision: RunAgain,
    ) -> float | None:
        record, checkpoint = await self._record(claim)
        if record is None:
            logger.warning(
                'Task %s cannot run again, since its request was not stored; '
                'it fails.',
                claim.lease.task_id,
                extra=self._fields(claim, action='fail'),
            )
            await self._fail(claim, manager, task, _NOT_STORED)
            return None
        if not await self._has_stopped(claim):
            await self._fail(claim, manager, task, _STILL_RUNS)
            return None
        if not await self._turns.wait_gone(
            claim.lease.task_id, timeout=self._settings.stop_timeout
        ):
            # This replica was declared dead, and its agent ignores that; on
            # another one the turn can begin.
            self._claims_at = (
                self._clock.monotonic()
                + _SWEEPS_FOR_OTHERS * self._settings.sweep_interval
            )
            await self._replica.hand_over(_tokens([claim]))
            return None
        left_well = claim.cause is Cause.REPLICA_CLOSED
        if decision.after and not left_well and not claim.waited:
            claim.waited = True
            return decision.after
        async with AsyncExitStack() as stack:
            with self._letting_others_work(claim):
                await stack.enter_async_context(
                    self._room.place(apart=decision.apart)
                )
            if self._is_closed():
                await self._replica.hand_over(_tokens([claim]))
                return None
            manager.invalidate()
            task = await manager.get_task()
            if task is not None and lease_settled(task, claim.lease):
                return 0.0
            stored, pushing = await self._take_over(
                claim, manager, task, record
            )
            stack.push_async_callback(asyncio.wait, {pushing})
            turn = self._turns.new_turn(
                context=self._codec.load(claim.lease.call_context),
                owner=claim.lease.owner,
                kept_context=claim.lease.call_context,
            )
            turn.run_again(
                claim,
                record=record,
                stored=stored,
                version=manager.current_version,
                checkpoint=checkpoint,
            )
            # From here on the turn lets the lease go.
            self._claims.discard(claim)
            error: Exception = LeaseError('The turn did not begin.')
            try:
                with self._letting_others_work():
                    await self._run_turn(turn, record)
            except Exception as raised:
                if turn.agent is not None:
                    raise
                error = raised
            finally:
                if turn.agent is None:
                    self._claims.add(claim)
            if turn.agent is None:
                await self._count_as_run(claim, turn, error)
                return 0.0
        return None

    async def _count_as_run(
        self, claim: Claim, turn: Turn, error: Exception
    ) -> None:
        """Counts a run that failed before the agent began.

        Otherwise what always fails, a request that cannot be built again for
        instance, would be tried for ever.

        Raises:
            Exception: The error itself, if it says nothing about the turn.
        """
        lease = claim.lease
        if (
            turn.loss is not None
            or turn.sent_back
            or claim.session.ended
            or self._is_closed()
            or is_outage(error)
        ):
            raise error
        logger.error(
            'Task %s could not run again: its turn failed before the agent '
            'began. That counts as an attempt.',
            lease.task_id,
            exc_info=error,
            extra=self._fields(claim, action='run_again'),
        )
        try:
            reclaimed = await self._store.reclaim(
                self._service,
                lease.task_id,
                token=lease.token,
                session_id=claim.session.id,
            )
        except Exception:
            self._may_have_claimed = True
            raise
        if reclaimed is None:
            claim.lose(Loss.TAKEN_OVER)
            raise ConcurrentTaskModificationError(lease.task_id)
        claim.failed_to_begin(reclaimed)

    async def _has_stopped(self, claim: Claim) -> bool:
        """Whether the run before has ended, if that was on this replica."""
        if claim.ended is None:
            return True
        try:
            async with asyncio.timeout(self._settings.stop_timeout):
                await claim.ended.wait()
        except TimeoutError:
            return False
        return True

    async def _take_over(
        self,
        claim: Claim,
        manager: TaskManager,
        task: Task | None,
        record: TurnRecord,
    ) -> tuple[Task, asyncio.Task[None]]:
        """Saves that the turn runs again: the old owner saves nothing more.

        Returns:
            The task as it is stored now, and the push that tells of it: what
            the turn pushes waits for that, and the agent does not.
        """
        lease = claim.lease
        # It is told once, though what follows may meet an outage.
        event = claim.told or running_event(
            claim, context_id=task.context_id if task else lease.context_id
        )
        if task is None:
            task = Task(
                id=lease.task_id,
                context_id=lease.context_id,
                status=event.status,
                history=[record.message],
                metadata=event.metadata,
            )
            await manager.save_task_event(task)
            claim.told = event
            await self._store.note_stored(
                self._service, {lease.task_id: lease.token}
            )
        elif claim.told is None:
            await manager.save_task_event(event)
            claim.told = event
        if not await self._store.move(
            self._service,
            lease.task_id,
            token=lease.token,
            state=LeaseState.RUNNING,
        ):
            claim.lose(Loss.TAKEN_OVER)
            raise ConcurrentTaskModificationError(lease.task_id)
        await self._event_stream.publish(
            lease.task_id,
            VersionedEvent(event=event, version=manager.current_version),
        )
        pushing = asyncio.create_task(
            self._push.send_outcome(lease.task_id, event)
        )
        self._log(claim, 'It runs again', warn=True)
        stored = await manager.get_task()
        return (stored if stored is not None else task), pushing

    # Ending the task.

    async def _fail(
        self,
        claim: Claim,
        manager: TaskManager,
        task: Task | None,
        reason: str,
    ) -> None:
        lease = claim.lease
        if task is None:
            task = Task(
                id=lease.task_id,
                context_id=lease.context_id,
                status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
            )
            await manager.save_task_event(task)
        event = failed_event(claim, context_id=task.context_id, reason=reason)
        await manager.save_task_event(event)
        await self._event_stream.publish(
            lease.task_id,
            VersionedEvent(event=event, version=manager.current_version),
        )
        await self._push.send_outcome(lease.task_id, event)
        await self._release(claim, 'It ended as FAILED', warn=True)

    async def _push_again(self, claim: Claim, task: Task) -> None:
        """Lets go a task that did settle; its push may not have been sent."""
        lease = claim.lease
        await self._push.send_outcome(lease.task_id, outcome_event(task))
        if is_terminal(task):
            await self._release(claim, 'It had ended')
            return
        await self._free(claim, 'It had paused')

    async def _free(
        self, claim: Claim, what: str, *, warn: bool = False
    ) -> None:
        await self._let_go(claim, LeaseState.FREE)
        self._log(claim, what, warn=warn)

    async def _let_go(self, claim: Claim, state: LeaseState) -> None:
        lease = claim.lease
        if await self._store.move(
            self._service, lease.task_id, token=lease.token, state=state
        ):
            return
        stored = await self._store.get(self._service, lease.task_id)
        if stored is None or stored.token != lease.token:
            claim.lose(Loss.TAKEN_OVER)
        # Or it was canceled meanwhile: judge again.
        raise ConcurrentTaskModificationError(lease.task_id)

    async def _release(
        self, claim: Claim, what: str, *, warn: bool = False
    ) -> None:
        lease = claim.lease
        await self._store.release(
            self._service, lease.task_id, token=lease.token
        )
        self._log(claim, what, warn=warn)

    def _log(self, claim: Claim, what: str, *, warn: bool = False) -> None:
        logger.log(
            logging.WARNING if warn else logging.INFO,
            'Task %s was abandoned by session %s (%s). %s.',
            claim.lease.task_id,
            claim.from_session,
            claim.cause.value,
            what,
            extra=self._fields(claim, action=what),
        )

    def _fields(self, claim: Claim, *, action: str) -> dict[str, object]:
        lease = claim.lease
        return {
            'task_id': lease.task_id,
            'owner': lease.owner,
            'token': lease.token,
            'attempt': lease.attempt,
            'from_session': claim.from_session,
            'session_id': lease.session_id,
            'silence': claim.silence,
            'cause': claim.cause.value,
            'action': action,
        }


def _tokens(claims: Iterable[Claim]) -> dict[str, int]:
    return {claim.lease.task_id: claim.lease.token for claim in claims}
