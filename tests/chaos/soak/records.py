"""What there is to look at: the database, and the log of the agents."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.models import TaskEventModel, TaskModel
from a2a.types.a2a_pb2 import StreamResponse, Task
from sqlalchemy import select

from a2a_lease import DatabaseLeaseStore
from chaos.soak.fleet import Fleet, Life
from support.inprocess import NamedUser


if TYPE_CHECKING:
    from support.databases import Database


@dataclass
class Run:
    """One run of the agent."""

    life: Life
    attempt: int
    ended: bool = False


@dataclass
class Runs:
    """All that the agent did for one task."""

    runs: list[Run] = field(default_factory=list)
    overlaps: list[tuple[Life, Life]] = field(default_factory=list)
    """Whose run had not ended when whose began."""


class AgentLog:
    """What agents wrote down."""

    def __init__(self, fleet: Fleet) -> None:
        """Takes those who write it."""
        self._fleet = fleet
        self._at = 0
        self._runs: dict[str, Runs] = defaultdict(Runs)

    def read(self) -> None:
        """Reads on."""
        path = self._fleet.folder / 'agent.log'
        if not path.exists():
            return
        with path.open('rb') as log:
            log.seek(self._at)
            data = log.read()
        whole = data[: data.rfind(b'\n') + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._note(json.loads(line))

    def _note(self, line: dict[str, Any]) -> None:
        what, _, attempt = line['what'].partition(' ')
        life = self._fleet.by_pid[line['pid']]
        logged = self._runs[line['task']]
        if what == 'began':
            logged.overlaps += [
                (run.life, life) for run in logged.runs if not run.ended
            ]
            logged.runs.append(Run(life, int(attempt)))
        elif what == 'ended':
            for run in logged.runs:
                if run.life is life and not run.ended:
                    run.ended = True
                    break

    def take(self, task_id: str) -> Runs:
        """Returns what was done for a task, and forgets it."""
        return self._runs.pop(task_id, Runs())


class Records:
    """What is stored, read as it is."""

    def __init__(self, database: Database) -> None:
        """Takes where."""
        self._engine = database.engine(pool_pre_ping=True)
        self._tasks = VersionedDatabaseTaskStore(self._engine)
        self.leases = DatabaseLeaseStore(self._engine)

    async def close(self) -> None:
        """Lets go of the database."""
        await self._engine.dispose()

    async def owners(self) -> dict[str, str]:
        """Returns all tasks, with whose they are."""
        async with self._engine.connect() as connection:
            rows = await connection.execute(
                select(TaskModel.id, TaskModel.owner)
            )
            return {row.id: row.owner for row in rows}

    async def owner(self, task_id: str) -> str:
        """Returns whose a task is, or an empty string if there is none."""
        async with self._engine.connect() as connection:
            return (
                await connection.scalar(
                    select(TaskModel.owner).where(TaskModel.id == task_id)
                )
            ) or ''

    async def task(self, task_id: str, user: str) -> Task | None:
        """Returns a task as its owner sees it."""
        context = ServerCallContext(user=NamedUser(user))
        stored = await self._tasks.get(task_id, context)
        return stored.task if stored is not None else None

    async def events(self, task_id: str) -> list[tuple[int, Any]]:
        """Returns the events of a task in their order, each with its version."""
        async with self._engine.connect() as connection:
            rows = (
                await connection.execute(
                    select(
                        TaskEventModel.task_version, TaskEventModel.event_data
                    )
                    .where(TaskEventModel.task_id == task_id)
                    .order_by(TaskEventModel.seq)
                )
            ).all()
        found = []
        for version, data in rows:
            event = StreamResponse.FromString(data)
            found.append(
                (version, getattr(event, str(event.WhichOneof('payload'))))
            )
        return found
