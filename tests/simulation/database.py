"""The database of a simulation, and the line from a replica to it."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from a2a.server.cluster import (
    ConcurrentTaskModificationError,
    StoredTask,
    TaskEventStream,
    TaskVersion,
    VersionedEvent,
    VersionedTaskStore,
)
from a2a.server.context import ServerCallContext
from a2a.server.events.event_queue import Event
from a2a.server.tasks import PushNotificationConfigStore
from a2a.types.a2a_pb2 import (
    ListTasksRequest,
    ListTasksResponse,
    Task,
    TaskState,
)

from a2a_lease import InMemoryLeaseStore, LeaseStore
from a2a_lease.model import LivenessLock, Renewal, Session
from a2a_lease.turns.marks import TERMINAL
from simulation.loop import WHO


_T = TypeVar('_T')
_Lock = tuple[str, int]
"""The session that took it, and its number."""
POLL = 0.2


@dataclass
class Record:
    """One task as it is stored."""

    owner: str
    task: Task
    version: int
    events: list[tuple[int, Event]] = field(default_factory=list)


class Database:
    """What outlives all replicas."""

    def __init__(self) -> None:
        """Is empty."""
        self.tasks: dict[str, Record] = {}
        self.leases = InMemoryLeaseStore()
        self.life = 0
        """Rises with each restart."""
        self.locks: set[_Lock] = set()
        """Those that connections hold."""
        self.outages = 0
        """How many things keep everybody from it."""
        self.frozen: asyncio.Event | None = None
        """Set when writes go on that stall now."""

    def save(
        self,
        task: Task,
        event: Event | None,
        prev_version: TaskVersion,
        owner: str,
    ) -> TaskVersion:
        """Saves as the SDK's store does, its cancel without a check too."""
        record = self.tasks.get(task.id)
        if record is not None and record.owner != owner:
            raise ConcurrentTaskModificationError(task.id)
        if task.status.state == TaskState.TASK_STATE_CANCELED:
            if record is None or record.task.status.state in TERMINAL:
                raise ConcurrentTaskModificationError(task.id)
        elif record is None:
            if not prev_version.is_missing:
                raise ConcurrentTaskModificationError(task.id)
        elif prev_version != TaskVersion(record.version):
            raise ConcurrentTaskModificationError(task.id)
        if record is None:
            record = self.tasks[task.id] = Record(owner, Task(), 0)
        record.version += 1
        record.task = _copy(task)
        if event is not None:
            record.events.append((record.version, _copy(event)))
        return TaskVersion(record.version)


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


class Line:
    """Between one process and the database.

    A statement takes a while to get there, and its answer to get back. What
    was sent is done though the sender dies meanwhile.
    """

    def __init__(self, database: Database, chance: random.Random) -> None:
        """Takes a source of chance of its own."""
        self._database = database
        self._chance = chance
        self.cuts = 0
        """How many things keep this process from the database."""
        self.loses = 0.0
        """How often a connection is lost, from 0 to 1."""
        self.sessions: set[str] = set()
        """Those that this process opened."""
        self.ghosts: set[_Lock] = set()
        """Locks of connections whose end the database has not heard of."""
        self.unheard: set[_Lock] = set()
        """Those of connections whose end this process has not heard of."""

    # Connections that hold a lock.

    def lock(self, lock: _Lock) -> None:
        """Has a connection hold it."""
        self._database.locks.add(lock)

    def holds(self, lock: _Lock) -> bool:
        """Whether the connection that held it still stands."""
        return lock in self._database.locks and lock not in self.ghosts

    def let_go(self, lock: _Lock) -> None:
        """Ends a connection; the database hears of it unless it is cut off."""
        if self.cuts:
            self.ghosts.add(lock)
        else:
            self._database.locks.discard(lock)

    def break_all(self) -> None:
        """Ends all connections of this process."""
        self._database.locks -= {
            lock for lock in self._database.locks if self.owns(lock)
        }
        self.ghosts.clear()

    def lose_unheard(self) -> None:
        """Ends the connections that hold a lock, without a word here."""
        lost = {lock for lock in self._database.locks if self.owns(lock)}
        self._database.locks -= lost
        self.unheard |= lost

    def owns(self, lock: _Lock) -> bool:
        """Whether a session of this process took it."""
        return lock[0] in self.sessions

    async def call(
        self, work: Callable[[], Awaitable[_T]], *, writes: bool = False
    ) -> _T:
        """Has something done by the database.

        Raises:
            ConnectionError: It cannot be reached, or got lost on the way.
        """
        server = contextvars.copy_context()
        server.run(WHO.set, ('database', ''))
        before, after = self._chance.random(), self._chance.random()
        await asyncio.sleep(self._delay())
        if self._is_off() or before < self.loses:
            raise ConnectionResetError('before it was done')
        done = asyncio.get_running_loop().create_task(
            self._do(work, self._delay(), writes), context=server
        )
        done.add_done_callback(_seen)
        # A statement that was sent is not called back.
        result = await asyncio.shield(done)
        await asyncio.sleep(self._delay())
        if self._is_off() or after < self.loses:
            raise ConnectionResetError('after it was done')
        return result

    async def _do(
        self, work: Callable[[], Awaitable[_T]], delay: float, writes: bool
    ) -> _T:
        await asyncio.sleep(delay)
        while writes and (frozen := self._database.frozen) is not None:
            await frozen.wait()
        return await work()

    def _delay(self) -> float:
        # Most statements are quick, some are not.
        return self._chance.expovariate(1 / 0.002) + (
            self._chance.random() < 0.02
        ) * self._chance.uniform(0, 0.5)

    def _is_off(self) -> bool:
        return bool(self.cuts or self._database.outages)


def _seen(done: asyncio.Task[Any]) -> None:
    if not done.cancelled():
        done.exception()


_READS = frozenset(
    {
        'initialize',
        'close',
        'look',
        'get',
        'holder',
        'stored_turn',
        'cancel_requests',
        'sessions',
        'leases',
    }
)


class _Locking:
    """What a store over a line has besides: one connection with a lock."""

    line: Line
    database: Database
    store: LeaseStore
    held: _Lock | None = None

    async def renew(
        self, session_id: str, *, lock: LivenessLock | None = None
    ) -> Renewal | None:
        await self.heard()
        if lock is not None and (
            self.held is None or not self.line.holds(self.held)
        ):
            raise ConnectionResetError('the lock is gone')
        try:
            return await self.line.call(
                lambda: self.store.renew(session_id, lock=lock), writes=True
            )
        except ConnectionError:
            if lock is not None:
                self.let_go()
            raise

    async def take_liveness_lock(
        self, session_id: str, *, number: int
    ) -> LivenessLock | None:
        self.let_go()

        async def take() -> LivenessLock:
            self.line.lock((session_id, number))
            return LivenessLock(server=f'{self.database.life}', number=number)

        lock = await self.line.call(take)
        self.held = session_id, number
        return lock

    async def released_locks(self, sessions: Sequence[Session]) -> set[str]:
        await self.heard()
        if self.held is None or not self.line.holds(self.held):
            raise ConnectionResetError('the lock is gone')

        async def look() -> set[str]:
            return {
                session.id
                for session in sessions
                if session.lock is not None
                and (session.id, session.lock.number) not in self.database.locks
            }

        return await self.line.call(look)

    async def close(self) -> None:
        self.let_go()

    async def heard(self) -> None:
        """Waits for ever on a connection that ended without a word."""
        if self.held in self.line.unheard:
            await asyncio.Event().wait()

    def let_go(self) -> None:
        if self.held is not None:
            self.line.unheard.discard(self.held)
            self.line.let_go(self.held)
            self.held = None


def leases_over(line: Line, database: Database) -> LeaseStore:
    """Returns the leases as a process sees them over its line."""
    store = database.leases

    def over(name: str) -> Callable[..., Awaitable[Any]]:
        async def method(self: Any, *args: Any, **rest: Any) -> Any:
            if name == 'open_session':
                line.sessions.add(rest['session_id'])
            await self.heard()
            return await line.call(
                lambda: getattr(store, name)(*args, **rest),
                writes=name not in _READS,
            )

        return method

    methods: dict[str, Any] = {
        name: over(name)
        for name in LeaseStore.__abstractmethods__ - vars(_Locking).keys()
    }
    methods['detached'] = lambda _: leases_over(line, database)
    made: Any = type('LeasesOverLine', (_Locking, LeaseStore), methods)()
    made.line, made.database, made.store = line, database, store
    return made


class TasksOverLine(VersionedTaskStore):
    """The tasks as a process sees them."""

    def __init__(self, line: Line, database: Database) -> None:
        """Takes its line."""
        self._line = line
        self._database = database

    async def save(
        self,
        task: Task,
        *,
        event: Event | None = None,
        prev: Task | None = None,
        prev_version: TaskVersion,
        context: ServerCallContext,
    ) -> TaskVersion:
        """Saves."""
        task, event = _copy(task), event and _copy(event)
        owner = context.user.user_name

        async def save() -> TaskVersion:
            return self._database.save(task, event, prev_version, owner)

        return await self._line.call(save, writes=True)

    async def get(
        self, task_id: str, context: ServerCallContext
    ) -> StoredTask | None:
        """Reads."""

        async def get() -> StoredTask | None:
            record = self._database.tasks.get(task_id)
            if record is None or record.owner != context.user.user_name:
                return None
            return StoredTask(_copy(record.task), TaskVersion(record.version))

        return await self._line.call(get)

    async def list(
        self, params: ListTasksRequest, context: ServerCallContext
    ) -> ListTasksResponse:
        """Is not asked for."""
        raise NotImplementedError

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        """Is not asked for."""
        raise NotImplementedError


class EventsOverLine(TaskEventStream):
    """The events as a process sees them, by looking again and again."""

    def __init__(self, line: Line, database: Database) -> None:
        """Takes its line."""
        self._line = line
        self._database = database

    async def publish(self, task_id: str, event: VersionedEvent) -> None:
        """Does nothing; events are saved with their task."""

    async def destroy(self, task_id: str) -> None:
        """Does nothing."""

    async def subscribe(
        self, task_id: str, *, after: TaskVersion
    ) -> AsyncGenerator[VersionedEvent, None]:
        """Yields what is newer."""
        while True:

            async def read() -> list[VersionedEvent]:
                record = self._database.tasks.get(task_id)
                return [
                    VersionedEvent(event=_copy(event), version=version)
                    for number, event in (record.events if record else [])
                    if (version := TaskVersion(number)).is_after(after)  # noqa: B023
                ]

            for event in await self._line.call(read):
                after = event.version
                yield event
            await asyncio.sleep(POLL)


class ConfigsOverLine(PushNotificationConfigStore):
    """Push configurations as a process sees them."""

    def __init__(self, line: Line, inner: PushNotificationConfigStore) -> None:
        """Takes its line."""
        self._line = line
        self._inner = inner

    async def set_info(self, *args: Any, **rest: Any) -> None:
        """Stores one."""
        await self._line.call(
            lambda: self._inner.set_info(*args, **rest), writes=True
        )

    async def get_info(self, *args: Any, **rest: Any) -> Any:
        """Reads those of a task."""
        return await self._line.call(
            lambda: self._inner.get_info(*args, **rest)
        )

    async def delete_info(self, *args: Any, **rest: Any) -> None:
        """Deletes one."""
        await self._line.call(
            lambda: self._inner.delete_info(*args, **rest), writes=True
        )
