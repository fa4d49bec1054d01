"""This process as one of the replicas of a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

from a2a_lease.errors import LeaseError
from a2a_lease.outage import insist
from a2a_lease.replica.clock import SYSTEM_CLOCK
from a2a_lease.replica.heartbeat import Heartbeat, on_a_thread


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from a2a_lease.replica.clock import Clock
    from a2a_lease.replica.heartbeat import Life, Listener
    from a2a_lease.replica.session import LiveSession
    from a2a_lease.settings import LeaseSettings
    from a2a_lease.stores.lease_store import LeaseStore


logger = logging.getLogger(__name__)

_inherited: list[object] = []
"""What a forked child got from its parent. It is kept, since letting it go
would close connections that the parent still uses."""


class Replica:
    """Joins the others when it starts, and leaves them when it closes."""

    def __init__(
        self,
        store: LeaseStore,
        settings: LeaseSettings,
        service: str,
        *,
        listener: Listener,
        clock: Clock = SYSTEM_CLOCK,
        live: Callable[
            [Heartbeat, Callable[[BaseException | None], None]], Life
        ] = on_a_thread,
    ) -> None:
        self._store = store
        self._settings = settings
        self._service = service
        self._listener = listener
        self._clock = clock
        self._heartbeat: Heartbeat | None = None
        self._live = live
        self._life: Life | None = None
        self._pid = 0
        self._ready = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def started(self) -> bool:
        """Whether this very process beats; a fork of it does not."""
        return self._heartbeat is not None and self._pid == os.getpid()

    @property
    def session(self) -> LiveSession | None:
        """The current session, which may have ended."""
        return self._heartbeat.session if self._heartbeat else None

    async def start(self) -> None:
        """Opens a session and beats.

        Raises:
            Exception: What the store said, if no session could be opened.
        """
        if self.started:
            return
        if self._heartbeat is not None:
            _inherited.append((self._heartbeat, self._life))
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._pid = os.getpid()
        self._ready = asyncio.Event()
        begun: asyncio.Future[None] = loop.create_future()

        def answer(error: BaseException | None) -> None:
            if begun.done():
                return
            if error is None:
                begun.set_result(None)
            else:
                begun.set_exception(error)

        heartbeat = Heartbeat(
            self._store,
            self._settings,
            self._service,
            label=f'{socket.gethostname()}:{os.getpid()}',
            listener=self._listener,
            clock=self._clock,
            on_session=self._opened,
        )
        self._heartbeat = heartbeat

        def started(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(answer, error)

        self._life = self._live(heartbeat, started)
        try:
            await begun
        except BaseException:
            heartbeat.stop()
            self._heartbeat = self._life = None
            raise

    def _opened(self, session: LiveSession) -> None:
        del session
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._ready.set)

    async def open_session(self, *, timeout: float) -> LiveSession:
        """Returns a session to acquire under.

        Args:
            timeout: Seconds to wait for a new one after the last was lost.

        Raises:
            LeaseError: There is none in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while True:
                    session = self.session
                    if session is not None and not session.ended:
                        return session
                    self._ready.clear()
                    await self._ready.wait()
        except TimeoutError:
            raise LeaseError(
                'This replica has no session, since it cannot reach the '
                'database or shuts down.'
            ) from None

    async def hand_over(
        self, tokens: Mapping[str, int], *, timeout: float | None = None
    ) -> None:
        """Leaves leases to others while this replica's session lives on.

        Args:
            tokens: The leases by task id.
            timeout: Seconds for which it is tried; `stop_timeout` if None.

        Raises:
            Exception: What the store said in the end.
        """
        if tokens:
            session_id = uuid.uuid4().hex
            await insist(
                lambda: self._store.hand_over(
                    self._service, tokens, session_id=session_id
                ),
                timeout=self._settings.stop_timeout
                if timeout is None
                else timeout,
            )

    async def close(self, *, timeout: float) -> None:
        """Closes the session and stops beating.

        Args:
            timeout: Seconds to wait for the database.
        """
        if not self.started or self._heartbeat is None or self._life is None:
            return
        self._heartbeat.stop()
        if not await self._life.ended(timeout=timeout):
            logger.warning(
                'The database gave no answer for %g s; if the session stays '
                'open, others take over after its time to live of %g s.',
                timeout,
                self._settings.ttl,
            )
        self._heartbeat = self._life = None
