"""Streams that go on when the turn behind them is lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from a2a.types.a2a_pb2 import Message, Task, TaskStatusUpdateEvent

from a2a_lease.turns.marks import (
    INTERRUPTED,
    TERMINAL,
    is_taken_over,
    is_terminal,
)
from a2a_lease.turns.saving import always, read_through_outages
from a2a_lease.turns.stopping import stop
from a2a_lease.turns.turn import Ending


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from a2a.server.cluster import (
        StoredTask,
        TaskEventStream,
        TaskVersion,
        VersionedTaskStore,
    )
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event

    from a2a_lease.turns.turn import Turn


_T = TypeVar('_T')
_LINGER = 1.0
"""Seconds without an event after which a stream whose turn is over is left."""


def ends_stream(event: Event) -> bool:
    """Whether nothing follows this event on a stream of the protocol."""
    return isinstance(event, Message) or (
        isinstance(event, Task | TaskStatusUpdateEvent)
        and event.status.state in TERMINAL | INTERRUPTED
    )


class Pump(Generic[_T]):
    """Reads a generator in one asyncio task, so that waiting can be bounded.

    A step of a generator that is given up would end the generator; a step of
    the pump does not.
    """

    def __init__(self, source: AsyncGenerator[_T, None]) -> None:
        self._source = source
        # One place: whoever reads slowly holds up the source, as without us.
        self._queue: asyncio.Queue[_T] = asyncio.Queue(1)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with aclosing(self._source) as source:
            async for item in source:
                await self._queue.put(item)

    async def next(self, *, until: asyncio.Event | None = None) -> _T:
        """Returns the next item.

        Args:
            until: Gives up when this is set.

        Raises:
            StopAsyncIteration: The source ended.
            TimeoutError: `until` was set first.
        """
        if self._queue.empty():
            getting = asyncio.ensure_future(self._queue.get())
            waits: set[asyncio.Future[Any]] = {getting, self._task}
            stop = (
                asyncio.ensure_future(until.wait())
                if until is not None
                else None
            )
            if stop is not None:
                waits.add(stop)
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if stop is not None:
                    stop.cancel()
                if not getting.done():
                    getting.cancel()
                    await asyncio.wait({getting})
            if not getting.cancelled():
                return getting.result()
            if not self._task.done():
                raise TimeoutError
            if self._queue.empty():
                if not self._task.cancelled():
                    self._task.result()
                raise StopAsyncIteration
        return self._queue.get_nowait()

    async def aclose(self) -> None:
        """Ends the source."""
        await stop({self._task})
        if not self._task.cancelled():
            self._task.exception()


class LocalStream:
    """A stream of this replica, which is left soon after its turn is over.

    The SDK's own goes on, and would hear nothing of a turn elsewhere.
    """

    def __init__(
        self,
        source: AsyncGenerator[Event, None],
        turn: Turn,
        over: asyncio.Event,
    ) -> None:
        """Wraps a stream.

        Args:
            source: The stream.
            turn: The turn whose events it has.
            over: Set when the turn is lost, or has ended.
        """
        self._source = source
        self._turn = turn
        self._over = over
        self._last: Event | None = None
        self._seen: TaskVersion | None = None

    @property
    def seen(self) -> TaskVersion | None:
        """What the task was after the last event that was yielded.

        An event that was saved here may be stuck on its way to the streams,
        in a slow webhook for instance, when the turn is lost. None if nothing
        was yielded.
        """
        if self._last is not None:
            version = self._turn.shown.version_of(self._last)
            if version is not None:
                return version
        return self._seen

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields what the stream brings."""
        pump = Pump(self._source)
        until = self._over
        try:
            while True:
                try:
                    event = await pump.next(until=until)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if until is not self._over or self._turn.never_began:
                        return
                    until = _after(_LINGER)
                    continue
                except Exception:
                    if self._is_of_its_turn():
                        raise
                    return
                version = self._turn.shown.version_of(event)
                if self._over.is_set():
                    if version is None and (
                        self._last is not None or isinstance(event, Task)
                    ):
                        # Of the next turn; or the task as it was when the SDK
                        # read it, of which nobody knows what came after.
                        return
                    # A slow reader is behind; it gets all there is.
                    until = _after(_LINGER)
                self._last = event
                self._seen = self._turn.shown.version
                yield event
        finally:
            await pump.aclose()

    def _is_of_its_turn(self) -> bool:
        """Whether an error on the stream is for its reader.

        A refused save is not: whoever took over tells the rest. The SDK also
        passes on that a message which came later was refused.
        """
        turn = self._turn
        if turn.loss is not None or turn.never_began:
            return False
        return not self._over.is_set() or turn.ending is Ending.RAISED


def _after(seconds: float) -> asyncio.Event:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return over


async def follow(
    task_id: str,
    *,
    after: TaskVersion,
    task_store: VersionedTaskStore,
    event_stream: TaskEventStream,
    context: ServerCallContext,
    look_every: float,
    goes_on: Callable[[], Awaitable[bool]] | None,
) -> AsyncGenerator[Event, None]:
    """Yields what happens to a task elsewhere, until its turn is over.

    Args:
        task_id: The task.
        after: The version that the client has seen.
        task_store: Where the task is.
        event_stream: Where its events come from.
        context: The client's call context.
        look_every: Seconds between looks at the task itself, in case it
            ended without an event.
        goes_on: Whether a turn of it is under way or to be recovered; a turn
            may end without an event. None to stay for the turns to come.
    """

    async def read() -> StoredTask | None:
        return await read_through_outages(
            task_store, task_id, context, permit=always
        )

    looks = _Looks(read, goes_on)
    pump = Pump(event_stream.subscribe(task_id, after=after))
    loop = asyncio.get_running_loop()
    try:
        while True:
            look = asyncio.Event()
            timer = loop.call_later(look_every, look.set)
            try:
                versioned = await pump.next(until=look)
            except TimeoutError:
                if not await looks.at_an_end():
                    continue
                if looks.task is not None:
                    yield looks.task
                return
            except StopAsyncIteration:
                return
            finally:
                timer.cancel()
            if not versioned.version.is_after(after):
                continue
            event = versioned.event
            if is_taken_over(event):
                # What its owner saved but did not live to publish is in the
                # task only.
                stored = await read()
                if stored is not None:
                    event, after = stored.task, stored.version
            yield event
            if ends_stream(event):
                return
    finally:
        await pump.aclose()


class _Looks:
    """Looks at a task now and then, and tells whether its turn is over."""

    def __init__(
        self,
        read: Callable[[], Awaitable[StoredTask | None]],
        goes_on: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        self._read = read
        self._goes_on = goes_on
        self._version: TaskVersion | None = None
        self.task: Task | None = None
        """The task as it is at its end."""

    async def at_an_end(self) -> bool:
        """Whether nothing will be said of the task any more."""
        stored = await self._read()
        if stored is not None and is_terminal(stored.task):
            # Nothing said so, or the stream would have ended: on SQLite a
            # cancel may have the version of the save before it.
            self.task = stored.task
            return True
        if self._goes_on is None:
            return stored is None
        if await self._goes_on():
            return False
        # It may have come, or gone on, and be over in between.
        stored = await self._read()
        if stored is None:
            return True
        if stored.version != self._version:
            # What led to it may still be on its way.
            self._version = stored.version
            return False
        self.task = stored.task
        return True
