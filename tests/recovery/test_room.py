"""How many turns run again on one replica, and beside which."""

from __future__ import annotations

import asyncio

from a2a_lease.recovery.room import Room


class Guest:
    """Somebody who wants a place, and leaves it when told to."""

    def __init__(self, room: Room, *, apart: bool = False) -> None:
        self.inside = asyncio.Event()
        self._leaves = asyncio.Event()
        self._task = asyncio.create_task(self._stay(room, apart=apart))

    async def _stay(self, room: Room, *, apart: bool) -> None:
        async with room.place(apart=apart):
            self.inside.set()
            await self._leaves.wait()

    async def comes_in(self) -> None:
        async with asyncio.timeout(10):
            await self.inside.wait()

    async def leaves(self) -> None:
        self._leaves.set()
        await self._task

    async def gives_up(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_there_are_as_many_places_as_the_limit():
    room = Room(2)
    assert room.left == 2
    one, two, three = Guest(room), Guest(room), Guest(room)
    await one.comes_in()
    await two.comes_in()
    await _settle()
    assert not three.inside.is_set()
    assert room.left == 0
    await one.leaves()
    await three.comes_in()
    await two.leaves()
    await three.leaves()
    await _settle()
    assert room.left == 2


async def test_a_suspected_one_is_alone():
    room = Room(3)
    before, suspect = Guest(room), Guest(room, apart=True)
    await before.comes_in()
    after = Guest(room)
    await _settle()
    # It waits for those inside, and those who come later wait for it.
    assert not suspect.inside.is_set()
    assert not after.inside.is_set()
    assert room.left == 0
    await before.leaves()
    await suspect.comes_in()
    await _settle()
    assert not after.inside.is_set()
    assert room.left == 0
    await suspect.leaves()
    await after.comes_in()
    await after.leaves()


async def test_suspected_ones_come_one_after_another():
    room = Room(3)
    one, two = Guest(room, apart=True), Guest(room, apart=True)
    await one.comes_in()
    await _settle()
    assert not two.inside.is_set()
    await one.leaves()
    await two.comes_in()
    await two.leaves()


async def test_whoever_gives_up_waiting_holds_up_nobody():
    room = Room(1)
    one, suspect, other = Guest(room), Guest(room, apart=True), Guest(room)
    await one.comes_in()
    await _settle()
    await suspect.gives_up()
    await one.leaves()
    await other.comes_in()
    await other.leaves()
    last = Guest(room)
    await last.comes_in()
    await last.gives_up()
    await _settle()
    assert room.left == 1
