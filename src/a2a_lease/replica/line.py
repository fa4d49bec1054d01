"""The connection that the heartbeat beats over, and what comes in its place."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from a2a_lease.errors import LeaseError


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from a2a_lease.model import LivenessLock, Renewal
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.stores.lease_store import LeaseStore


logger = logging.getLogger(__name__)

_T = TypeVar('_T')
_PATIENCE = 3
"""For how many times the time after which it is given up a beat may land."""
_MOST_BEATS = 4
"""How many beats wait for an answer at once, each on a connection."""


class GivenUpError(LeaseError):
    """The database gave no answer in time."""


@dataclass(eq=False)
class _Sent:
    """One beat."""

    store: LeaseStore
    lock: LivenessLock | None
    at: float
    outdated: list[LeaseStore]
    """Those of whose locks nothing is told any more if this one lands."""
    answer: asyncio.Future[Renewal | None]


@dataclass(frozen=True, slots=True)
class Landed:
    """A beat that the database answered."""

    renewal: Renewal | None
    sent_at: float


@dataclass(eq=False)
class _Published:
    """A store that was left, and of whose lock others may read yet."""

    store: LeaseStore
    beats: list[asyncio.Future[Any]] = field(default_factory=list)
    """What may land yet, and tell of it."""


class Line:
    """Beats over one connection, and over another if that gives no answer.

    Whoever dies lets go of a lock that the connection holds. A server may
    close a connection of which nothing is heard here, and with it frees the
    lock; so a beat that waits is soon sent again over another one. A process
    that gets little time may need long to connect; so what waits goes on, and
    whichever beat lands first counts.
    """

    def __init__(
        self,
        source: LeaseStore,
        settings: LeaseSettings,
        clock: Clock,
        *,
        on_lock: Callable[[], None],
    ) -> None:
        """Connects to nothing yet.

        Args:
            source: Gives a store for each connection.
            settings: Times.
            clock: The time.
            on_lock: Called when there is a lock to tell of.
        """
        self._source = source
        self._settings = settings
        self._clock = clock
        self._on_lock = on_lock
        self._stores: list[LeaseStore] = []
        """All that is open."""
        self.store = source
        """For everything but beats."""
        self._beats: list[_Sent] = []
        """Those that wait, the oldest first."""
        self._published: list[_Published] = []
        self.lock: LivenessLock | None = None
        """What the store holds, and the next beat tells of."""
        self.broke_at = float('-inf')
        """When a connection with a lock broke last."""
        self.may_break = False
        """Whether others may have read of a lock that can go before us."""
        self._locks_taken = 0
        self._next_lock_at = float('-inf')
        self._lock_pause = settings.heartbeat_interval
        self._taking: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Future[Any]] = set()

    # From its start to its end.

    def open(self) -> None:
        """Makes the first store."""
        self.store = self._another()

    def start_anew(self) -> None:
        """Forgets all that is under way for a session that is over."""
        self.lock = None
        for beat in self._beats:
            self._let_be(beat)
        self._beats.clear()

    async def close(self) -> None:
        """Closes all stores, within bounds."""
        await asyncio.gather(*map(self._close, self._stores))

    # Beats.

    async def beat(self, session: LiveSession) -> Landed:
        """Beats, with the lock if there is one.

        Raises:
            GivenUpError: There was no answer. It may land yet, and count then.
            Exception: What the store said.
        """
        newest = self._send(session, self.store, self.lock)
        self.may_break = self.may_break or _is_fragile(newest.lock)
        until = newest.at + self._settings.beat_timeout
        landed = None
        try:
            if self.may_break:
                landed = await self._landed(newest, within=self._soon)
                if landed is None and len(self._beats) < _MOST_BEATS:
                    newest = self._send(session, self._another(), None)
            if landed is None:
                within = until - self._clock.monotonic()
                landed = await self._landed(newest, within=within)
            if landed is None:
                raise self._give_up(self.store)
        except GivenUpError:
            raise
        except Exception:
            if newest.store is not self.store:
                # Neither connection is good for anything.
                self._go_over_to(self._another())
            elif _is_fragile(newest.lock) and newest.lock is self.lock:
                self._lose_lock()
            raise
        finally:
            self._tidy()
        renewal = landed.answer.result()
        if renewal is not None and self.lock is None:
            self._take_lock(session)
        return Landed(renewal, landed.at)

    @property
    def _soon(self) -> float:
        """Seconds within which a database that is well answers."""
        return self._settings.heartbeat_interval / 2

    def _send(
        self, session: LiveSession, store: LeaseStore, lock: LivenessLock | None
    ) -> _Sent:
        now = self._clock.monotonic()
        oldest = now - _PATIENCE * self._settings.beat_timeout
        while self._beats and (
            len(self._beats) >= _MOST_BEATS or self._beats[0].at <= oldest
        ):
            late = self._beats.pop(0)
            late.answer.cancel()
            self._abandon(late.answer)
        sent = _Sent(
            store=store,
            lock=lock,
            at=now,
            outdated=[
                each.store
                for each in self._published
                if all(beat.done() for beat in each.beats)
            ],
            answer=asyncio.ensure_future(store.renew(session.id, lock=lock)),
        )
        self._beats.append(sent)
        return sent

    async def _landed(self, newest: _Sent, *, within: float) -> _Sent | None:
        """Waits for a beat that lands, whichever it is.

        Raises:
            Exception: What became of the newest, if that is sooner.
        """
        until = self._clock.monotonic() + within
        while (left := until - self._clock.monotonic()) > 0:
            await asyncio.wait(
                {each.answer for each in self._beats},
                timeout=left,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for each in [each for each in self._beats if each.answer.done()]:
                self._beats.remove(each)
                if each.answer.exception() is None:
                    self._take(each)
                    return each
                if each is newest:
                    each.answer.result()
        return None

    def _take(self, landed: _Sent) -> None:
        """Goes on with the connection of a beat that landed."""
        if landed.store is not self.store:
            self._go_over_to(landed.store)
        if landed.lock is not None:
            # It is held yet.
            self.lock = landed.lock
        for each in self._beats:
            self._let_be(each)
        self._beats.clear()
        self._published = [
            each
            for each in self._published
            if each.store not in [*landed.outdated, landed.store]
        ]
        self.may_break = _is_fragile(landed.lock) or bool(self._published)

    def _let_be(self, beat: _Sent) -> None:
        """Waits for a beat no longer."""
        if beat.lock is None:
            beat.answer.cancel()
        else:
            # It may land yet, and tell of a lock again, which must be held.
            asyncio.get_running_loop().call_later(
                self._settings.beat_timeout, beat.answer.cancel
            )
        self._abandon(beat.answer)

    # Other calls.

    async def call(
        self,
        call: Coroutine[None, None, _T],
        *,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> _T:
        """Awaits a call, but gives up on one without an answer.

        A driver may need seconds to clean up after a cancellation, or for
        ever on a connection whose packets are dropped. The call and its store
        are left to themselves.

        Args:
            call: What the store is asked.
            meanwhile: Called now and then while there is no answer.

        Raises:
            GivenUpError: There was none.
        """
        store, task = self.store, asyncio.ensure_future(call)
        until = self._clock.monotonic() + self._settings.beat_timeout
        while (left := until - self._clock.monotonic()) > 0:
            await asyncio.wait({task}, timeout=min(left, self._soon))
            if task.done():
                return task.result()
            if meanwhile is not None:
                await meanwhile()
        if task.done():
            return task.result()
        task.cancel()
        self._abandon(task)
        error = self._give_up(store)
        self._tidy()
        raise error

    # The lock.

    def _take_lock(self, session: LiveSession) -> None:
        """Takes a lock beside the beats, which never wait for one."""
        if not self._settings.liveness_lock:
            return
        now = self._clock.monotonic()
        if self._taking is not None or now < self._next_lock_at:
            return
        self._next_lock_at = now + self._lock_pause
        self._lock_pause = min(self._settings.ttl, self._lock_pause * 2)
        self._locks_taken += 1
        store, number = self.store, self._locks_taken

        async def take() -> None:
            taking = asyncio.ensure_future(
                store.take_liveness_lock(session.id, number=number)
            )
            try:
                await asyncio.wait(
                    {taking}, timeout=self._settings.beat_timeout
                )
                if not taking.done():
                    taking.cancel()
                    self._abandon(taking)
                    return
                lock = taking.result()
            except Exception as error:
                logger.debug('There is no lock: %r', error, exc_info=True)
                return
            finally:
                self._taking = None
            if lock is None or store is not self.store or session.ended:
                return
            self.lock = lock
            self._lock_pause = self._settings.heartbeat_interval
            self._on_lock()

        self._taking = asyncio.ensure_future(take())
        self._abandon(self._taking)

    def _lose_lock(self) -> None:
        lock, self.lock = self.lock, None
        if _is_fragile(lock):
            self.broke_at = self._clock.monotonic()

    # Stores, each with connections of its own.

    def _another(self) -> LeaseStore:
        store = self._source.detached()
        self._stores.append(store)
        return store

    def _give_up(self, store: LeaseStore) -> GivenUpError:
        """Goes on over a new connection, unless that was done already."""
        if store is self.store:
            self._go_over_to(self._another())
        return GivenUpError(
            f'The database gave no answer for {self._settings.beat_timeout:g} '
            f's; the next try is on a new connection.'
        )

    def _go_over_to(self, store: LeaseStore) -> None:
        if self.lock is not None:
            # Closing the old one frees its lock, and others may see that
            # before a beat tells them that there is none.
            self._published.append(
                _Published(
                    self.store,
                    [
                        each.answer
                        for each in self._beats
                        if each.store is self.store
                    ],
                )
            )
        self._lose_lock()
        self.store = store

    def _tidy(self) -> None:
        """Closes what nothing waits for."""
        needed = [
            self.store,
            *(each.store for each in self._beats),
            *(each.store for each in self._published),
        ]
        for store in [each for each in self._stores if each not in needed]:
            self._stores.remove(store)
            self._abandon(asyncio.ensure_future(self._close(store)))

    async def _close(self, store: LeaseStore) -> None:
        try:
            async with asyncio.timeout(self._settings.beat_timeout):
                await store.close()
        except Exception:
            logger.debug('Closing a connection failed.', exc_info=True)

    def _abandon(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()


def _is_fragile(lock: LivenessLock | None) -> bool:
    return lock is not None and lock.of_connection
