"""An event loop on which hours pass in seconds, and processes die or stop.

All replicas of a simulation run on it. Whose a step is goes along with its
context, so the steps of one that is dead or stands still are held. Nothing here depends on anything but the order in which
steps are made, so the same schedule gives the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any


WHO: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar(
    'who', default=('world', '')
)
"""The process, and the thread in it, whose step it is."""
LOOP = 'loop'
BEAT = 'beat'


_TRIES_TO_END = 1000


class StuckError(Exception):
    """Nothing will ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing else to do."""

    def __init__(self) -> None:
        """Begins at 0."""
        self._now = 0.0
        self._dead: set[str] = set()
        self._still: Counter[tuple[str, str]] = Counter()
        self._held: dict[tuple[str, str], list[_Step]] = defaultdict(list)
        super().__init__(_Selector(self._pass))
        self.set_exception_handler(lambda loop, context: None)

    def _pass(self, seconds: float | None) -> None:
        if seconds is None:
            raise StuckError('Everybody waits for somebody else.')
        self._now += max(0.0, seconds)

    # What happens to processes.

    def kill(self, process: str) -> None:
        """Lets a process stand still for good."""
        self._dead.add(process)

    def hold(self, process: str, thread: str) -> None:
        """Lets a thread of a process stand still."""
        self._still[process, thread] += 1

    def go_on(self, process: str, thread: str) -> None:
        """Lets it go on with all that came for it meanwhile."""
        who = process, thread
        self._still[who] -= 1
        if self._still[who] or process in self._dead:
            return
        for step in self._held.pop(who, []):
            super().call_soon(step, context=step.context)

    def end(self) -> None:
        """Lets the dead come to their end too, who would do so at any time.

        They keep locks and open generators.
        """
        self._dead.clear()
        self._still.clear()
        for steps in self._held.values():
            for step in steps:
                super().call_soon(step, context=step.context)
        self._held.clear()
        self.run_until_complete(self._cancel_all())
        self.close()

    async def _cancel_all(self) -> None:
        for number in range(1, _TRIES_TO_END):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                return
            for task in left:
                task.cancel()
            # Hardly any time passes, in which they might begin anew.
            await asyncio.sleep(0.0 if number % 20 else 0.5)

    def is_dead(self, process: str) -> bool:
        """Whether it was killed."""
        return process in self._dead

    # What asyncio asks for.

    def time(self) -> float:
        """Returns virtual seconds."""
        return self._now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Has a step made, if its process still makes any then."""
        step = _Step(self, callback, args, context)
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Has a step made on the event loop of the process."""
        if context is None:
            context = contextvars.copy_context()
        process, thread = context.run(WHO.get)
        if thread == BEAT:
            context = contextvars.copy_context()
            context.run(WHO.set, (process, LOOP))
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Has a step made later."""
        step = _Step(self, callback, args, context)
        handle = super().call_at(when, step, context=step.context)
        step.handle = handle
        return handle

    def make(self, step: _Step) -> None:
        """Makes a step, or holds it."""
        who = WHO.get()
        if step.handle.cancelled():
            return
        if who[0] in self._dead or self._still[who]:
            self._held[who].append(step)
        else:
            step.callback(*step.args)


class _Step:
    handle: asyncio.Handle

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = (
            contextvars.copy_context() if context is None else context
        )
        self._loop = loop

    def __call__(self) -> None:
        self._loop.make(self)


class _Selector(selectors.BaseSelector):
    """Nothing is ever ready, and waiting takes no time."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        self._wait = wait
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        self._wait(timeout)
        return []

    def get_map(self) -> Any:
        return self._keys
