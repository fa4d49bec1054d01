"""Saves and subscriptions outlast an outage, and double nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncmy.errors
import asyncpg
import pytest
from a2a.server.cluster import TaskEventStream, VersionedTaskStore
from a2a.types.a2a_pb2 import (
    SubscribeToTaskRequest,
    TaskArtifactUpdateEvent,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import InternalError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease.outage import is_outage
from support.databases import drop_connections
from support.inprocess import (
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    SETTINGS,
    WORKING,
    Desk,
    call,
    message,
    until,
)


if TYPE_CHECKING:
    from support.databases import Database
    from support.inprocess import Service


class _Lost(Exception):
    """A driver's error."""


def _connection_lost() -> DBAPIError:
    return InterfaceError('UPDATE', {}, _Lost('connection is closed'))


class FlakyTasks(VersionedTaskStore):
    """Breaks chosen saves, before or after they were committed."""

    def __init__(self, inner: VersionedTaskStore) -> None:
        self.inner = inner
        self.breaks: dict[int, str] = {}
        self.saves = 0
        self.error = _connection_lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def save(self, task, **rest):
        self.saves += 1
        how = self.breaks.pop(self.saves, None)
        if how == 'before':
            raise self.error()
        version = await self.inner.save(task, **rest)
        if how == 'after':
            raise self.error()
        return version

    async def get(self, task_id, context):
        return await self.inner.get(task_id, context)

    async def list(self, params, context):
        return await self.inner.list(params, context)

    async def delete(self, task_id, context):
        await self.inner.delete(task_id, context)


async def _work(desk: Desk) -> None:
    await desk.task()
    await desk.status(WORKING)
    await desk.artifact('one')
    await desk.artifact('two', append=True)
    await desk.status(COMPLETED)


@pytest.mark.parametrize('how', ['before', 'after'])
@pytest.mark.parametrize('number', [1, 2, 3, 4, 5])
async def test_a_save_outlasts_a_lost_connection(
    service: Service, number: int, how: str
):
    flaky: list[FlakyTasks] = []

    def wrap(store):
        flaky.append(FlakyTasks(store))
        flaky[0].breaks[number] = how
        return flaky[0]

    replica = await service.replica(_work, wrap_tasks=wrap)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == COMPLETED
    stored = await replica.stored(task.id)
    [artifact] = stored.artifacts
    assert [part.text for part in artifact.parts] == ['one', 'two']
    assert len(stored.history) == 1
    assert not flaky[0].breaks


async def test_connections_that_the_server_kills_fail_nothing(
    database: Database, service: Service
):
    """Idle ones in the pools and the heartbeat's, again and again."""
    if database.kind == 'sqlite':
        return
    killer = database.engine(isolation_level='AUTOCOMMIT')

    async def kill() -> None:
        await drop_connections(killer, database.kind)

    async def work(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        for number in range(6):
            await kill()
            await desk.artifact(str(number), append=number > 0)
        await kill()
        await desk.status(COMPLETED)

    replica = await service.replica(work)
    for _ in range(3):
        await kill()
        task = await replica.handler.on_message_send(message(), call())
        assert task.status.state == COMPLETED
        stored = await replica.stored(task.id)
        [artifact] = stored.artifacts
        assert ''.join(part.text for part in artifact.parts) == '012345'
        assert FAILED not in replica.pushes.states(task.id)
    # Whoever of us meets the dead connection first tries again.
    await kill()
    try:
        await service.leases.leases()
    except Exception as error:
        assert is_outage(error), repr(error)
    await killer.dispose()


async def test_an_error_that_stays_ends_the_turn_and_is_recovered(
    service: Service,
):
    def wrap(store):
        flaky = FlakyTasks(store)
        flaky.breaks[3] = 'before'
        flaky.error = lambda: ValueError('cannot be stored')
        return flaky

    stopped = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await desk.artifact('one')
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    replica = await service.replica(agent, wrap_tasks=wrap)
    task = await replica.handler.on_message_send(message(), call())
    assert task.status.state == FAILED
    await stopped.wait()

    async def failed():
        return [i for i, e in replica.pushes.sent if _is_failed(e)]

    [task_id] = await until(failed)
    assert await replica.state(task_id) == FAILED
    task = await replica.stored(task_id)
    assert task.metadata['a2a_lease']['reason'] == 'turn_died'


async def test_a_remote_subscription_outlasts_a_lost_connection(
    service: Service,
):
    class FlakyEvents(TaskEventStream):
        def __init__(self, inner):
            self.inner = inner
            self.broken = 0

        async def publish(self, task_id, event):
            await self.inner.publish(task_id, event)

        async def subscribe(self, task_id, *, after):
            async for event in self.inner.subscribe(task_id, after=after):
                yield event
                self.broken += 1
                raise _connection_lost()

        async def destroy(self, task_id):
            await self.inner.destroy(task_id)

    begun, go_on = asyncio.Event(), asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        begun.set()
        await go_on.wait()
        await desk.artifact('one')
        await desk.artifact('two', append=True)
        await desk.status(COMPLETED)

    flaky: list[FlakyEvents] = []

    def wrap(stream):
        flaky.append(FlakyEvents(stream))
        return flaky[0]

    runs = await service.replica(agent)
    watches = await service.replica(agent, wrap_events=wrap)
    sending = asyncio.ensure_future(
        runs.handler.on_message_send(message(), call())
    )
    await begun.wait()

    task = await runs.working()
    seen = []
    async for event in watches.handler.on_subscribe_to_task(
        SubscribeToTaskRequest(id=task.id), call()
    ):
        seen.append(event)
        go_on.set()
    await sending
    texts = [
        event.artifact.parts[0].text
        for event in seen
        if isinstance(event, TaskArtifactUpdateEvent)
    ]
    assert texts == ['one', 'two']
    assert seen[-1].status.state == COMPLETED
    assert flaky[0].broken >= 3


class Away(FlakyTasks):
    """Cannot be read, for so many reads, when the SDK begins a turn."""

    left = 0

    async def get(self, task_id, context):
        task = asyncio.current_task()
        assert task is not None
        if self.left and task.get_name().startswith('producer:'):
            self.left -= 1
            raise _connection_lost()
        return await super().get(task_id, context)


@pytest.mark.parametrize('left', [6, 10_000])
async def test_a_paused_task_is_not_failed_since_it_cannot_be_read(
    service: Service, left: int
):
    """The SDK would fail it, though the turn for the answer never began."""

    async def ask(desk: Desk) -> None:
        await desk.task()
        await desk.status(INPUT_REQUIRED)

    async def answer(desk: Desk) -> None:
        await desk.status(COMPLETED)

    stores: list[Away] = []

    def wrap(store):
        stores.append(Away(store))
        return stores[-1]

    asks = await service.replica(ask)
    passes = left < 10
    answers = await service.replica(
        answer,
        wrap_tasks=wrap,
        settings=replace(SETTINGS, acquire_timeout=30 if passes else 2),
    )
    task = await asks.handler.on_message_send(message(), call())
    stores[0].left = left
    answering = answers.handler.on_message_send(message(task=task), call())
    if passes:
        assert (await answering).status.state == COMPLETED
        return
    with pytest.raises(InternalError, match='Send it again'):
        await answering
    assert await asks.state(task.id) == INPUT_REQUIRED
    stores[0].left = 0
    answered = await answers.handler.on_message_send(message(task=task), call())
    assert answered.status.state == COMPLETED


def _is_failed(event) -> bool:
    return (
        isinstance(event, TaskStatusUpdateEvent)
        and event.status.state == FAILED
    )


class _PgError(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__('of PostgreSQL')
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ('error', 'passes'),
    [
        (_connection_lost(), True),
        (DBAPIError('', {}, _PgError('57P01')), True),
        (DBAPIError('', {}, _PgError('08006')), True),
        (DBAPIError('', {}, _PgError('25006')), True),
        (DBAPIError('', {}, _PgError('53300')), True),
        (DBAPIError('', {}, _PgError('42P01')), False),
        (DBAPIError('', {}, _PgError('22001')), False),
        (OperationalError('', {}, Exception(2013, 'lost')), True),
        (OperationalError('', {}, Exception(1045, 'denied')), False),
        (OperationalError('', {}, Exception('database is locked')), True),
        (OperationalError('', {}, Exception('no such table: x')), False),
        # As drivers raise them while SQLAlchemy prepares a connection.
        (asyncmy.errors.OperationalError(2006, 'gone away'), True),
        (asyncmy.errors.OperationalError(1045, 'denied'), False),
        (asyncmy.errors.InterfaceError('closed'), True),
        (asyncmy.errors.ProgrammingError(1146, 'no such table'), False),
        (asyncpg.InterfaceError('connection is closed'), True),
        (asyncpg.exceptions.AdminShutdownError('restarts'), True),
        (asyncpg.exceptions.UniqueViolationError('twice'), False),
        (sqlite3.OperationalError('database is locked'), True),
        (sqlite3.OperationalError('no such table: x'), False),
        (sqlite3.IntegrityError('twice'), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ValueError(2006), False),
        (ValueError('no'), False),
    ],
)
def test_an_outage_is_told_from_an_error_that_stays(error, passes):
    assert is_outage(error) is passes


@pytest.mark.parametrize(
    ('sqlstate', 'number', 'passes'),
    [
        ('HY000', 1290, True),  # Read-only.
        ('HY000', 1836, True),  # Read-only, by another name.
        ('HY000', 1205, True),  # A lock timeout.
        ('40001', 1213, True),  # A deadlock.
        ('70100', 1927, True),  # Killed.
        ('HY000', 1366, False),  # A wrong value.
        ('42S02', 1146, False),  # No such table.
    ],
)
async def test_an_outage_is_told_by_the_number_of_mysql(
    database: Database, sqlstate, number, passes
):
    """Its state is a general one for most."""
    if database.kind != 'mariadb':
        return
    engine = create_async_engine(database.url)
    with pytest.raises(DBAPIError) as raised:
        async with engine.connect() as connection:
            await connection.execute(
                text(
                    f"SIGNAL SQLSTATE '{sqlstate}' SET MYSQL_ERRNO = {number}, "
                    f"MESSAGE_TEXT = 'as the server says it'"
                )
            )
    await engine.dispose()
    assert is_outage(raised.value) is passes


async def test_a_stream_can_be_ended_though_its_driver_hides_the_cancel():
    """A cancelled query may come back as a lost connection."""
    from a2a_lease.turns.following import Pump

    hidden = asyncio.Event()

    async def stream():
        while True:
            try:
                await asyncio.sleep(0.05 if hidden.is_set() else 60)
            except asyncio.CancelledError:
                if hidden.is_set():
                    raise
                hidden.set()
        yield

    pump = Pump(stream())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await pump.aclose()
    assert hidden.is_set()


async def test_a_subscription_elsewhere_outlasts_a_database_that_is_away(
    database: Database, service: Service
):
    if database.server is None:
        return
    go_on = asyncio.Event()

    async def work(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()
        await desk.artifact('one')
        await desk.status(COMPLETED)

    runs = await service.replica(work)
    watches = await service.replica(work)
    sending = asyncio.ensure_future(
        runs.handler.on_message_send(message(), call())
    )

    task = await runs.working()
    events = []

    async def listen() -> None:
        async for event in watches.handler.on_subscribe_to_task(
            SubscribeToTaskRequest(id=task.id), call()
        ):
            events.append(event)

    listening = asyncio.ensure_future(listen())
    await until(lambda: _are(events))
    await asyncio.to_thread(database.server.stop)
    # Longer than it looks at the task by itself, several times.
    await asyncio.wait({listening}, timeout=5)
    assert not listening.done()
    await asyncio.to_thread(database.server.start)
    go_on.set()
    await asyncio.wait_for(listening, 40)
    assert events[-1].status.state == COMPLETED
    await sending


async def _are(events: list[Any]) -> bool:
    return bool(events)
