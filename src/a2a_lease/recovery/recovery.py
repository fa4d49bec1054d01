"""Taking over what an ended session left, and bringing it to an end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    VersionedEvent,
)
from a2a.server.tasks import TaskManager
from a2a.types.a2a_pb2 import Task, TaskState, TaskStatus

from a2a_lease.errors import SessionEndedError
from a2a_lease.model import LeaseState
from a2a_lease.recovery.claim import Claim
from a2a_lease.recovery.outcome import Cause, failed_event
from a2a_lease.recovery.policy import Fail
from a2a_lease.turns.call_context import with_hold
from a2a_lease.turns.marks import is_terminal, lease_settled
from a2a_lease.turns.outage import is_outage, pauses
from a2a_lease.turns.push_sender import outcome_event
from a2a_lease.turns.stopping import stop


if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from a2a.server.cluster import TaskEventStream, VersionedTaskStore
    from a2a.server.tasks import PushNotificationConfigStore

    from a2a_lease.model import Session
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
        self._set_aside = 0
        self._thorough_at = 0.0
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._round: asyncio.Task[None] | None = None
        turns.dead_turns = self

    def start(self) -> None:
        """Begins to sweep."""
        self._thorough_at = self._clock.monotonic() + self._settings.ttl
        self._round = asyncio.create_task(self._sweep())

    async def stop(self, *, timeout: float) -> None:
        """Claims nothing more, and lets what is under way come to its end."""
        if self._round is not None:
            await stop({self._round})
            self._round = None
        if self._working:
            await asyncio.wait(set(self._working), timeout=timeout)
        for task in self._working:
            task.cancel()

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
        if self._ended:
            await self._claim(self._ended)
        if self._clock.monotonic() >= self._thorough_at:
            await self._claim(None)
            self._thorough_at = self._clock.monotonic() + self._settings.ttl

    async def _claim(self, ended: dict[str, Session] | None) -> None:
        session = self._replica.session
        if session is None or not session.fresh():
            return
        room = (
            self._settings.recovery_limit - len(self._working) + self._set_aside
        )
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
        for one in claimed:
            self._begin(
                Claim.of_ended(
                    self._store,
                    one,
                    session=session,
                    ended=self._ended.get(one.previous_session_id),
                )
            )
        if ended is not None and len(claimed) < room:
            for session_id in list(ended):
                if await self._store.forget_session(session_id):
                    self._ended.pop(session_id, None)

    def adopt(self, turn: Turn) -> None:
        """Recovers a turn that died here."""
        self._spawn(self._adopt(turn))

    async def _adopt(self, turn: Turn) -> None:
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
                cause=Cause.TURN_DIED,
                from_session=turn.session.id,
            )
        )

    def _begin(self, claim: Claim) -> None:
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
        tries = 0
        for pause in pauses(first=_SET_ASIDE, longest=_LONGEST_SET_ASIDE):
            try:
                await self._recover_once(claim)
                return
            except ConcurrentTaskModificationError:
                if claim.loss is not None:
                    self._log(claim, 'Another replica took over')
                    return
                # The old owner's last save came first; judge again.
                continue
            except Exception as error:
                tries += 1
                if claim.session.ended:
                    return
                if is_outage(error):
                    logger.debug('A recovery waits.', exc_info=True)
                else:
                    logger.exception(
                        'Task %s cannot be recovered; it is set aside and '
                        'tried again in %.0f s (try %d). Look at what is '
                        'stored of it.',
                        claim.lease.task_id,
                        pause,
                        tries,
                        extra=self._fields(claim, action='set_aside'),
                    )
            self._set_aside += 1
            self._wake.set()
            try:
                await asyncio.sleep(pause)
            finally:
                self._set_aside -= 1
            if claim.session.ended:
                return

    async def _recover_once(self, claim: Claim) -> None:
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
                return
        elif lease_settled(task, lease):
            await self._push_again(claim, task)
            return
        elif claim.was_idle:
            # Its agent had returned in good order, and so did its replica.
            await self._store.move(
                self._service,
                lease.task_id,
                token=lease.token,
                state=LeaseState.IDLE,
            )
            return
        decision = self._policy.decide(lease, task)
        if isinstance(decision, Fail):
            await self._fail(claim, manager, task, decision)
        else:
            await self._free(claim, 'The policy leaves it as it is')

    async def _expected(self, claim: Claim) -> bool:
        """Whether somebody waits for a task that was never stored."""
        if claim.lease.task_stored or self._push_config_store is None:
            return False
        return bool(
            await self._push_config_store.get_info_for_dispatch(
                claim.lease.task_id
            )
        )

    async def _fail(
        self,
        claim: Claim,
        manager: TaskManager,
        task: Task | None,
        decision: Fail,
    ) -> None:
        lease = claim.lease
        if task is None:
            task = Task(
                id=lease.task_id,
                context_id=lease.context_id,
                status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
            )
            await manager.save_task_event(task)
        event = failed_event(
            lease=lease,
            context_id=task.context_id,
            reason=decision.reason,
            cause=claim.cause,
            silence=claim.silence,
            from_session=claim.from_session,
        )
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

    async def _free(self, claim: Claim, what: str) -> None:
        await self._store.move(
            self._service,
            claim.lease.task_id,
            token=claim.lease.token,
            state=LeaseState.FREE,
        )
        self._log(claim, what)

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
