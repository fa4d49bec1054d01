"""What a stream makes of the local one under it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from a2a.server.cluster import ConcurrentTaskModificationError
from a2a.types.a2a_pb2 import TaskStatusUpdateEvent

from a2a_lease.turns.following import LocalStream
from a2a_lease.turns.hold import Loss
from a2a_lease.turns.shown import Shown


EVENT = TaskStatusUpdateEvent(task_id='task')


async def _breaks() -> Any:
    yield EVENT
    raise ConcurrentTaskModificationError('task')


async def test_the_error_of_a_lost_turn_is_not_the_client_s():
    """The save that is refused to a zombie; the stream goes on elsewhere."""
    turn: Any = SimpleNamespace(loss=Loss.TAKEN_OVER, shown=Shown())
    stream = LocalStream(_breaks(), turn, asyncio.Event()).events()
    assert [event async for event in stream] == [EVENT]


async def test_the_error_of_a_turn_that_goes_on_is_raised():
    turn: Any = SimpleNamespace(loss=None, shown=Shown())
    stream = LocalStream(_breaks(), turn, asyncio.Event()).events()
    assert await anext(stream) == EVENT
    with pytest.raises(ConcurrentTaskModificationError):
        await anext(stream)
