"""One turn at a time: who may begin, who waits, who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any

from a2a.server.agent_execution import RequestContextBuilder
from a2a.utils.errors import InternalError, UnsupportedOperationError

from a2a_lease.errors import (
    LeaseConfigurationError,
    LeaseConflictError,
    SessionEndedError,
)
from a2a_lease.model import LeaseRequest, LeaseState
from a2a_lease.outage import is_outage, pauses
from a2a_lease.turns.call_context import hold_of, with_hold
from a2a_lease.turns.marks import mark_of
from a2a_lease.turns.record import TurnRecord
from a2a_lease.turns.turn import Turn


if TYPE_CHECKING:
    from a2a.server.agent_execution import RequestContext
    from a2a.server.context import ServerCallContext
    from a2a.types.a2a_pb2 import SendMessageRequest, Task

    from a2a_lease.model import TaskLease
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.replica import Replica
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.turns.running import Turns


logger = logging.getLogger(__name__)

_FIRST_LOOK = 0.02
_LONGEST_LOOK = 0.5


class Admission:
    """Lets a turn begin when no other turn of its task is under way."""

    def __init__(
        self,
        *,
        turns: Turns,
        replica: Replica,
        settings: LeaseSettings,
        clock: Clock,
        keeps_requests: bool,
    ) -> None:
        self._keeps_requests = keeps_requests
        self._turns = turns
        self._replica = replica
        self._settings = settings
        self._clock = clock
        self.closed = False
        self._under_way = 0
        self._settled = asyncio.Event()

    def close(self) -> None:
        """Admits nothing more."""
        self.closed = True

    async def wait_until_settled(self, *, timeout: float) -> None:
        """Waits until no acquire is under way, after `close`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._under_way:
                    self._settled.clear()
                    await self._settled.wait()

    def refuse_if_closed(self) -> None:
        """Raises the error that sends a client to another replica."""
        if self.closed:
            raise InternalError(
                message='This replica is shutting down. Send the message '
                'again; another replica will take it.'
            )

    async def wait(self, turn: Turn, task_id: str) -> None:
        """Waits until a turn may acquire the lease on a task.

        No other turn of the task passes here until this one has begun, or its
        request is over.

        Args:
            turn: The turn that is to begin.
            task_id: The task that its message names.

        Raises:
            UnsupportedOperationError: Another turn still runs; the message
                says so.
        """
        for pause in pauses(first=_FIRST_LOOK, longest=_LONGEST_LOOK):
            self.refuse_if_closed()
            left = turn.until - self._clock.monotonic()
            if await self._turns.reserve(turn, task_id, timeout=max(0.0, left)):
                passes = False
                try:
                    passes = await self._may_begin(turn, task_id)
                except Exception as error:
                    if not is_outage(error) or left <= 0:
                        raise
                finally:
                    if not passes:
                        self._turns.unreserve(turn)
                if passes:
                    return
            left = turn.until - self._clock.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(pause, left))
        raise UnsupportedOperationError(
            message=f'Task {task_id} is still working on an earlier message. '
            f'This message waited {self._settings.acquire_timeout:g} seconds '
            f'and was not delivered. Send it again when the task pauses.'
        )

    async def _may_begin(self, turn: Turn, task_id: str) -> bool:
        lease, may_be_acquired = await self._turns.store.holder(
            self._turns.service, task_id
        )
        turn.looked_at = lease
        # Recovery may run again what an ended session left. What its user
        # said is in the lease only, and a message that took the place of that
        # turn would take it along.
        runs_again = (
            self._keeps_requests
            and lease is not None
            and lease.state in (LeaseState.RUNNING, LeaseState.RECOVERING)
        )
        return may_be_acquired and not runs_again

    async def acquire(self, turn: Turn, context: RequestContext) -> None:
        """Takes the lease for a turn that the SDK is about to run.

        Raises:
            LeaseConflictError: Somebody was faster. The turn must wait where
                it is not in the way of the other one, should recovery run
                that here.
            A2AError: It cannot begin; nothing was taken.
        """
        until = turn.until
        acquire_id = uuid.uuid4().hex
        unknown: LeaseRequest | None = None
        self._under_way += 1
        try:
            session = await self._session(until)
            for pause in pauses():
                self.refuse_if_closed()
                request = self._request(turn, context, session, acquire_id)
                try:
                    lease = await self._acquire_once(turn, request)
                except LeaseConflictError:
                    unknown = None
                    raise
                except SessionEndedError:
                    unknown = None
                    session = await self._session(until)
                    acquire_id = uuid.uuid4().hex
                except Exception as error:
                    if not is_outage(error):
                        raise
                    unknown = request
                    if self._clock.monotonic() + pause > until:
                        raise
                    await asyncio.sleep(pause)
                else:
                    unknown = None
                    turn.hold(lease, session)
                    return
        finally:
            self._under_way -= 1
            self._settled.set()
            if unknown is not None:
                # It may have landed, though its answer was lost.
                self._turns.spawn(
                    self._turns.undo(
                        asyncio.ensure_future(
                            self._turns.store.acquire(unknown)
                        ),
                        unknown,
                        turn.context,
                    )
                )

    async def _acquire_once(
        self, turn: Turn, request: LeaseRequest
    ) -> TaskLease:
        acquiring = asyncio.ensure_future(self._turns.store.acquire(request))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            # It may be past its commit: what it takes must not be left.
            self._turns.spawn(
                self._turns.undo(acquiring, request, turn.context)
            )
            raise

    async def _session(self, until: float) -> LiveSession:
        self.refuse_if_closed()
        return await self._replica.open_session(
            timeout=max(0.0, until - self._clock.monotonic())
        )

    def _request(
        self,
        turn: Turn,
        context: RequestContext,
        session: LiveSession,
        acquire_id: str,
    ) -> LeaseRequest:
        task = context.current_task
        looked_at = turn.looked_at
        return LeaseRequest(
            service=self._turns.service,
            task_id=context.task_id or '',
            context_id=context.context_id or '',
            owner=turn.owner,
            session_id=session.id,
            acquire_id=acquire_id,
            expected_token=looked_at.token if looked_at is not None else None,
            before=mark_of(task.status) if task is not None else None,
            call_context=turn.kept_context,
            turn=self._record(turn, context),
        )

    def _record(self, turn: Turn, context: RequestContext) -> bytes | None:
        """Writes down how the turn begins, if it may have to run again."""
        if not self._keeps_requests or turn.params is None:
            return None
        record = TurnRecord.of(
            turn.params,
            task_id=context.task_id or '',
            context_id=context.context_id or '',
            task=context.current_task,
        )
        if record.size <= self._settings.request_limit:
            return record.dump()
        logger.warning(
            'The request of task %s has %d bytes, more than request_limit '
            '(%d), and is not stored: if this replica dies, the task fails.',
            context.task_id,
            record.size,
            self._settings.request_limit,
            extra={'task_id': context.task_id},
        )
        return None


class LeasedContextBuilder(RequestContextBuilder):
    """Wraps the user's builder: a message for a running task waits here.

    Nothing was created for the request yet, so it can be refused without a
    trace.
    """

    def __init__(
        self,
        inner: RequestContextBuilder,
        *,
        admission: Admission,
    ) -> None:
        self._inner = inner
        self._admission = admission

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self._inner, name)

    async def build(
        self,
        context: ServerCallContext,
        params: SendMessageRequest | None = None,
        task_id: str | None = None,
        context_id: str | None = None,
        task: Task | None = None,
    ) -> RequestContext:
        """Builds the request context once its turn may begin."""
        turn = hold_of(context)
        if (
            isinstance(turn, Turn)
            and turn.again is None
            and task_id is not None
        ):
            await self._admission.wait(turn, task_id)
        if turn is not None:
            context = with_hold(context, turn, queued=True)
        request_context = await self._inner.build(
            context=context,
            params=params,
            task_id=task_id,
            context_id=context_id,
            task=task,
        )
        if turn is not None and hold_of(request_context.call_context) is None:
            raise LeaseConfigurationError(
                'The request_context_builder made a call context of its own. '
                'It must pass on the one it is given, or a model_copy() of '
                'it that keeps its state.'
            )
        return request_context
