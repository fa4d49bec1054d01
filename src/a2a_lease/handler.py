"""The request handler: puts the parts together, starts and stops them."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from a2a.server.agent_execution import SimpleRequestContextBuilder
from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    TaskEventStream,
    TaskVersion,
    VersionedEvent,
    VersionedTaskStore,
)
from a2a.server.owner_resolver import resolve_user_scope
from a2a.server.request_handlers import (
    DefaultRequestHandlerV2,
    validate_request_params,
)
from a2a.types.a2a_pb2 import (
    AgentCard,
    SendMessageRequest,
    Task,
    TaskState,
)
from a2a.utils.errors import (
    InternalError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from a2a.utils.task import apply_history_length
from sqlalchemy.exc import DBAPIError

from a2a_lease.errors import LeaseConfigurationError, LeaseError
from a2a_lease.outage import outlast, pauses
from a2a_lease.recovery.policy import FailAbandoned, RecoveryPolicy
from a2a_lease.recovery.recovery import Recovery
from a2a_lease.replica.clock import SYSTEM_CLOCK
from a2a_lease.replica.heartbeat import on_a_thread
from a2a_lease.replica.replica import Replica
from a2a_lease.settings import LeaseSettings
from a2a_lease.shutdown import Shutdown
from a2a_lease.stores.lease_store import LeaseStore
from a2a_lease.stores.schema import LONGEST_ID
from a2a_lease.turns.admission import Admission, LeasedContextBuilder
from a2a_lease.turns.call_context import (
    saved_outcome,
    with_current_hold,
    with_hold,
)
from a2a_lease.turns.codec import ContextCodec, survives
from a2a_lease.turns.event_stream import LeasedEventStream
from a2a_lease.turns.executor import LeasedExecutor
from a2a_lease.turns.following import LocalStream, ends_stream, follow
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.marks import is_terminal, lease_settled
from a2a_lease.turns.push_sender import LeasedPushSender, outcome_event
from a2a_lease.turns.running import Turns
from a2a_lease.turns.stopping import stop
from a2a_lease.turns.task_store import LeasedTaskStore


if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Sequence,
    )
    from types import TracebackType

    from a2a.server.agent_execution import AgentExecutor, RequestContextBuilder
    from a2a.server.cluster import StoredTask
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.server.owner_resolver import OwnerResolver
    from a2a.server.tasks import (
        PushNotificationConfigStore,
        PushNotificationSender,
    )
    from a2a.types.a2a_pb2 import (
        CancelTaskRequest,
        GetTaskRequest,
        ListTasksRequest,
        ListTasksResponse,
        Message,
        SubscribeToTaskRequest,
    )

    from a2a_lease.model import Session, TaskLease
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.turns.record import TurnRecord
    from a2a_lease.turns.turn import Turn


logger = logging.getLogger(__name__)

_TRIES = 6
"""How often tables are created, or a cancel is saved, before the error of it
is raised."""
_LOOK_EVERY = 2.0
"""Seconds between looks at a task whose events come from elsewhere."""


class LeasedRequestHandler(DefaultRequestHandlerV2):
    """The SDK's request handler, with a lease on each task while it runs.

    Takes all that `DefaultRequestHandler` takes, and runs between
    `async with handler:`, which `lifespan` does for Starlette and FastAPI:

        app = FastAPI(lifespan=handler.lifespan)
    """

    # Where time and threads enter; a simulation brings its own.
    _clock: Clock = SYSTEM_CLOCK
    _live = staticmethod(on_a_thread)

    def __init__(
        self,
        agent_executor: AgentExecutor,
        task_store: VersionedTaskStore,
        agent_card: AgentCard,
        *,
        event_stream: TaskEventStream | None = None,
        lease_store: LeaseStore | None = None,
        settings: LeaseSettings | None = None,
        recovery: RecoveryPolicy | None = None,
        context_codec: ContextCodec | None = None,
        owner_resolver: OwnerResolver | None = None,
        service: str | None = None,
        push_config_store: PushNotificationConfigStore | None = None,
        push_sender: PushNotificationSender | None = None,
        request_context_builder: RequestContextBuilder | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Puts the parts together; nothing runs yet.

        Args:
            agent_executor: Your agent.
            task_store: A `VersionedTaskStore` that all replicas share, such
                as the SDK's `VersionedDatabaseTaskStore`.
            agent_card: The card of your agent.
            event_stream: How replicas hear of each other's events, such as
                the SDK's `DatabaseTaskEventStream`.
            lease_store: Where leases live, such as `DatabaseLeaseStore`.
            settings: Times and limits.
            recovery: What becomes of abandoned tasks; `FailAbandoned()` by
                default.
            context_codec: How a task's owner is kept; needed only if your
                `owner_resolver` reads more than the user.
            owner_resolver: The one that your task store uses. By default it
                is asked for it.
            service: What the replicas have in common and other agents on the
                same database have not; the agent card's name by default.
            push_config_store: As for the SDK's handler.
            push_sender: As for the SDK's handler.
            request_context_builder: As for the SDK's handler.
            **options: Whatever else the SDK's handler takes.

        Raises:
            LeaseConfigurationError: The parts cannot work together; the
                message says why, and what to pass instead.
        """
        if not isinstance(task_store, VersionedTaskStore):
            raise LeaseConfigurationError(
                f'task_store must be a VersionedTaskStore, not '
                f'{type(task_store).__name__}: without versions nothing keeps '
                f'a replica that was taken for dead from writing. Use '
                f'VersionedDatabaseTaskStore of a2a.server.cluster.'
            )
        if not isinstance(event_stream, TaskEventStream):
            raise LeaseConfigurationError(
                'event_stream must be given, since replicas hear of the end '
                "of each other's tasks through it. Use "
                'DatabaseTaskEventStream of a2a.server.cluster.'
            )
        if not isinstance(lease_store, LeaseStore):
            raise LeaseConfigurationError(
                f'lease_store must be a LeaseStore, such as '
                f'DatabaseLeaseStore(engine), not {lease_store!r}.'
            )
        if not isinstance(agent_card, AgentCard):
            raise LeaseConfigurationError(
                f'agent_card must be an AgentCard, not {agent_card!r}.'
            )
        self.settings = settings or LeaseSettings()
        if not isinstance(self.settings, LeaseSettings):
            raise LeaseConfigurationError(
                f'settings must be LeaseSettings(...), not {settings!r}.'
            )
        self._policy = recovery or FailAbandoned()
        _check_policy(self._policy)
        self.service = (service or agent_card.name).strip()
        if not self.service:
            raise LeaseConfigurationError(
                'The agent card has no name; pass service=, which tells the '
                'leases of this agent from those of others.'
            )
        if len(self.service) > LONGEST_ID:
            raise LeaseConfigurationError(
                f'The service has {len(self.service)} characters; at most '
                f'{LONGEST_ID} can be stored. Pass a shorter service=.'
            )
        if not isinstance(context_codec, ContextCodec | None):
            raise LeaseConfigurationError(
                f'context_codec must be a ContextCodec, such as '
                f'ContextCodec(), not {context_codec!r}.'
            )
        self.lease_store = lease_store
        self._codec = context_codec or ContextCodec()
        self._owner_resolver = owner_resolver or _owner_resolver(task_store)
        self._push = LeasedPushSender(push_sender)
        self._push_configs = push_config_store
        self._turns = Turns(
            service=self.service,
            store=lease_store,
            task_store=task_store,
            event_stream=event_stream,
            push=self._push,
            settings=self.settings,
            clock=self._clock,
        )
        self._replica = Replica(
            lease_store,
            self.settings,
            self.service,
            listener=self,
            clock=self._clock,
            live=self._live,
        )
        self._events = LeasedEventStream(event_stream, self._turns)
        self._tasks = LeasedTaskStore(task_store, self._turns)
        self._admission = Admission(
            turns=self._turns,
            replica=self._replica,
            settings=self.settings,
            clock=self._clock,
            keeps_requests=self._policy.may_run_again,
        )
        self._recovery: Recovery | None = None
        self._shutdown = Shutdown(drain=self.drain, admission=self._admission)
        self._starting: asyncio.Lock | None = None
        self._streaming = agent_card.capabilities.streaming
        super().__init__(
            agent_executor=LeasedExecutor(
                agent_executor,
                admission=self._admission,
                turns=self._turns,
                settings=self.settings,
            ),
            task_store=self._tasks,
            agent_card=agent_card,
            push_config_store=push_config_store,
            push_sender=self._push,
            request_context_builder=LeasedContextBuilder(
                request_context_builder or SimpleRequestContextBuilder(),
                admission=self._admission,
            ),
            event_stream=self._events,
            **options,
        )

    # Life.

    async def start(self) -> None:
        """Joins the other replicas: opens a session, beats, and sweeps.

        Returns after the first confirmed beat. Starting twice does nothing.

        Raises:
            LeaseError: It was drained before.
            Exception: What the database said, if it cannot be reached.
        """
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._replica.started:
                return
            if self._admission.closed:
                raise LeaseError(
                    'This handler was drained, which ends it. Make a new one '
                    'for each life of the server.'
                )
            for part in (
                self._tasks.inner,
                self._events.inner,
                self._push_configs,
            ):
                await _initialize(part)
            await self.lease_store.initialize()
            recovery = Recovery(
                turns=self._turns,
                replica=self._replica,
                task_store=self._tasks,
                event_stream=self._events,
                push=self._push,
                push_config_store=self._push_configs,
                codec=self._codec,
                policy=self._policy,
                settings=self.settings,
                clock=self._clock,
                run_turn=self._run_again,
                is_closed=lambda: self._admission.closed,
            )
            self._recovery = recovery
            await self._replica.start()
            recovery.start()
            self._shutdown.listen()
            session = self._replica.session
            logger.info(
                'Replica of service %r joined under session %s.',
                self.service,
                session.id if session is not None else None,
                extra={
                    'service': self.service,
                    'session_id': session.id if session is not None else None,
                    'ttl': self.settings.ttl,
                },
            )

    async def _start_late(self) -> None:
        """Starts at a request, if nobody did it before."""
        if self._replica.started:
            return
        self._admission.refuse_if_closed()
        logger.warning(
            'This handler was not started before its first request, so it '
            'has watched nobody until now. Pass lifespan=handler.lifespan to '
            'Starlette or FastAPI, or serve within `async with handler:`.'
        )
        await self.start()

    async def drain(self, timeout: float | None = None) -> None:
        """Ends this replica's turns in order; other replicas take the rest.

        It refuses new messages, lets running turns go on, then hands over
        what is left: those turns are stopped, nothing of theirs is saved from
        that moment, and another replica takes over within one sweep. Call it
        from a preStop hook, or before a gRPC server stops; `lifespan` does it
        at SIGTERM. Calling it again waits for the first call.

        Args:
            timeout: Seconds that running turns may go on; the setting
                `drain_timeout` by default.
        """
        await self._shutdown.once(lambda: self._drain(timeout))

    async def _drain(self, timeout: float | None) -> None:
        self._admission.close()
        if not self._replica.started:
            return
        if timeout is None:
            timeout = self.settings.drain_timeout
        if len(self._turns):
            logger.info(
                'Draining: running turns (%d) may go on for %g s.',
                len(self._turns),
                timeout,
            )
        stop_timeout = self.settings.stop_timeout
        # What an acquire left is undone before the session is closed.
        await self._admission.wait_until_settled(timeout=stop_timeout)
        if self._recovery is not None:
            await self._recovery.give_back()
        await self._shutdown.unless_hurried(
            self._turns.wait_until_empty(timeout=timeout)
        )
        self._turns.handing_over = True
        left = list(self._turns)
        for turn in left:
            turn.lose(Loss.HANDED_OVER)
        handed = await self._hand_over_as_they_stop(left, timeout=stop_timeout)
        undecided: dict[str, int] = {}
        if self._recovery is not None:
            undecided = await self._recovery.stop(timeout=stop_timeout)
        await self._turns.flush(timeout=stop_timeout)
        saved = await self._turns.wait_until_saved(timeout=stop_timeout)
        stuck = list(self._turns)
        if not stuck and saved:
            await self._replica.close(timeout=stop_timeout)
            return
        if not saved:
            # It may land at any time; only what comes after is refused.
            logger.error(
                'Nothing is handed over: a save is under way and does not '
                'end. What runs here is recovered when this process ends.'
            )
            return
        # Their session must live on while they do.
        try:
            await self._replica.hand_over(
                {
                    turn.lease.task_id: turn.lease.token
                    for turn in left
                    if turn not in handed
                    and turn not in stuck
                    and turn.loss is Loss.HANDED_OVER
                }
                # What was claimed has a newer token.
                | undecided
            )
        except Exception:
            logger.exception(
                'What stopped could not be handed over; it is recovered when '
                'this process ends.'
            )
        for turn in stuck:
            logger.error(
                'Task %s is not handed over: its agent ignores its '
                'cancellation. It is recovered when this process ends.',
                turn.lease.task_id,
                extra={'task_id': turn.lease.task_id},
            )

    async def _hand_over_as_they_stop(
        self, left: list[Turn], *, timeout: float
    ) -> set[Turn]:
        """Waits for agents that were cancelled; none waits for the slowest.

        Returns:
            What was handed over; nothing if all have stopped at once.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        handed: set[Turn] = set()
        while (remaining := until - loop.time()) > 0:
            if await self._turns.wait_until_empty(
                timeout=min(self.settings.sweep_interval, remaining)
            ):
                break
            here = set(self._turns)
            stopped = {
                turn
                for turn in left
                if turn not in here
                and turn not in handed
                and turn.loss is Loss.HANDED_OVER
                and not self._turns.is_saving(turn)
            }
            try:
                await self._replica.hand_over(
                    {t.lease.task_id: t.lease.token for t in stopped},
                    timeout=remaining,
                )
            except Exception:
                logger.debug('They are left for later.', exc_info=True)
            else:
                handed |= stopped
        return handed

    async def aclose(self) -> None:
        """Drains, and closes what the SDK keeps for its tasks.

        An agent that does not stop is waited for no longer than
        `stop_timeout`.
        """
        await self.drain()
        self._shutdown.unlisten()
        self._turns.stop_background()
        closing = asyncio.ensure_future(super().aclose())
        await asyncio.wait({closing}, timeout=self.settings.stop_timeout)
        if closing.done():
            closing.result()
        else:
            logger.warning(
                'Closing goes on without an agent that ignores its '
                'cancellation.'
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncGenerator[None]:
        """The lifespan of a Starlette or FastAPI application."""
        del app
        async with self:
            yield

    # What the heartbeat tells, on its own thread.

    def session_lost(self, session: LiveSession) -> None:
        """Stops what ran under a session that is no longer this replica's."""
        self._turns.session_lost(session)

    def turns_canceled(self, leases: Sequence[TaskLease]) -> None:
        """Stops turns that were canceled through another replica."""
        self._turns.canceled(leases)

    def sessions_ended(self, sessions: Sequence[Session]) -> None:
        """Takes over what other sessions left."""
        if self._recovery is not None:
            self._recovery.sessions_ended(sessions)

    # Requests.

    async def on_message_send(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> Message | Task:
        """Runs a turn and returns what it came to."""
        turn = await self._admit(context)
        params = await self._with_context_id(params, context)
        while True:
            turn.params = params
            result = await self._send(turn, params, context)
            if result is not None:
                return result
            turn = self._turns.renewed(turn)

    async def _send(
        self,
        turn: Turn,
        params: SendMessageRequest,
        context: ServerCallContext,
    ) -> Message | Task | None:
        """Runs a turn and returns what it came to, or None if it must wait."""
        call = asyncio.ensure_future(
            super().on_message_send(params, with_hold(context, turn))
        )
        lost = asyncio.ensure_future(turn.lost.wait())
        at_once = params.configuration.return_immediately
        result: Message | Task | None = None
        try:
            await asyncio.wait(
                {call, lost}, return_when=asyncio.FIRST_COMPLETED
            )
            if (
                not turn.sent_back
                and turn.refusal is None
                and turn.loss is None
            ):
                result = call.result()
                if at_once or ends_stream(result):
                    return result
        finally:
            if call.done():
                self._turns.unreserve(turn)
            lost.cancel()
            await stop({call})
            if not call.cancelled():
                call.exception()
        if turn.sent_back:
            return None
        if turn.refusal is not None:
            raise turn.refusal
        if turn.loss is None:
            # The SDK stopped waiting before the task got its last state, as
            # on a cancel.
            await self._wait_gone(turn)
        if turn.loss is None:
            return await self._stored(turn, params, context) or result
        return await self._final(turn, params, context)

    async def _run_again(self, turn: Turn, record: TurnRecord) -> None:
        """Runs the agent on a task that was taken over.

        Returns when the agent has ended, or could not begin.
        """
        params = SendMessageRequest()
        params.CopyFrom(record.request)
        call = asyncio.ensure_future(
            super().on_message_send(params, with_hold(turn.context, turn))
        )
        ended = asyncio.ensure_future(turn.ended.wait())
        try:
            await asyncio.wait(
                {call, ended}, return_when=asyncio.FIRST_COMPLETED
            )
            if turn.agent is None:
                call.result()
            else:
                await ended
        finally:
            ended.cancel()
            await stop({call})
            if not call.cancelled():
                call.exception()

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Runs a turn and yields its events, whoever runs it in the end."""
        turn = await self._admit(context)
        params = await self._with_context_id(params, context)
        while True:
            turn.params = params
            async with aclosing(self._stream(turn, params, context)) as events:
                async for event in events:
                    yield event
            if not turn.sent_back:
                return
            turn = self._turns.renewed(turn)

    async def _stream(
        self,
        turn: Turn,
        params: SendMessageRequest,
        context: ServerCallContext,
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of a turn; none if it must wait."""
        ended = False
        local = LocalStream(
            super().on_message_send_stream(params, with_hold(context, turn)),
            turn,
            turn.lost,
        )
        try:
            async with aclosing(local.events()) as events:
                async for event in events:
                    ended = ends_stream(event)
                    yield event
        except Exception:
            self._turns.unreserve(turn)
            raise
        self._turns.unreserve(turn)
        if turn.sent_back:
            return
        if turn.refusal is not None:
            raise turn.refusal
        if ended:
            return
        if turn.loss is None:
            await self._wait_gone(turn)
        if turn.loss is Loss.HANDED_OVER:
            return
        if turn.loss is None:
            task = await self._stored(turn, params, context)
            if task is not None and is_terminal(task):
                yield outcome_event(task)
            return
        async with aclosing(
            self._follow_turn(
                turn, context, after=local.seen or turn.shown.begun
            )
        ) as events:
            async for event in events:
                yield (
                    apply_history_length(event, params.configuration)
                    if isinstance(event, Task)
                    else event
                )

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of a task, whichever replica runs it."""
        if not self._streaming:
            raise UnsupportedOperationError(
                'Streaming is not supported by the agent'
            )
        await self._start_late()
        task_id = params.id
        turn = self._turns.of(task_id)
        after: TaskVersion | None = None
        is_here = turn is not None and turn.loss is None and not turn.over
        if turn is not None and is_here:
            over = self._turns.watch(task_id)
            ended = False
            local = LocalStream(
                super().on_subscribe_to_task(params, context), turn, over
            )
            try:
                async with aclosing(local.events()) as events:
                    async for event in events:
                        ended = ends_stream(event)
                        yield event
            finally:
                self._turns.unwatch(task_id, over)
            if ended or turn.loss is Loss.HANDED_OVER:
                return
            if turn.loss is None and not over.is_set():
                return
            after = local.seen
        stored = await self._tasks.get(task_id, context)
        if stored is None:
            raise TaskNotFoundError
        if after is None:
            if is_terminal(stored.task) and not is_here:
                raise UnsupportedOperationError(
                    message=f'Task {task_id} is in terminal state: '
                    f'{TaskState.Name(stored.task.status.state)}'
                )
            yield stored.task
            if is_terminal(stored.task):
                return
            after = stored.version
        async with aclosing(self._follow(task_id, after, context)) as events:
            async for event in events:
                yield event

    async def on_get_task(
        self, params: GetTaskRequest, context: ServerCallContext
    ) -> Task | None:
        """Returns a task, as the SDK does."""
        await self._start_late()
        return await super().on_get_task(params, context)

    async def on_list_tasks(
        self, params: ListTasksRequest, context: ServerCallContext
    ) -> ListTasksResponse:
        """Lists tasks, as the SDK does."""
        await self._start_late()
        return await super().on_list_tasks(params, context)

    async def on_cancel_task(
        self, params: CancelTaskRequest, context: ServerCallContext
    ) -> Task | None:
        """Cancels a task on whichever replica runs it, within bounds."""
        await self._start_late()
        turn_met = self._turns.followed(params.id)
        alone = with_hold(context, None)
        context = with_current_hold(context, turn_met)
        call = asyncio.ensure_future(super().on_cancel_task(params, context))
        try:
            await asyncio.wait({call}, timeout=self.settings.stop_timeout)
        finally:
            # It waits for an agent that does not stop.
            if not call.done():
                call.cancel()
                await asyncio.wait({call}, timeout=self.settings.stop_timeout)
        if call.done() and not call.cancelled():
            try:
                task = call.result()
            except TaskNotCancelableError:
                if turn_met() is None:
                    raise
                # The turn ended meanwhile, and may have paused its task.
                task = await self._cancel_without_agent(params.id, alone)
            except ConcurrentTaskModificationError:
                # Another replica took over what was thought to run here.
                task = await self._cancel_without_agent(params.id, alone)
        else:
            task = await self._cancel_without_agent(params.id, alone)
        if task is not None and (
            task.status.state == TaskState.TASK_STATE_CANCELED
        ):
            await self._tell_canceled(
                task,
                turn_met(),
                by_this_call=saved_outcome(context) or saved_outcome(alone),
            )
        return task

    async def _cancel_without_agent(
        self, task_id: str, context: ServerCallContext
    ) -> Task:
        for left in reversed(range(_TRIES)):
            stored = await self._tasks.get(task_id, context)
            if stored is None:
                raise TaskNotFoundError
            if stored.task.status.state == TaskState.TASK_STATE_CANCELED:
                return stored.task
            if is_terminal(stored.task):
                raise TaskNotCancelableError
            canceled = Task()
            canceled.CopyFrom(stored.task)
            canceled.status.state = TaskState.TASK_STATE_CANCELED
            event = outcome_event(canceled)
            try:
                version = await self._tasks.save(
                    canceled,
                    event=event,
                    prev=stored.task,
                    prev_version=stored.version,
                    context=context,
                )
            except ConcurrentTaskModificationError:
                if not left:
                    raise
                continue
            await self._events.publish(
                task_id, VersionedEvent(event=event, version=version)
            )
            break
        return canceled

    async def _tell_canceled(
        self, task: Task, turn: Turn | None, *, by_this_call: bool
    ) -> None:
        """Makes sure that the agent stops and that everybody hears of it.

        Whoever holds the lease pushes, so that a recovery does it if the
        holder dies.
        """
        if turn is not None and turn.loss is None:
            if not turn.settled_for_good:
                turn.lose(Loss.CANCELED)
            return
        told = asyncio.Event()

        async def tell() -> None:
            try:
                await outlast(
                    lambda: self._tell_of_cancel(
                        task, by_this_call=by_this_call
                    )
                )
            finally:
                told.set()

        # The cancel is saved, and whoever asked for it may go.
        self._turns.spawn(tell())
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.stop_timeout):
                await told.wait()

    async def _tell_of_cancel(self, task: Task, *, by_this_call: bool) -> None:
        if await self.lease_store.request_cancel(self.service, task.id):
            return
        # Several may cancel at once; one of them did it.
        if by_this_call and not self._push.has_sent_outcome(task.id):
            await self._push.send_outcome(task.id, outcome_event(task))
        await self._turns.forget(task.id)

    async def _admit(self, context: ServerCallContext) -> Turn:
        """Makes the turn of a request, or refuses it before anything is."""
        self._admission.refuse_if_closed()
        await self._start_late()
        try:
            kept, owner = survives(self._codec, context, self._owner_resolver)
        except ValueError as error:
            logger.error(
                'A message was refused, since its task could not be '
                'recovered: %s',
                error,
            )
            raise InternalError(message=str(error)) from error
        return self._turns.new_turn(
            context=context, owner=owner, kept_context=kept
        )

    async def _with_context_id(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> SendMessageRequest:
        """Completes a message that names its task only.

        The SDK would give it a new context, find that it differs, and save
        the task as FAILED.
        """
        message = params.message
        if not message.task_id or message.context_id:
            return params
        stored = await self._tasks.get(message.task_id, context)
        if stored is None:
            return params
        completed = SendMessageRequest()
        completed.CopyFrom(params)
        completed.message.context_id = stored.task.context_id
        return completed

    async def _wait_gone(self, turn: Turn) -> None:
        if turn.held:
            await self._turns.wait_gone(
                turn.lease.task_id, timeout=self.settings.stop_timeout
            )

    async def _stored(
        self,
        turn: Turn,
        params: SendMessageRequest,
        context: ServerCallContext,
    ) -> Task | None:
        if not turn.held:
            return None
        stored = await self._tasks.get(turn.lease.task_id, context)
        if stored is None:
            return None
        return apply_history_length(stored.task, params.configuration)

    async def _final(
        self,
        turn: Turn,
        params: SendMessageRequest,
        context: ServerCallContext,
    ) -> Task:
        """What a blocking request returns when its turn was lost here."""
        task_id = turn.lease.task_id
        stored = await self._tasks.get(task_id, context)
        if params.configuration.return_immediately and stored is not None:
            return apply_history_length(stored.task, params.configuration)
        # A resumed task that its replica left reads as paused as it was before.
        if stored is None or not lease_settled(stored.task, turn.lease):
            if turn.loss is Loss.HANDED_OVER:
                raise InternalError(
                    message=f'This replica is shutting down while it works '
                    f'on task {task_id}. Ask for the task again; another '
                    f'replica takes over.'
                )
            stored = await self._followed(turn, context)
        if stored is None:
            raise TaskNotFoundError
        return apply_history_length(stored.task, params.configuration)

    async def _followed(
        self, turn: Turn, context: ServerCallContext
    ) -> StoredTask | None:
        """Returns the task when it has come to rest elsewhere."""
        after = turn.shown.version
        while True:
            rests = False
            async with aclosing(
                self._follow_turn(turn, context, after=after)
            ) as events:
                async for event in events:
                    rests = ends_stream(event)
            stored = await self._tasks.get(turn.lease.task_id, context)
            if stored is None or not rests or ends_stream(stored.task):
                return stored
            # The next message did not wait.
            after = stored.version

    def _follow_turn(
        self, turn: Turn, context: ServerCallContext, *, after: TaskVersion
    ) -> AsyncGenerator[Event, None]:
        task_id = turn.lease.task_id
        return self._follow(
            task_id, after, context, lambda: self._turns.goes_on(task_id)
        )

    def _follow(
        self,
        task_id: str,
        after: TaskVersion,
        context: ServerCallContext,
        goes_on: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncGenerator[Event, None]:
        return follow(
            task_id,
            after=after,
            task_store=self._tasks,
            event_stream=self._events,
            context=context,
            look_every=_LOOK_EVERY,
            goes_on=goes_on,
        )


def _check_policy(policy: object) -> None:
    if not isinstance(policy, RecoveryPolicy):
        raise LeaseConfigurationError(
            f'recovery must be a RecoveryPolicy, such as FailAbandoned(), not '
            f'{policy!r}.'
        )
    if inspect.iscoroutinefunction(policy.decide):
        raise LeaseConfigurationError(
            f'{type(policy).__name__}.decide() must not be async: it decides '
            f'from what it is given.'
        )


async def _initialize(part: object) -> None:
    """Creates the tables of a store that has some.

    Replicas that start together create them at the same time, and all but
    one of them may be refused.
    """
    initialize = getattr(part, 'initialize', None)
    if initialize is None:
        return
    for number, pause in enumerate(pauses(), start=1):
        try:
            await initialize()
            return
        except DBAPIError as error:
            if error.connection_invalidated or number == _TRIES:
                raise
            logger.debug('Creating tables again.', exc_info=True)
        await asyncio.sleep(pause)


def _owner_resolver(task_store: VersionedTaskStore) -> OwnerResolver:
    underlying = getattr(task_store, 'as_task_store', None)
    return getattr(underlying, 'owner_resolver', resolve_user_scope)
