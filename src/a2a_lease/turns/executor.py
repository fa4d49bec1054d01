"""The agent executor as the SDK sees it: every run is a turn under lease."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.types.a2a_pb2 import Task
from a2a.utils.errors import A2AError, InternalError

from a2a_lease.errors import (
    LeaseConfigurationError,
    LeaseConflictError,
    LeaseError,
)
from a2a_lease.turns.call_context import hold_of
from a2a_lease.turns.current import set_current_lease
from a2a_lease.turns.event_queue import ClosedQueue, TurnQueue
from a2a_lease.turns.turn import Ending, Turn


if TYPE_CHECKING:
    from a2a.server.events import EventQueue

    from a2a_lease.settings import LeaseSettings
    from a2a_lease.turns.admission import Admission
    from a2a_lease.turns.running import Turns


logger = logging.getLogger(__name__)

_UNTIL_SURE = 0.05
"""Seconds between looks whether a beat has landed."""


class LeasedExecutor(AgentExecutor):
    """Wraps the user's executor."""

    def __init__(
        self,
        inner: AgentExecutor,
        *,
        admission: Admission,
        turns: Turns,
        settings: LeaseSettings,
    ) -> None:
        self._inner = inner
        self._admission = admission
        self._turns = turns
        self._settings = settings
        turns.cancel_agent = self.cancel_lost

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Forwards what this SDK version knows and this class does not."""
        return getattr(self._inner, name)

    async def execute(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Acquires, runs the agent, and lets go.

        An exception that is not the agent's own must not leave here: the SDK
        would save the task as FAILED, whoever runs it now.

        Raises:
            asyncio.CancelledError: The turn did not begin, or it lost its
                lease.
        """
        turn = hold_of(context.call_context)
        if not isinstance(turn, Turn):
            raise LeaseConfigurationError(
                'execute() was reached without a turn: call the handler '
                'through on_message_send or on_message_send_stream.'
            )
        if turn.again is None:
            try:
                await self._begin(turn, context)
            finally:
                self._turns.unreserve(turn)
        else:
            self._turns.begin(turn, turn.lease.task_id)
        task = context.current_task
        if turn.again is not None and task is not None:
            turn.stored_task = Task()
            turn.stored_task.CopyFrom(task)
            context.current_task = turn.again.as_it_began(task)
        queue = TurnQueue(event_queue, turn)
        turn.is_deaf = queue.closed
        turn.request_context = context
        agent = asyncio.create_task(self._run_agent(turn, context, queue))
        turn.agent = agent
        if turn.loss is not None:
            agent.cancel()
        await _outlast(agent)
        canceled = False
        if agent.cancelled():
            turn.ending = Ending.CANCELED
        elif agent.exception() is not None:
            turn.ending = Ending.RAISED
        else:
            try:
                await turn.drained()
                turn.ending = Ending.RETURNED
            except asyncio.CancelledError:
                # Its last words are still to be saved, and the cancel too.
                canceled = True
                turn.ending = Ending.CANCELED
        self._turns.ended(turn)
        self._turns.conclude(turn)
        if turn.loss is not None or canceled:
            raise asyncio.CancelledError
        agent.result()

    async def _begin(self, turn: Turn, context: RequestContext) -> None:
        """Acquires the lease, or refuses the turn without a trace."""
        task_id = context.task_id or ''
        try:
            await self._admission.acquire(turn, context)
        except LeaseConflictError as error:
            turn.send_back()
            raise asyncio.CancelledError from error
        except A2AError as error:
            turn.refuse(error)
            raise asyncio.CancelledError from error
        except LeaseError as error:
            logger.error(
                'Task %s: its turn could not begin, and the task is '
                'untouched: %s',
                task_id,
                error,
                extra={'task_id': task_id},
            )
            turn.refuse(
                InternalError(message=f'The message was not delivered: {error}')
            )
            raise asyncio.CancelledError from error
        except Exception as error:
            logger.exception(
                'Task %s: its turn could not begin, since its lease could '
                'not be acquired. The task is untouched.',
                task_id,
                extra={'task_id': task_id},
            )
            turn.refuse(
                InternalError(
                    message='The message was not delivered, since the lease '
                    'on the task could not be acquired. Send it again.'
                )
            )
            raise asyncio.CancelledError from error
        self._turns.begin(turn, task_id)

    async def _run_agent(
        self, turn: Turn, context: RequestContext, queue: TurnQueue
    ) -> None:
        set_current_lease(turn)
        # A process that was paused since the acquire may have been declared
        # dead; it is told with its next beat.
        while not turn.session.fresh():  # noqa: ASYNC110 - another thread writes it
            await asyncio.sleep(_UNTIL_SURE)
        await self._inner.execute(context, queue)

    async def cancel(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Lets the agent end its task, as the SDK asks."""
        turn = hold_of(context.call_context)
        if isinstance(turn, Turn):
            turn.cancel_called = True
            event_queue = TurnQueue(event_queue, turn)
        await self._inner.cancel(context, event_queue)

    async def cancel_lost(self, turn: Turn) -> None:
        """Tells the agent of a cancel that came through another replica."""
        context = turn.request_context
        if context is None or turn.cancel_called:
            return
        turn.cancel_called = True
        try:
            async with asyncio.timeout(self._settings.stop_timeout):
                await self._inner.cancel(
                    RequestContext(
                        call_context=context.call_context,
                        task_id=context.task_id,
                        context_id=context.context_id,
                        task=context.current_task,
                    ),
                    ClosedQueue(),
                )
        except Exception:
            logger.exception(
                'Task %s was canceled through another replica, and '
                'AgentExecutor.cancel() raised here.',
                turn.lease.task_id,
                extra={'task_id': turn.lease.task_id},
            )


async def _outlast(agent: asyncio.Task[None]) -> None:
    """Waits for the agent to end, and passes cancellations on to it."""
    while not agent.done():
        try:
            await asyncio.wait({agent})
        except asyncio.CancelledError:
            agent.cancel()
