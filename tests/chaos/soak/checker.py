"""Looks all the time at whether the promises hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from a2a_lease.model import Session, SessionState
from a2a_lease.outage import is_outage
from a2a_lease.turns.marks import INTERRUPTED, TERMINAL
from chaos.soak.customers import Errand
from chaos.soak.fleet import Fleet, Life
from chaos.soak.records import AgentLog, Records
from chaos.soak.trouble import Troubles
from chaos.soak.verdict import Case, broken
from support.cluster import passed_over
from support.log import state_name


if TYPE_CHECKING:
    from a2a.types.a2a_pb2 import StreamResponse

    from support.databases import Database


_T = TypeVar('_T')
_SETTLES = 60.0
"""Seconds in which a task comes to rest once its client has what it wants."""


@dataclass
class Detection:
    """How long it took to declare a killed replica dead."""

    seconds: float
    quiet: bool
    """Whether the database was there all the time."""


class Checker:
    """Checks each task when it is over, and sessions as they end."""

    def __init__(
        self, fleet: Fleet, troubles: Troubles, database: Database
    ) -> None:
        """Takes what to look at."""
        self._fleet = fleet
        self._troubles = troubles
        self._is_file = database.kind == 'sqlite'
        self._records = Records(database)
        self._log = AgentLog(fleet)
        self._waiting: dict[str, tuple[Errand, float]] = {}
        self._checked: set[str] = set()
        self._told: dict[str, list[int]] = defaultdict(list)
        """What the webhook heard of each task."""
        self._sessions_seen: set[str] = set()
        self.violations: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.detections: list[Detection] = []
        self.looks = 0

    async def close(self) -> None:
        """Lets go of the database."""
        await self._records.close()

    def hear(self, event: StreamResponse) -> None:
        """Takes what the webhook was told."""
        if event.HasField('task'):
            self._told[event.task.id].append(event.task.status.state)
        elif event.HasField('status_update'):
            update = event.status_update
            self._told[update.task_id].append(update.status.state)

    def take(self, errand: Errand) -> None:
        """Takes an errand that is over for its client."""
        if errand.task_id:
            self._waiting[errand.task_id] = errand, time.time()

    def _broken(self, violations: Iterable[str]) -> None:
        for violation in violations:
            self.violations.append(violation)
            print(f'BROKEN {time.strftime("%T")}: {violation}', flush=True)

    async def run(self) -> None:
        """Looks, until it is cancelled."""
        while True:
            await self.outlast(self.look)
            await asyncio.sleep(0.5)

    async def outlast(self, look: Callable[[], Awaitable[_T]]) -> _T:
        """Looks until the database answers."""
        while True:
            try:
                async with asyncio.timeout(20):
                    return await look()
            except Exception as error:
                if not is_outage(error):
                    raise
            await asyncio.sleep(0.5)

    async def look(self) -> None:
        """Looks once."""
        self.looks += 1
        self._fleet.look()
        self._log.read()
        await self._sessions()
        for task_id, (errand, since) in list(self._waiting.items()):
            unsettled = await self._unsettled(task_id)
            if not unsettled:
                del self._waiting[task_id]
                self._broken(await self._check(task_id, errand))
            elif time.time() - since > _SETTLES and not self._is_away():
                del self._waiting[task_id]
                self._broken([f'1 (nothing is left behind): {unsettled}'])

    def _is_away(self) -> bool:
        silences = self._troubles.global_silences
        return any(
            end is None or time.time() - end < _SETTLES / 2
            for _, end in silences[-3:]
        )

    async def unsettled(self) -> str:
        """Says what is still under way of all that there is, or ''."""
        await self.look()
        if self._waiting:
            return f'tasks to look at: {list(self._waiting)}'
        for lease in await self._records.leases.leases(limit=100_000):
            if lease.session_id is not None:
                return f'a lease is left: {lease}'
        for task_id, owner in await self._unchecked():
            if unsettled := await self._at_work(task_id, owner):
                return unsettled
        return ''

    async def finish(self) -> None:
        """Checks what no client knew of."""
        for task_id, _ in await self._unchecked():
            self._broken(await self._check(task_id, None))

    async def _unchecked(self) -> list[tuple[str, str]]:
        return [
            (task_id, owner)
            for task_id, owner in (await self._records.owners()).items()
            if task_id not in self._checked
        ]

    async def _unsettled(self, task_id: str) -> str:
        # Leases first: what they stand for ends before they go.
        lease = await self._records.leases.get('commanded', task_id)
        if lease is not None and lease.session_id is not None:
            return f'a lease is left: {lease}'
        return await self._at_work(task_id, await self._records.owner(task_id))

    async def _at_work(self, task_id: str, owner: str) -> str:
        task = await self._records.task(task_id, owner)
        if task is None:
            return f'task {task_id} is not there'
        if task.status.state not in TERMINAL | INTERRUPTED:
            return f'{task_id} is {state_name(task.status.state)}, unheld'
        return ''

    async def _check(
        self, task_id: str, errand: Errand | None
    ) -> Iterable[str]:
        records = self._records
        owner = await records.owner(task_id)
        task = await records.task(task_id, owner)
        if task is None:
            return [f'a task is lost: {task_id}']
        events = await records.events(task_id)
        self._checked.add(task_id)
        case = Case(
            task=task,
            owner=owner,
            events=events,
            runs=self._log.take(task_id),
            deaths=sum(
                1 for life in self._fleet.lives if life.may_count_as_dead()
            ),
            errand=errand,
            told=self._told.pop(task_id, []),
            passed_over=task_id in passed_over(self._fleet.folder),
        )
        self.outcomes[case.name] += 1
        return broken(case)

    # Sessions.

    async def _sessions(self) -> None:
        for session in await self._records.leases.sessions():
            if (
                session.state is not SessionState.FENCED
                or session.id in self._sessions_seen
            ):
                continue
            self._sessions_seen.add(session.id)
            life = self._fleet.by_pid[int(session.label.rpartition(':')[2])]
            self._detected(session, life)
            if not life.may_count_as_dead():
                self._broken(
                    [
                        (
                            f'7 (the living are not declared dead): {session} of '
                            f'replica {life.number}, silent {life.silences}'
                        )
                    ]
                )

    def _detected(self, session: Session, life: Life) -> None:
        if life.ended is None or not life.was_killed or life.told_to_end:
            return
        assert session.ended_at is not None
        # The clock of SQLite is that of the process, which jumps.
        ended = time.time() if self._is_file else session.ended_at.timestamp()
        if ended < life.ended:
            return  # It was away before.
        away = [
            (began, end)
            for began, end in self._troubles.global_silences
            if began <= ended and (end is None or end >= life.ended - 1)
        ]
        self.detections.append(Detection(ended - life.ended, not away))
