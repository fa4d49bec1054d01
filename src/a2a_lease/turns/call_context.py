"""Carrying the holder of a lease from a request to its saves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from a2a.server.context import ServerCallContext

    from a2a_lease.turns.hold import Hold


class _HoldingState(MutableMapping[str, Any]):
    """The state of a call context, and the hold beside it.

    All but the hold is read from and written to the original, so that a
    middleware that kept a reference sees what the agent writes.
    """

    def __init__(
        self,
        original: MutableMapping[str, Any],
        hold: Callable[[], Hold | None],
        *,
        queued: bool,
    ) -> None:
        self._original = original
        self.hold = hold
        self.queued = queued
        self.saved_outcome = False

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401
        return self._original[key]

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401
        self._original[key] = value

    def __delitem__(self, key: str) -> None:
        del self._original[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._original)

    def __len__(self) -> int:
        return len(self._original)

    def __repr__(self) -> str:
        return repr(self._original)


def with_hold(
    context: ServerCallContext, hold: Hold | None, *, queued: bool = False
) -> ServerCallContext:
    """Returns the call context with the hold under which its saves go.

    Context variables do not reach the task store, which runs in another
    asyncio task than the agent; the call context does.

    Args:
        context: Of the request.
        hold: Under which it saves.
        queued: Whether it is that of a request which the SDK has queued, and
            whose client no longer hears of an error by itself.
    """
    return with_current_hold(context, lambda: hold, queued=queued)


def with_current_hold(
    context: ServerCallContext,
    hold: Callable[[], Hold | None],
    *,
    queued: bool = False,
) -> ServerCallContext:
    """Does what `with_hold` does, with a hold that changes meanwhile."""
    state = context.state
    if isinstance(state, _HoldingState):
        state = state._original  # noqa: SLF001
    return context.model_copy(
        update={'state': _HoldingState(state, hold, queued=queued)}
    )


@contextmanager
def saving_outcome(context: ServerCallContext) -> Generator[None]:
    """Notes that a save in this call moves its task into a terminal state.

    One that was given up may land yet.
    """
    state = context.state
    if isinstance(state, _HoldingState):
        state.saved_outcome = True
    try:
        yield
    except Exception:
        if isinstance(state, _HoldingState):
            state.saved_outcome = False
        raise


def saved_outcome(context: ServerCallContext) -> bool:
    """Whether this very call saved an outcome, for all one knows."""
    state = context.state
    return isinstance(state, _HoldingState) and state.saved_outcome


def hold_of(context: ServerCallContext) -> Hold | None:
    """Returns the hold that `with_hold` put there."""
    state = context.state
    return state.hold() if isinstance(state, _HoldingState) else None


def is_queued(context: ServerCallContext) -> bool:
    """Returns what `with_hold` was told."""
    state = context.state
    return isinstance(state, _HoldingState) and state.queued
