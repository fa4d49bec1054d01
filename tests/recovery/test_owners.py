"""Names that are made to break something, in every string that is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2a.server.context import ServerCallContext
from a2a.server.models import TaskModel
from sqlalchemy import select

from support.inprocess import COMPLETED, WORKING, NamedUser, until
from support.stage import forever, spawn


if TYPE_CHECKING:
    from support.inprocess import Desk
    from support.stage import Stage


STRANGE = [
    "'; DROP TABLE tasks; --",
    "\\' OR 1=1 #",
    '"}]}{"user_name": "root"',
    '%s %(id)s :id ? $1 {0}',
    '<script>alert(1)</script>',
    'case',
    'CASE',
    'e\N{COMBINING ACUTE ACCENT}',
    '\N{LATIN SMALL LETTER E WITH ACUTE}',
    '\N{RIGHT-TO-LEFT OVERRIDE}\N{FOX FACE}\N{ZERO WIDTH JOINER}',
    'line\nbreak\ttab\x1b[31m\x7f',
    'x' * 255,
]


async def test_each_strange_owner_gets_the_own_task_back(stage: Stage):
    seen: dict[str, tuple[str, str]] = {}

    async def script(desk: Desk, number: int) -> None:
        del number
        name = desk.context.call_context.user.user_name
        if name not in seen:
            seen[name] = ('', '')
            await desk.task(WORKING)
            await forever()
        seen[name] = (desk.task_id, desk.context.call_context.tenant)
        await desk.status(COMPLETED)

    await stage.open(script)
    for name in STRANGE:
        context = ServerCallContext(user=NamedUser(name), tenant=f'of {name}')
        spawn(stage, context=context)
    await stage.until_began(len(STRANGE))
    await stage.kill()

    async def all_ran_again() -> bool:
        return all(task_id for task_id, _ in seen.values())

    await until(all_ran_again)
    for name, (task_id, tenant) in seen.items():
        assert tenant == f'of {name}'

        async def completed(task_id=task_id, name=name) -> bool:
            return await stage[1].state(task_id, name) == COMPLETED

        await until(completed)
    async with stage.service.engine.connect() as connection:
        rows = await connection.execute(select(TaskModel.id, TaskModel.owner))
        owners = {row.id: row.owner for row in rows}
    # To the letter: MariaDB finds a task of another case too.
    assert owners == {task_id: name for name, (task_id, _) in seen.items()}
