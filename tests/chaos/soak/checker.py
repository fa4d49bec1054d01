"""Looks all the time at whether the promises hold."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from a2a.server.cluster import VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.models import TaskEventModel, TaskModel
from a2a.types.a2a_pb2 import StreamResponse, Task, TaskState
from sqlalchemy import select

from a2a_lease import DatabaseLeaseStore
from a2a_lease.model import Session, SessionState
from a2a_lease.outage import is_outage
from a2a_lease.turns.marks import INTERRUPTED, TERMINAL
from chaos.soak.customers import Errand, Request
from chaos.soak.fleet import Fleet, Life
from chaos.soak.trouble import Troubles
from support.cluster import passed_over
from support.inprocess import NamedUser
from support.log import artifacts_of, broken_log, broken_stream, state_name


if TYPE_CHECKING:
    from support.databases import Database


_T = TypeVar('_T')
MAX_ATTEMPTS = 10
_SETTLES = 60.0
"""Seconds in which a task comes to rest once its client has what it wants."""
COMPLETED = TaskState.TASK_STATE_COMPLETED
FAILED = TaskState.TASK_STATE_FAILED
CANCELED = TaskState.TASK_STATE_CANCELED
INPUT_REQUIRED = TaskState.TASK_STATE_INPUT_REQUIRED


@dataclass
class Run:
    """One run of the agent."""

    life: Life
    attempt: int
    ended: bool = False


@dataclass
class Detection:
    """How long it took to declare a killed replica dead."""

    seconds: float
    quiet: bool
    """Whether the database was there all the time."""


@dataclass
class _Logged:
    runs: list[Run] = field(default_factory=list)
    overlaps: list[tuple[Life, Life]] = field(default_factory=list)


class Checker:
    """Checks each task when it is over, and sessions as they end."""

    def __init__(
        self, fleet: Fleet, troubles: Troubles, database: Database
    ) -> None:
        """Takes what to look at."""
        self._fleet = fleet
        self._troubles = troubles
        self._is_file = database.kind == 'sqlite'
        self._engine = database.engine(pool_pre_ping=True)
        self._tasks = VersionedDatabaseTaskStore(self._engine)
        self._leases = DatabaseLeaseStore(self._engine)
        self._waiting: dict[str, tuple[Errand, float]] = {}
        self._checked: set[str] = set()
        self._log: dict[str, _Logged] = defaultdict(_Logged)
        self._log_at = 0
        self.told: dict[str, list[int]] = defaultdict(list)
        """What the webhook heard of each task."""
        self._sessions_seen: set[str] = set()
        self.violations: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.detections: list[Detection] = []
        self.looks = 0

    async def close(self) -> None:
        """Lets go of the database."""
        await self._engine.dispose()

    def hear(self, event: StreamResponse) -> None:
        """Takes what the webhook was told."""
        if event.HasField('task'):
            self.told[event.task.id].append(event.task.status.state)
        elif event.HasField('status_update'):
            update = event.status_update
            self.told[update.task_id].append(update.status.state)

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
        self._read_log()
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
        for lease in await self._leases.leases(limit=100_000):
            if lease.session_id is not None:
                return f'a lease is left: {lease}'
        for task_id, state in await self._all():
            if state not in TERMINAL | INTERRUPTED:
                return f'{task_id} is {state_name(state)}'
        return ''

    async def finish(self) -> None:
        """Checks what no client knew of."""
        for task_id, _ in await self._all():
            if task_id not in self._checked:
                self._broken(await self._check(task_id, None))

    async def _all(self) -> list[tuple[str, int]]:
        async with self._engine.connect() as connection:
            rows = await connection.execute(
                select(TaskModel.id, TaskModel.owner)
            )
            owners = {row.id: row.owner for row in rows}
        found = []
        for task_id, owner in owners.items():
            if task_id in self._checked:
                continue
            task = await self._task(task_id, owner)
            assert task is not None
            found.append((task_id, task.status.state))
        return found

    async def _task(self, task_id: str, user: str) -> Task | None:
        context = ServerCallContext(user=NamedUser(user))
        stored = await self._tasks.get(task_id, context)
        return stored.task if stored is not None else None

    async def _owner(self, task_id: str) -> str:
        async with self._engine.connect() as connection:
            return (
                await connection.scalar(
                    select(TaskModel.owner).where(TaskModel.id == task_id)
                )
            ) or ''

    async def _unsettled(self, task_id: str) -> str:
        # Leases first: what they stand for ends before they go.
        lease = await self._leases.get('commanded', task_id)
        if lease is not None and lease.session_id is not None:
            return f'a lease is left: {lease}'
        task = await self._task(task_id, await self._owner(task_id))
        if task is None:
            return f'task {task_id} is not there'
        if task.status.state not in TERMINAL | INTERRUPTED:
            return f'{task_id} is {state_name(task.status.state)}, unheld'
        return ''

    # Runs of agents.

    def _read_log(self) -> None:
        path = self._fleet.folder / 'agent.log'
        if not path.exists():
            return
        with path.open('rb') as log:
            log.seek(self._log_at)
            data = log.read()
        whole = data[: data.rfind(b'\n') + 1]
        self._log_at += len(whole)
        for line in whole.splitlines():
            self._note(json.loads(line))

    def _note(self, line: dict[str, Any]) -> None:
        what, _, attempt = line['what'].partition(' ')
        life = self._fleet.by_pid[line['pid']]
        logged = self._log[line['task']]
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

    # Sessions.

    async def _sessions(self) -> None:
        for session in await self._leases.sessions():
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

    # Tasks.

    async def _check(self, task_id: str, errand: Errand | None) -> list[str]:
        owner = await self._owner(task_id)
        task = await self._task(task_id, owner)
        if task is None:
            return [f'a task is lost: {task_id}']
        self._checked.add(task_id)
        kind = errand.kind if errand is not None else 'unknown'
        state = task.status.state
        recovered = 'a2a_lease' in dict(task.metadata)
        self.outcomes[
            f'{kind}: {state_name(state)}{", taken over" if recovered else ""}'
        ] += 1
        logged = self._log.pop(task_id, _Logged())
        found = [
            *await self._events(task_id, state),
            *_parts(task),
            *self._runs(task_id, logged),
        ]
        if errand is not None:
            if owner != errand.user:
                found.append(
                    f'11 (owners stay owners): {task_id} of {errand.user} '
                    f'belongs to {owner!r}'
                )
            found += _outcome(task, errand, logged)
            found += _streams(task, errand)
            found += self._pushes(task, errand)
        self.told.pop(task_id, None)
        return found

    async def _events(self, task_id: str, state: int) -> list[str]:
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
        versions = [version for version, _ in rows]
        found = []
        if versions != sorted(set(versions)):
            found.append(f'4 (fenced): versions of {task_id}: {versions}')
        events = []
        for _, data in rows:
            event = StreamResponse.FromString(data)
            events.append(getattr(event, str(event.WhichOneof('payload'))))
        return found + list(broken_log(task_id, events, state))

    def _runs(self, task_id: str, logged: _Logged) -> Iterable[str]:
        for before, after in logged.overlaps:
            if not before.may_count_as_dead():
                yield (
                    f'8 (one turn at a time): {task_id} began on replica '
                    f'{after.number} while it ran on {before.number}'
                )
        deaths = sum(
            1 for life in self._fleet.lives if life.may_count_as_dead()
        )
        for run in logged.runs:
            if run.attempt > 1 + deaths:
                yield (
                    f'10 (attempts count crashes): attempt {run.attempt} of '
                    f'{task_id} after {deaths} crashes'
                )

    def _pushes(self, task: Task, errand: Errand) -> Iterable[str]:
        if not errand.webhook:
            return
        state, told = task.status.state, self.told[task.id]
        if others := (set(told) & TERMINAL) - {state}:
            yield (
                f'6 (one outcome): {task.id} is {state_name(state)}, its '
                f'webhook heard {[state_name(s) for s in others]} too'
            )
        if state in told or task.id in passed_over(self._fleet.folder):
            return
        if state == CANCELED and any(
            life.may_count_as_dead() for life in errand.cancels
        ):
            # No lease tells of the cancel of a paused task.
            return
        yield (
            f'6 (each webhook is told): {task.id} is {state_name(state)}, its '
            f'webhook heard {[state_name(s) for s in told]}'
        )


def _parts(task: Task) -> Iterable[str]:
    """What agents counted is there once, and in order."""
    for texts in artifacts_of(task).values():
        numbers = [text.strip() for text in texts]
        if numbers != [str(number) for number in range(len(numbers))]:
            yield f'9 (the same turn): {task.id} counts {numbers}'
    messages = [message.message_id for message in task.history]
    if len(messages) != len(set(messages)):
        yield f'9 (the same turn): a message is twice in {task.id}'


def _outcome(task: Task, errand: Errand, logged: _Logged) -> Iterable[str]:
    state = task.status.state
    mark = dict(task.metadata).get('a2a_lease')
    wrong = (
        f'6 (one outcome): {task.id} ({errand.kind}) is {state_name(state)} '
        f'with {mark} after '
        f'{[(run.life.number, run.attempt) for run in logged.runs]}'
    )
    if state == CANCELED:
        if not errand.canceled:
            yield wrong
        return
    if errand.kind == 'raise':
        if state != FAILED:
            yield wrong
        return
    if state == FAILED and mark is not None:
        if errand.kind == 'once':
            if not any(run.life.may_count_as_dead() for run in logged.runs):
                yield f'3 (no harm): {wrong}'
        elif int(mark['attempt']) < MAX_ATTEMPTS:
            yield wrong
        return
    if state in INTERRUPTED:
        # A login stays one if whoever waited for it has died; a question if
        # its client was told that it had been answered.
        if errand.kind != 'login':
            yield wrong
        return
    if state != COMPLETED:
        yield wrong
        return
    texts = [text for texts in artifacts_of(task).values() for text in texts]
    if len(texts) != errand.count:
        yield f'9 (the same turn): {task.id} counts {texts} of {errand.count}'
    kept = {message.message_id for message in task.history}
    if not set(errand.said) <= kept:
        yield f'9 (nothing lost): {task.id} lacks a message of {errand.said}'


def _streams(task: Task, errand: Errand) -> Iterable[str]:
    for request in errand.requests:
        if request.heard.task_id != task.id:
            continue
        who = (
            f'{request.kind} of {task.id} ({errand.kind}) on replica '
            f'{request.life.number}'
        )
        if request.life.may_count_as_dead():
            continue
        yield from _one_stream(task, errand, request, who)


def _one_stream(
    task: Task, errand: Errand, request: Request, who: str
) -> Iterable[str]:
    if request.error is not None:
        if errand.kind != 'raise':  # The SDK passes on what the agent raised.
            yield f'4 (streams go on): {who} broke: {request.error!r}'
    elif request.hung_up:
        if task.status.state in TERMINAL and not request.life.silences:
            named = [state_name(state) for state in request.heard.states]
            yield f'4 (streams go on): {who} did not end after {named}'
    else:
        yield from broken_stream(
            who,
            request.heard.payloads,
            task,
            subscribed=request.kind == 'listen',
        )
