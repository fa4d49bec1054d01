"""The thread that beats, and looks whether others do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
import weakref
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from a2a_lease.errors import LeaseError
from a2a_lease.outage import insist
from a2a_lease.replica.session import LiveSession
from a2a_lease.replica.watcher import Watcher


if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from a2a_lease.model import (
        LivenessLock,
        Look,
        Renewal,
        Session,
        TaskLease,
    )
    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.watcher import Verdict
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.stores.lease_store import LeaseStore


logger = logging.getLogger(__name__)

_T = TypeVar('_T')
_FIRST_RETRY = 0.02
_TRIES_TO_JOIN = 8
"""How often the first session is tried before the error of it is raised."""
_KEEP_SESSIONS = 24 * 3600.0
"""Seconds for which ended sessions stay on record, for people."""


class Listener(Protocol):
    """Hears from the heartbeat, on its thread; must be quick."""

    def session_lost(self, session: LiveSession) -> None:
        """This replica was declared dead; its session is over."""

    def turns_canceled(self, leases: Sequence[TaskLease]) -> None:
        """These tasks were canceled through other replicas."""

    def sessions_ended(self, sessions: Sequence[Session]) -> None:
        """These sessions left something to take over."""


class Beat(Enum):
    """What became of one beat."""

    RENEWED = auto()
    LOST = auto()
    UNKNOWN = auto()


class _GivenUpError(LeaseError):
    pass


class Heartbeat:
    """Keeps this replica's session, on a thread, loop and connection apart.

    Neither a blocked event loop nor an exhausted pool of the server stops it.
    """

    def __init__(
        self,
        store: LeaseStore,
        settings: LeaseSettings,
        service: str,
        *,
        label: str,
        listener: Listener,
        clock: Clock,
        on_session: Callable[[LiveSession], None],
    ) -> None:
        """Makes a heartbeat that does not beat yet.

        Args:
            store: Where sessions live; the thread uses `detached()` ones.
            settings: Times.
            service: The agent that is served.
            label: This process, for people.
            listener: Hears what is found.
            clock: The time.
            on_session: Called with each new session, on the thread.
        """
        self._source = store
        self._store = store
        self._settings = settings
        self._service = service
        self._label = label
        self._listener = listener
        self._clock = clock
        self._on_session = on_session
        self._watcher = Watcher(settings)
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._notices = 0
        """How many cancels the last beat told of."""
        self._notices_read = 0
        self._looked_at = float('-inf')
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._opening: LiveSession | None = None
        self.session: LiveSession | None = None
        self.in_round = threading.Lock()
        """Held while something is under way, which a fork must not copy."""
        self.failures = 0
        """Beats in a row that did not land."""
        self._lock: LivenessLock | None = None
        """What the store holds, and the beats publish."""
        self._locks_taken = 0
        self._next_lock_at = float('-inf')
        self._lock_pause = settings.heartbeat_interval
        self._taking: asyncio.Task[None] | None = None
        self._lock_broke_at = float('-inf')
        self._may_break = False
        """Whether others may have read of a lock that can go before us."""
        self._published: list[tuple[LeaseStore, asyncio.Future[Any]]] = []
        """Stores that were given up, of whose locks others may read yet, each
        with the call that it has not answered."""

    # The thread.

    def run(self, started: Callable[[BaseException | None], None]) -> None:
        """Beats until `stop`, on the thread that calls it.

        Args:
            started: Called once, with what stood in the way or None.
        """
        try:
            with asyncio.Runner() as runner:
                runner.run(self.live(started))
        except BaseException:
            logger.exception('The heartbeat ended.')
            raise

    def stop(self) -> None:
        """Closes the session and ends the thread. Any thread may call it."""
        self._stopping = True
        self.nudge()

    def nudge(self) -> None:
        """Beats at once. Any thread may call it."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # It has ended.
                loop.call_soon_threadsafe(self._wake.set)

    async def live(
        self, started: Callable[[BaseException | None], None]
    ) -> None:
        """Beats until `stop`, on the loop that runs."""
        self._loop = asyncio.get_running_loop()
        try:
            self._store = self._source.detached()
            _living.add(self)
            await self._join()
        except Exception as error:  # noqa: BLE001 - told to whoever starts us
            await self._close_store(self._store)
            started(error)
            return
        started(None)
        retry = _FIRST_RETRY
        while not self._stopping:
            began = self._clock.monotonic()
            pause = self._settings.heartbeat_interval
            try:
                with self.in_round:
                    beat = await self.run_once()
            except Exception:
                logger.exception('A round of the heartbeat failed.')
                beat = Beat.UNKNOWN
            if beat is Beat.UNKNOWN:
                pause = min(retry, self._longest_pause)
                retry = pause * 2
            else:
                retry = _FIRST_RETRY
                pause -= self._clock.monotonic() - began
            self._wake.clear()
            if pause > 0 and not self._stopping:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        await self._end()

    @property
    def _longest_pause(self) -> float:
        """Seconds between two tries of a beat that does not land.

        Those who see the lock free wait for a beat for a few intervals only.
        """
        interval = self._settings.heartbeat_interval
        session = self.session
        if self._may_break and session and session.silence < 4 * interval:
            return interval / 8
        return interval

    async def run_once(self) -> Beat:
        """One round: the own beat, and if it landed, a look at the others."""
        beat = await self._beat()
        if beat is Beat.RENEWED:
            await self._take_notices()
            now = self._clock.monotonic()
            # A beat comes a little early or late; looks follow the beats.
            due = self._looked_at + 0.9 * self._settings.sweep_interval
            if now >= due or self._watcher.expects_death:
                self._looked_at = now
                await self._look(now)
        return beat

    # The own session.

    async def _join(self) -> None:
        """Opens the first session; a busy database may need a few tries."""
        pause = _FIRST_RETRY
        for left in reversed(range(_TRIES_TO_JOIN)):
            try:
                with self.in_round:
                    await self._open()
                return
            except Exception as error:
                if not left or self._stopping:
                    raise
                logger.info(
                    'Opening a session is tried again: %s',
                    error or type(error).__name__,
                )
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)

    async def _open(self) -> None:
        # The same one again as long as it is unknown whether it was opened.
        session = self._opening or LiveSession(
            uuid.uuid4().hex, trust=self._settings.trust, clock=self._clock
        )
        self._opening = session
        self._lock = None
        await self._bounded(
            self._store.open_session(
                session_id=session.id,
                service=self._service,
                ttl=self._settings.ttl,
                heartbeat_interval=self._settings.heartbeat_interval,
                label=self._label,
            )
        )
        self._notices = self._notices_read = 0
        sent_at = self._clock.monotonic()
        renewal = await self._renew(session)
        self._opening = None
        if renewal is None:
            raise LeaseError(
                f'Session {session.id} was gone as soon as it was opened.'
            )
        session.confirm(sent_at=sent_at)
        self.session = session
        self._on_session(session)

    async def _beat(self) -> Beat:
        session = self.session
        try:
            if session is None or session.ended:
                await self._open()
                return Beat.RENEWED
            sent_at = self._clock.monotonic()
            renewal = await self._renew(session)
        except Exception as error:  # noqa: BLE001 - the outcome is unknown
            self.failures += 1
            level = logging.DEBUG if self.failures == 1 else logging.WARNING
            logger.log(
                level,
                'Beat %d in a row did not land; it is tried again, and saves '
                'wait meanwhile: %s',
                self.failures,
                error or type(error).__name__,
                extra={
                    'session_id': session.id if session else None,
                    'failures': self.failures,
                },
            )
            return Beat.UNKNOWN
        if renewal is None:
            await self._lose(session)
            return Beat.LOST
        if self.failures > 1:
            logger.info('Beats land again, after %d failures.', self.failures)
        self.failures = 0
        session.confirm(sent_at=sent_at)
        self._notices = renewal.notices
        return Beat.RENEWED

    async def _renew(self, session: LiveSession) -> Renewal | None:
        """Beats, with the lock if there is one."""
        lock = self._lock
        # What comes after them tells of what is now.
        outdated = [each for each in self._published if each[1].done()]
        may_break = lock is not None and lock.of_connection
        self._may_break = self._may_break or may_break
        beat = self._store.renew(session.id, lock=lock)
        try:
            renewal = await (
                self._once_more(session, beat)
                if self._may_break
                else self._bounded(beat)
            )
        except Exception:
            if may_break and self._lock is lock:
                self._lose_lock()
            raise
        for each in outdated:
            self._published.remove(each)
            self._leave(each[0])
        self._may_break = may_break or bool(self._published)
        if self._lock is None and renewal is not None:
            self._take_lock(session)
        return renewal

    async def _once_more(
        self, session: LiveSession, beat: Coroutine[None, None, Renewal | None]
    ) -> Renewal | None:
        """Beats a second time, on another connection, if no answer comes soon.

        The server may have closed the one that waits, and freed its lock, of
        which nothing is heard here. Others would take this replica for dead
        long before the beat is given up.
        """
        first = asyncio.ensure_future(beat)
        await asyncio.wait({first}, timeout=self._soon)
        if first.done():
            return first.result()
        other = self._source.detached()
        second = asyncio.ensure_future(other.renew(session.id))
        answered = await self._answer(first, second)
        if answered is first:
            second.cancel()
            self._abandon(second)
            self._leave(other)
            return first.result()
        # The first one may land yet, and tell of the lock again.
        asyncio.get_running_loop().call_later(
            self._settings.beat_timeout, first.cancel
        )
        self._abandon(first)
        self._go_over_to(other, unanswered=first)
        return self._result(second, other)

    async def _answer(
        self,
        first: asyncio.Future[Renewal | None],
        second: asyncio.Future[Renewal | None],
    ) -> asyncio.Future[Renewal | None]:
        """Waits for a beat that lands, or for what became of the second."""
        waits = {first, second}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.beat_timeout):
                while not second.done():
                    await asyncio.wait(
                        waits, return_when=asyncio.FIRST_COMPLETED
                    )
                    if first.done() and first.exception() is None:
                        return first
                    waits = {each for each in waits if not each.done()}
        return second

    def _lose_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None and lock.of_connection:
            self._lock_broke_at = self._clock.monotonic()

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
        store, number = self._store, self._locks_taken

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
            if lock is None or store is not self._store or session.ended:
                return
            self._lock = lock
            self._lock_pause = self._settings.heartbeat_interval
            self._wake.set()

        self._taking = asyncio.ensure_future(take())
        self._abandon(self._taking)

    async def _take_notices(self) -> None:
        session, notices = self.session, self._notices
        if session is None or notices == self._notices_read:
            return
        try:
            leases = await self._between_beats(
                self._store.cancel_requests(self._service, session.id)
            )
        except Exception:
            logger.debug('Reading cancels is tried again.', exc_info=True)
            return
        self._notices_read = notices
        self._tell(lambda: self._listener.turns_canceled(leases))

    async def _lose(self, session: LiveSession) -> None:
        session.ended = True
        logger.warning(
            'Session %s of this replica was declared dead by others after '
            '%.1f s of silence, or its row was deleted. Its turns are '
            'stopped and recovered elsewhere; this replica goes on under a '
            'new session. Look for a pause of this process or a C call that '
            'holds the interpreter lock.',
            session.id,
            session.silence,
            extra={'session_id': session.id, 'silence': session.silence},
        )
        self._tell(lambda: self._listener.session_lost(session))
        self._watcher = Watcher(self._settings)
        try:
            await self._open()
        except Exception:
            logger.debug('Opening a session is tried again.', exc_info=True)

    async def _end(self) -> None:
        session = self.session
        if session is not None:
            session.ended = True
            try:
                await insist(
                    lambda: self._bounded(
                        self._store.close_session(session.id)
                    ),
                    timeout=self._settings.stop_timeout,
                )
            except Exception as error:  # noqa: BLE001 - others wait for the TTL
                logger.warning(
                    'Session %s could not be closed; others take over after '
                    'its time to live of %g s: %s',
                    session.id,
                    self._settings.ttl,
                    error or type(error).__name__,
                    extra={'session_id': session.id},
                )
        await self._close_store(self._store)
        for store, _ in self._published:
            await self._close_store(store)

    # The others.

    async def _look(self, now: float) -> None:
        session = self.session
        if session is None:
            return
        everyone = self._watcher.wants_everyone(now)
        try:
            look = await self._between_beats(
                self._store.look(
                    self._service,
                    session.id,
                    everyone=everyone,
                    also=self._watcher.suspects(now),
                )
            )
            if self.session is not session:
                return
            verdicts = self._watcher.observe(look, now=now, everyone=everyone)
            verdicts += await self._certified(look, now)
            ended = look.ended
            for verdict in verdicts:
                if await self._between_beats(
                    self._store.fence(
                        verdict.session.id, beat=verdict.session.beat
                    )
                ):
                    self._report(verdict)
            if verdicts:
                look = await self._between_beats(
                    self._store.look(self._service, session.id, everyone=False)
                )
                ended = look.ended
            if everyone:
                await self._between_beats(
                    self._store.prune_sessions(
                        self._service, older_than=_KEEP_SESSIONS
                    )
                )
        except Exception as error:
            logger.debug('A look failed: %r', error, exc_info=True)
            return
        if ended:
            self._tell(lambda: self._listener.sessions_ended(ended))

    async def _certified(self, look: Look, now: float) -> list[Verdict]:
        """Says whose process is dead, by the lock that went with it."""
        mine = self._lock
        # Whatever broke this connection may have broken theirs.
        if mine is None or now - self._lock_broke_at < self._settings.ttl:
            return []
        overdue = [
            session
            for session in self._watcher.overdue(look)
            if session.lock is not None and session.lock.server == mine.server
        ]
        if not overdue:
            return []
        try:
            released = await self._between_beats(
                self._store.released_locks(overdue)
            )
        except Exception:
            logger.debug('Looking at locks failed.', exc_info=True)
            released = set()
        return self._watcher.certify(overdue, released)

    def _report(self, verdict: Verdict) -> None:
        session = verdict.session
        logger.warning(
            'Session %s (%s) was silent for %.1f s%s and is declared dead; '
            'its tasks are recovered.',
            session.id,
            session.label,
            verdict.silence,
            ', its connection is closed,' if verdict.let_go else '',
            extra={
                'session_id': session.id,
                'label': session.label,
                'silence': verdict.silence,
                'let_go': verdict.let_go,
                'ttl': session.ttl,
            },
        )

    # What must not hold up the round.

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception('A listener of the heartbeat failed.')

    @property
    def _soon(self) -> float:
        """Seconds within which a database that is well answers."""
        return self._settings.heartbeat_interval / 2

    async def _bounded(self, call: Coroutine[None, None, _T]) -> _T:
        """Awaits a call, but gives up on one without an answer.

        A driver may need seconds to clean up after a cancellation, or for
        ever on a connection whose packets are dropped. The call and its store
        are left to themselves.
        """
        store, task = self._store, asyncio.ensure_future(call)
        await asyncio.wait({task}, timeout=self._settings.beat_timeout)
        return self._result(task, store)

    async def _between_beats(self, call: Coroutine[None, None, _T]) -> _T:
        """Does the same, and beats on while there is no answer."""
        store, task = self._store, asyncio.ensure_future(call)
        until = self._clock.monotonic() + self._settings.beat_timeout
        while not task.done() and self._clock.monotonic() < until:
            await asyncio.wait({task}, timeout=self._soon)
            if not task.done():
                await self._beat()
        return self._result(task, store)

    def _result(self, task: asyncio.Future[_T], store: LeaseStore) -> _T:
        if task.done():
            return task.result()
        task.cancel()
        self._abandon(task)
        raise self._give_up(store, task)

    def _give_up(
        self, abandoned: LeaseStore, call: asyncio.Future[Any]
    ) -> _GivenUpError:
        """Goes on over a new connection."""
        error = _GivenUpError(
            f'The database gave no answer for {self._settings.beat_timeout:g} '
            f's; the next try is on a new connection.'
        )
        if abandoned is not self._store:
            return error
        self._go_over_to(self._source.detached(), unanswered=call)
        return error

    def _go_over_to(
        self, store: LeaseStore, *, unanswered: asyncio.Future[Any]
    ) -> None:
        old, self._store = self._store, store
        if self._lock is None:
            self._leave(old)
        else:
            # Closing it frees its lock, and others may see that before a beat
            # tells them that there is none.
            self._published.append((old, unanswered))
        self._lose_lock()

    def _leave(self, store: LeaseStore) -> None:
        self._abandon(asyncio.ensure_future(self._close_store(store)))

    def _abandon(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()

    async def _close_store(self, store: LeaseStore) -> None:
        if store is self._source:
            return
        try:
            async with asyncio.timeout(self._settings.beat_timeout):
                await store.close()
        except Exception:
            logger.debug('Closing a connection failed.', exc_info=True)


_living: weakref.WeakSet[Heartbeat] = weakref.WeakSet()
_LONGEST_ROUND = 5.0
"""Seconds that a fork waits for a round to end."""


_paused: list[Heartbeat] = []


def _pause() -> None:
    # A child that was forked within a transaction would take the lock of an
    # SQLite file along, and nobody could ever free it there.
    _paused.extend(
        heartbeat
        for heartbeat in list(_living)
        if heartbeat.in_round.acquire(timeout=_LONGEST_ROUND)
    )


def _go_on() -> None:
    while _paused:
        _paused.pop().in_round.release()


def _is_child() -> None:
    _go_on()
    _living.clear()


os.register_at_fork(
    before=_pause, after_in_parent=_go_on, after_in_child=_is_child
)


class Life(Protocol):
    """A heartbeat that runs somewhere."""

    async def ended(self, *, timeout: float) -> bool:
        """Waits until it has ended; False if it has not, within seconds."""
        ...


class _Thread:
    def __init__(
        self,
        heartbeat: Heartbeat,
        started: Callable[[BaseException | None], None],
    ) -> None:
        # It ends with the process.
        self._thread = threading.Thread(
            target=heartbeat.run,
            args=(started,),
            name='a2a-lease-heartbeat',
            daemon=True,
        )
        self._thread.start()

    async def ended(self, *, timeout: float) -> bool:
        await asyncio.get_running_loop().run_in_executor(
            None, self._thread.join, timeout
        )
        return not self._thread.is_alive()


def on_a_thread(
    heartbeat: Heartbeat, started: Callable[[BaseException | None], None]
) -> Life:
    """Runs a heartbeat on a thread of its own.

    Args:
        heartbeat: One that does not run yet.
        started: Called once, with what stood in the way or None.
    """
    return _Thread(heartbeat, started)
