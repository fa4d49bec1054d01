"""Which promises of the design a simulation broke."""

from __future__ import annotations

from collections.abc import Iterable

from a2a.utils.errors import UnsupportedOperationError

from a2a_lease.model import SessionState
from a2a_lease.turns.marks import TERMINAL
from simulation.world import REFUSED, SILENT, Replica, World
from support.inprocess import call
from support.log import artifacts_of, broken_log, broken_stream, state_name


async def broken(world: World) -> list[str]:
    """Looks at everything, and names each promise that broke."""
    return [
        *_nothing_is_left_behind(world),
        *_events(world),
        *_parts(world),
        *_runs(world),
        *await _sessions(world),
        *_streams(world),
        *await _pushes(world),
        *_harmless(world),
    ]


def _nothing_is_left_behind(world: World) -> Iterable[str]:
    if world.unsettled:
        yield f'1 (nothing is left behind): {world.unsettled}'


def _events(world: World) -> Iterable[str]:
    for task_id, record in world.database.tasks.items():
        yield from broken_log(
            task_id,
            [event for _, event in record.events],
            record.task.status.state,
        )


def _parts(world: World) -> Iterable[str]:
    """What agents counted is there once, and in order."""
    for task_id, record in world.database.tasks.items():
        for name, texts in artifacts_of(record.task).items():
            if texts != [str(number) for number in range(len(texts))]:
                yield f'9 (the same turn): {name} of {task_id} reads {texts}'
        messages = [m.message_id for m in record.task.history]
        if len(messages) != len(set(messages)):
            yield f'9 (the same turn): a message is twice in {task_id}'


def _was_silent(replica: Replica) -> bool:
    """Whether it may have been taken for dead."""
    if replica.is_dead and not replica.ended.is_set():
        return True
    spans: list[list[float]] = []
    for began, ended in sorted(replica.silences):
        if spans and began < spans[-1][1] + 2:
            spans[-1][1] = max(spans[-1][1], ended)
        else:
            spans.append([began, ended])
    return (
        any(ended - began >= SILENT for began, ended in spans)
        or any(ended - began >= REFUSED for began, ended in replica.refusals)
        or any(
            began - REFUSED <= at and ended - max(began, at) >= REFUSED
            for began, ended in spans
            for at in replica.unheard
        )
    )


def _runs(world: World) -> Iterable[str]:
    deaths = world.deaths + sum(
        len(replica.silences) + replica.disturbed + replica.stubborn
        for replica in world.replicas
    )
    for run in world.runs:
        for other in run.beside:
            if not (other.replica.is_dead or other.replica.disturbed):
                yield (
                    f'8 (one turn at a time): {run.task_id} began on '
                    f'{run.replica.name} while it ran on {other.replica.name}'
                )
        if run.attempt > 1 + deaths:
            yield (
                f'10 (attempts count crashes): attempt {run.attempt} of '
                f'{run.task_id} after {deaths} crashes'
            )


async def _sessions(world: World) -> list[str]:
    found = []
    for session in await world.database.leases.sessions():
        for replica in world.replicas:
            if session.id not in replica.line.sessions:
                continue
            left = replica.ended.is_set() and (
                replica.disturbed or replica.stubborn
            )
            if (
                session.state is SessionState.FENCED
                and not _was_silent(replica)
                and not left
            ):
                found.append(
                    f'7 (the living are not declared dead): {session} is that '
                    f'of {replica.name}'
                )
    return found


def _streams(world: World) -> Iterable[str]:
    for client in world.clients.values():
        for heard in client.heard:
            record = world.database.tasks.get(heard.task_id)
            gone = heard.replica.is_dead
            if record is None or gone or heard.kind == 'cancel':
                continue
            if not heard.done.is_set():
                continue  # Of a task that has paused.
            who = (
                f'the {heard.kind} stream of client {client.number} to '
                f'{heard.task_id} on {heard.replica.name}'
            )
            if isinstance(heard.error, RuntimeError):
                # Of the agent; the SDK passes it on.
                continue
            if isinstance(
                heard.error, UnsupportedOperationError
            ) and heard.said not in {
                message.message_id for message in record.task.history
            }:
                continue  # It waited too long, and was not delivered.
            if heard.error is not None:
                yield f'4 (streams go on): {who} broke: {heard.error!r}'
                continue
            yield from broken_stream(
                who,
                heard.events,
                record.task,
                subscribed=heard.kind == 'listen',
            )


async def _pushes(world: World) -> list[str]:
    found = []
    for task_id, record in world.database.tasks.items():
        if not await world.configs.get_info(task_id, call()):
            continue
        told = world.pushed.get(task_id, [])
        state = record.task.status.state
        if state not in told:
            found.append(
                f'6 (each webhook is told): {task_id} is {state_name(state)}, its '
                f'webhook heard {[state_name(s) for s in told]}'
            )
        if others := (set(told) & TERMINAL) - {state}:
            found.append(
                f'6 (one outcome): {task_id} is {state_name(state)}, its webhook '
                f'heard {[state_name(s) for s in sorted(others)]} too'
            )
    return found


def _harmless(world: World) -> Iterable[str]:
    """Where nothing goes wrong, nothing is different."""
    if world.trouble:
        return
    for task_id, record in world.database.tasks.items():
        if 'a2a_lease' in dict(record.task.metadata):
            yield f'3 (no harm): {task_id} was recovered though nobody died'
