"""SIGTERM begins the draining, and a drain happens once."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from a2a_lease.turns.stopping import stop


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

    from a2a_lease.turns.admission import Admission


logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Chained:
    """Runs a callback, then the handler that was there before.

    It shows the owner of the handler before as its own: servers and their
    add-ons find each other through the bound method that they registered.
    """

    def __init__(self, callback: Callable[[], None], before: Any) -> None:  # noqa: ANN401
        self._callback = callback
        self.before = before
        owner = getattr(before, '__self__', None)
        if owner is not None:
            self.__self__ = owner

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._callback()
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class Shutdown:
    """Begins to drain when the process is told to end.

    Web servers tell an application only when its last request is answered,
    and a blocking request is answered only when its turn is over: too late.
    """

    def __init__(
        self, *, drain: Callable[[], Awaitable[None]], admission: Admission
    ) -> None:
        self._drain = drain
        self._admission = admission
        self._draining: asyncio.Task[None] | None = None
        self._begun: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        """Set by a second signal: somebody will not wait."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._chained: dict[signal.Signals, _Chained] = {}

    def listen(self) -> None:
        """Listens for the signals that end a process, where it may."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                'Not on the main thread: call handler.drain() when the '
                'server begins to shut down.'
            )
            return
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # Not a handler of Python's own, or a process that ignores it.
            if before is None or before in (
                signal.SIG_DFL,
                signal.SIG_IGN,
                signal.default_int_handler,
            ):
                continue
            chained = _Chained(self._told, before)
            signal.signal(number, chained)
            self._chained[number] = chained

    def unlisten(self) -> None:
        """Puts back the handlers that were there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, chained in self._chained.items():
            if signal.getsignal(number) is chained:
                signal.signal(number, chained.before)
        self._chained.clear()

    def _told(self) -> None:
        self._admission.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._drain())  # type: ignore[assignment]
        else:
            self._hurried.set()

    async def unless_hurried(self, wait: Coroutine[None, None, object]) -> None:
        """Waits, but not after a second signal."""
        waits = {
            asyncio.ensure_future(wait),
            asyncio.ensure_future(self._hurried.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop(waits)

    async def once(self, drain: Callable[[], Any]) -> None:
        """Drains, or waits for the drain that is under way."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(drain())
        await asyncio.shield(self._draining)
