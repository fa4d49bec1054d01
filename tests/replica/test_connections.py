"""Replicas that live, and whose connections end."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from a2a_lease import DatabaseLeaseStore, LeaseSettings
from a2a_lease.model import SessionState
from a2a_lease.replica.replica import Replica
from replica.test_heartbeat import Ears, until
from support.databases import engine_of
from support.proxy import Proxy


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from a2a_lease import LeaseStore
    from a2a_lease.model import Session
    from support.databases import Database


SETTINGS = LeaseSettings(
    ttl=600.0, heartbeat_interval=0.5, sweep_interval=0.5, stop_timeout=5.0
)
"""No silence is long enough while a test lasts: who dies, dies by a lock."""
SERVICE = 'connected'


class Connected:
    """A replica with a line of its own to its database."""

    def __init__(self, proxy: Proxy, store: DatabaseLeaseStore) -> None:
        self.proxy = proxy
        self.replica = Replica(store, SETTINGS, SERVICE, listener=Ears())

    @property
    def session_id(self) -> str:
        session = self.replica.session
        assert session is not None
        return session.id


class Three:
    """Three of them, and a line of nobody's to see by."""

    def __init__(self, members: list[Connected], store: LeaseStore) -> None:
        self.members = members
        self.store = store
        self.before = [each.session_id for each in members]

    async def session(self, one: Connected) -> Session:
        [found] = [
            session
            for session in await self.store.sessions()
            if session.id == one.session_id
        ]
        return found

    async def lock(self, one: Connected) -> int:
        """Returns the number of the lock that it tells of, or 0."""
        session = await self.session(one)
        return session.lock.number if session.lock else 0

    async def locked(self, one: Connected, *, after: int = 0) -> None:
        """Waits until it has another lock."""

        async def has():
            return await self.lock(one) > after

        await until(has)

    async def all_live(self) -> None:
        assert [each.session_id for each in self.members] == self.before
        for each in self.members:
            assert (await self.session(each)).state is SessionState.OPEN


@asynccontextmanager
async def connected(database: Database) -> AsyncGenerator[Connected]:
    proxy = Proxy(database)
    await proxy.start()
    engine = engine_of(proxy.url, pooled=False)
    store = DatabaseLeaseStore(engine)
    await store.initialize()
    each = Connected(proxy, store)
    await each.replica.start()
    try:
        yield each
    finally:
        await each.replica.close(timeout=10)
        await engine.dispose()
        await proxy.close()


@pytest.fixture(params=['postgresql', 'mariadb'])
async def three(request: pytest.FixtureRequest) -> AsyncIterator[Three]:
    database = request.getfixturevalue(request.param)
    engine = database.engine()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        members = [
            await stack.enter_async_context(connected(database))
            for _ in range(3)
        ]
        three = Three(members, DatabaseLeaseStore(engine))
        for each in members:
            await three.locked(each)
        yield three


@pytest.mark.parametrize('how', ['drop', 'reset', 'half_open'])
async def test_whoever_loses_its_connections_alone_lives(
    three: Three, how: str
):
    one = three.members[0]
    for _ in range(3):
        number = await three.lock(one)
        if how == 'half_open':
            async with one.proxy.half_open():
                await three.locked(one, after=number)
        else:
            getattr(one.proxy, how)()
            await three.locked(one, after=number)
    await three.all_live()


async def test_whoever_lost_its_connection_too_judges_nobody(three: Three):
    """As when a pooler restarts, and some come back before others."""
    first, *others = three.members
    numbers = [await three.lock(each) for each in three.members]
    async with AsyncExitStack() as refusing:
        for each in others:
            await refusing.enter_async_context(each.proxy.refusing())
        first.proxy.reset()
        await three.locked(first, after=numbers[0])
        beat = (await three.session(first)).beat

        async def has_looked_for_long():
            return (await three.session(first)).beat >= beat + 8

        await until(has_looked_for_long)
    for each, number in zip(three.members, numbers, strict=True):
        await three.locked(each, after=number)
    await three.all_live()
