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
from typing import TYPE_CHECKING, Protocol, TypeVar

from a2a_lease.errors import LeaseError
from a2a_lease.outage import insist
from a2a_lease.replica.line import Line
from a2a_lease.replica.session import LiveSession
from a2a_lease.replica.watcher import Watcher


if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from a2a_lease.model import (
        Look,
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
        self._wake = asyncio.Event()
        self._line = Line(store, settings, clock, on_lock=self._wake.set)
        self._settings = settings
        self._service = service
        self._label = label
        self._listener = listener
        self._clock = clock
        self._on_session = on_session
        self._watcher = Watcher(settings)
        self._notices = 0
        """How many cancels the last beat told of."""
        self._notices_read = 0
        self._looked_at = float('-inf')
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._opening: LiveSession | None = None
        self.session: LiveSession | None = None
        self.in_round = threading.Lock()
        """Held while something is under way, which a fork must not copy."""
        self.failures = 0
        """Beats in a row that did not land."""

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
            self._line.open()
            _living.add(self)
            await self._join()
        except Exception as error:  # noqa: BLE001 - told to whoever starts us
            await self._line.close()
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
        if self._line.may_break and session and session.silence < 4 * interval:
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
        self._line.start_anew()
        await self._line.call(
            self._line.store.open_session(
                session_id=session.id,
                service=self._service,
                ttl=self._settings.ttl,
                heartbeat_interval=self._settings.heartbeat_interval,
                label=self._label,
            )
        )
        self._notices = self._notices_read = 0
        landed = await self._line.beat(session)
        self._opening = None
        if landed.renewal is None:
            raise LeaseError(
                f'Session {session.id} was gone as soon as it was opened.'
            )
        session.confirm(sent_at=landed.sent_at)
        self.session = session
        self._on_session(session)

    async def _beat(self) -> Beat:
        session = self.session
        try:
            if session is None or session.ended:
                await self._open()
                return Beat.RENEWED
            landed = await self._line.beat(session)
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
        if landed.renewal is None:
            await self._lose(session)
            return Beat.LOST
        if self.failures > 1:
            logger.info('Beats land again, after %d failures.', self.failures)
        self.failures = 0
        session.confirm(sent_at=landed.sent_at)
        self._notices = landed.renewal.notices
        return Beat.RENEWED

    async def _take_notices(self) -> None:
        session, notices = self.session, self._notices
        if session is None or notices == self._notices_read:
            return
        try:
            leases = await self._between_beats(
                self._line.store.cancel_requests(self._service, session.id)
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
                    lambda: self._line.call(
                        self._line.store.close_session(session.id)
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
        await self._line.close()

    # The others.

    async def _look(self, now: float) -> None:
        session = self.session
        if session is None:
            return
        everyone = self._watcher.wants_everyone(now)
        try:
            look = await self._between_beats(
                self._line.store.look(
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
                    self._line.store.fence(
                        verdict.session.id, beat=verdict.session.beat
                    )
                ):
                    self._report(verdict)
            if verdicts:
                look = await self._between_beats(
                    self._line.store.look(
                        self._service, session.id, everyone=False
                    )
                )
                ended = look.ended
            if everyone:
                await self._between_beats(
                    self._line.store.prune_sessions(
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
        mine = self._line.lock
        # Whatever broke this connection may have broken theirs.
        if mine is None or now - self._line.broke_at < self._settings.ttl:
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
                self._line.store.released_locks(overdue)
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

    async def _between_beats(self, call: Coroutine[None, None, _T]) -> _T:
        """Asks the store, and beats on while it gives no answer."""
        return await self._line.call(call, meanwhile=self._beat)


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
