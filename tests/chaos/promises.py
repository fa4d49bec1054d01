"""Which promises of the design hold after a scenario, and which broke."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from a2a.server.models import (
    PushNotificationConfigModel,
    TaskEventModel,
    TaskModel,
)
from a2a.types.a2a_pb2 import StreamResponse, Task
from google.protobuf.json_format import MessageToDict
from sqlalchemy import select

from a2a_lease.model import SessionState
from chaos.faults import DEADLY, Kind
from chaos.stage import OVER, PAUSED
from support.cluster import passed_over
from support.log import artifacts_of, broken_log, rebuilt, state_name


if TYPE_CHECKING:
    from collections.abc import Iterable

    from chaos.stage import Client, Stage


async def broken(stage: Stage) -> list[str]:
    """Looks at everything, and names each promise that broke."""
    tasks = {}
    for task_id in await stage.task_ids():
        task = await stage.cluster.task(task_id)
        if task is not None:
            tasks[task_id] = task
    return [
        *_nothing_is_left_behind(stage),
        *await _outcomes(stage, tasks),
        *await _events(stage, tasks),
        *await _sessions(stage),
        *_runs(stage),
        *_streams(stage, tasks),
        *await _pushes(stage, tasks),
        *await _owners(stage),
    ]


def _plain(metadata: Any) -> str:
    return json.dumps(MessageToDict(metadata))


def _texts(task: Task) -> list[str]:
    return [part.text for a in task.artifacts for part in a.parts]


def _deadly(stage: Stage) -> bool:
    """Whether the victim died, or was away for so long that it counts."""
    fault = stage.fault
    if fault is None or not stage.reached:
        return False
    if fault.kind in DEADLY:
        return True
    # A transaction of the heartbeat that does not end keeps its row.
    if fault.kind is Kind.STALL and fault.thread == 'beat':
        return True
    # A replica that leaves ends before it can say so.
    return (
        fault.kind in (Kind.STALL, Kind.FREEZE)
        and stage.scenario.victim in stage.leaving
    )


def _nothing_is_left_behind(stage: Stage) -> Iterable[str]:
    if stage.unsettled:
        yield f'1 (nothing is left behind): {stage.unsettled}'


async def _outcomes(stage: Stage, tasks: dict[str, Task]) -> list[str]:
    found = []
    begun = Counter(
        line['task']
        for line in stage.cluster.agent_log()
        if line['what'].startswith('began')
    )
    for task in tasks.values():
        allowed = stage.scenario.outcomes
        if _deadly(stage):
            allowed |= stage.scenario.deadly
        lease = await stage.cluster.leases.get('commanded', task.id)
        if lease is not None and lease.token == begun[task.id]:
            # Its answer met the fault before anything was stored of it.
            allowed |= PAUSED
        found += _one_outcome(stage, task, allowed)
    return found


def _one_outcome(
    stage: Stage, task: Task, allowed: frozenset[int]
) -> Iterable[str]:
    state = task.status.state
    if state not in allowed:
        yield (
            f'6 (one outcome): task {task.id} is {state_name(state)} with '
            f'{_plain(task.metadata)}, and may be '
            f'{sorted(map(state_name, allowed))}'
        )
    texts = _texts(task)
    if len(texts) != len(set(texts)):
        yield f'4 (fenced): task {task.id} has parts twice: {texts}'
    messages = [message.message_id for message in task.history]
    if len(messages) != len(set(messages)):
        yield f'9 (the same turn): a message is twice in {task.id}'
    if 're_execute' in stage.scenario.config and state in OVER:
        numbers = [text.strip() for text in texts]
        if numbers != ['0', '1', '2']:
            yield f'4 (fenced): task {task.id} counted {numbers}'


async def _events(stage: Stage, tasks: dict[str, Task]) -> list[str]:
    found = []
    logs: dict[str, list[tuple[int, StreamResponse]]] = defaultdict(list)
    async with stage.cluster.engine.connect() as connection:
        for task_id, version, data in await connection.execute(
            select(
                TaskEventModel.task_id,
                TaskEventModel.task_version,
                TaskEventModel.event_data,
            ).order_by(TaskEventModel.seq)
        ):
            logs[task_id].append((version, StreamResponse.FromString(data)))
    for task_id, log in logs.items():
        versions = [version for version, _ in log]
        if versions != sorted(set(versions)):
            found.append(f'4 (fenced): versions of {task_id}: {versions}')
        task = tasks.get(task_id)
        found += broken_log(
            task_id,
            [getattr(e, e.WhichOneof('payload')) for _, e in log],
            task.status.state if task is not None else None,
        )
    return found


async def _sessions(stage: Stage) -> list[str]:
    found = []
    victim = stage.scenario.victim
    for session in await stage.cluster.leases.sessions():
        number = stage.pids.get(int(session.label.rpartition(':')[2]))
        dead = number in stage.dead or (number == victim and _deadly(stage))
        if session.state is SessionState.FENCED and not dead:
            found.append(
                f'7 (the living are not declared dead): {session} is that of '
                f'replica {number}'
            )
    return found


def _runs(stage: Stage) -> Iterable[str]:
    """Reads the log of the agents, in which the order is that of time."""
    victim = stage.scenario.victim
    under_way: dict[str, list[int]] = defaultdict(list)
    deaths = len(stage.dead)
    fault = stage.fault
    if _deadly(stage) and fault is not None and fault.kind is not Kind.KILL:
        deaths += 1
    for line in stage.cluster.agent_log():
        what, _, attempt = line['what'].partition(' ')
        runs = under_way[line['task']]
        if what == 'began':
            for pid in runs:
                number = stage.pids.get(pid)
                if number in stage.dead or (
                    number == victim and _deadly(stage)
                ):
                    continue
                yield (
                    f'8 (one turn at a time): {line["task"]} begins on '
                    f'{line["replica"]} while it runs on replica {number}'
                )
            runs.append(line['pid'])
            if int(attempt) > 1 + deaths:
                yield (
                    f'10 (attempts count crashes): attempt {attempt} of '
                    f'{line["task"]} after {deaths} crashes'
                )
        elif what == 'ended':
            runs.remove(line['pid'])


def _is_disturbed(stage: Stage) -> bool:
    """Whether the victim met an error, and lives."""
    fault = stage.fault
    return fault is not None and stage.reached and fault.kind not in DEADLY


def _was_refused(stage: Stage, client: Client) -> bool:
    """Whether a request met the error before its task was touched."""
    heard = client.heard
    return (
        _is_disturbed(stage)
        and client.replica == stage.scenario.victim
        and heard.error is not None
        and not heard.events
    )


def _streams(stage: Stage, tasks: dict[str, Task]) -> Iterable[str]:
    living = stage.living()
    for client in stage.clients:
        heard = client.heard
        if client.replica not in living:
            continue
        who = f'the stream of {heard.task_id} on replica {client.replica}'
        if _was_refused(stage, client):
            # Nothing was stored of its request.
            if not all(t.status.state in PAUSED for t in tasks.values()):
                yield f'4 (streams go on): {who} was refused: {heard.error!r}'
            continue
        if heard.error is not None:
            yield f'4 (streams go on): {who} broke: {heard.error!r}'
            continue
        task = tasks.get(heard.task_id)
        if task is None:
            continue
        states = [state_name(state) for state in heard.states]
        if not states or heard.states[-1] != task.status.state:
            yield (
                f'4 (streams go on): {who} ended with {states}, the task is '
                f'{state_name(task.status.state)}'
            )
        parts, whole = rebuilt(heard.payloads), artifacts_of(task)
        if parts != whole:
            yield (
                f'4 (streams go on): {who} brought {parts}, the task has '
                f'{whole}'
            )


async def _pushes(stage: Stage, tasks: dict[str, Task]) -> list[str]:
    found = []
    told: dict[str, list[int]] = defaultdict(list)
    for event in stage.cluster.webhook.events:
        if event.HasField('task'):
            told[event.task.id].append(event.task.status.state)
        elif event.HasField('status_update'):
            update = event.status_update
            told[update.task_id].append(update.status.state)
    async with stage.cluster.engine.connect() as connection:
        wanted = set(
            await connection.scalars(
                select(PushNotificationConfigModel.task_id)
            )
        )
    # The SDK's sender passes over a push if it cannot read to whom.
    unread = passed_over(stage.folder)
    for task_id in wanted & set(tasks):
        state = tasks[task_id].status.state
        states = told[task_id]
        if state not in states and task_id not in unread:
            found.append(
                f'6 (each webhook is told): {task_id} is {state_name(state)}, its '
                f'webhook heard {[state_name(s) for s in states]}'
            )
        if others := (set(states) & OVER) - {state}:
            found.append(
                f'6 (one outcome): {task_id} is {state_name(state)}, its webhook '
                f'heard {[state_name(s) for s in others]} too'
            )
    return found


async def _owners(stage: Stage) -> list[str]:
    async with stage.cluster.engine.connect() as connection:
        rows = await connection.execute(select(TaskModel.id, TaskModel.owner))
        return [
            f'11 (owners stay owners): task {task_id} belongs to {owner!r}'
            for task_id, owner in rows
            if owner != 'ada'
        ]
