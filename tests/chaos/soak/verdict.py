"""Whether the promises held for one task that is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from a2a.types.a2a_pb2 import Task, TaskState

from a2a_lease.turns.marks import INTERRUPTED, TERMINAL
from chaos.soak.customers import Errand, Request
from chaos.soak.records import Runs
from support.log import artifacts_of, broken_log, broken_stream, state_name


MAX_ATTEMPTS = 10
COMPLETED = TaskState.TASK_STATE_COMPLETED
FAILED = TaskState.TASK_STATE_FAILED
CANCELED = TaskState.TASK_STATE_CANCELED


@dataclass
class Case:
    """All that is known of one task."""

    task: Task
    owner: str
    events: list[tuple[int, Any]]
    """In their order, each with its version."""
    runs: Runs
    deaths: int
    """How many replicas may have counted as dead so far."""
    errand: Errand | None
    """What its client wanted, if that is known."""
    told: list[int]
    """The states of which its webhook heard."""
    passed_over: bool
    """Whether the SDK could not read where to push."""

    @property
    def name(self) -> str:
        """What becomes of it, for a table."""
        kind = self.errand.kind if self.errand is not None else 'unknown'
        recovered = 'a2a_lease' in dict(self.task.metadata)
        return (
            f'{kind}: {state_name(self.task.status.state)}'
            f'{", taken over" if recovered else ""}'
        )


def broken(case: Case) -> Iterable[str]:
    """Names each promise that did not hold."""
    yield from _events(case)
    yield from _parts(case.task)
    yield from _runs(case)
    errand = case.errand
    if errand is None:
        return
    if case.owner != errand.user:
        yield (
            f'11 (owners stay owners): {case.task.id} of {errand.user} '
            f'belongs to {case.owner!r}'
        )
    yield from _outcome(case.task, errand, case.runs)
    yield from _streams(case.task, errand)
    yield from _pushes(case, errand)


def _events(case: Case) -> Iterable[str]:
    task_id = case.task.id
    versions = [version for version, _ in case.events]
    if versions != sorted(set(versions)):
        yield f'4 (fenced): versions of {task_id}: {versions}'
    events = [event for _, event in case.events]
    yield from broken_log(task_id, events, case.task.status.state)


def _runs(case: Case) -> Iterable[str]:
    for before, after in case.runs.overlaps:
        if not before.may_count_as_dead():
            yield (
                f'8 (one turn at a time): {case.task.id} began on replica '
                f'{after.number} while it ran on {before.number}'
            )
    for run in case.runs.runs:
        if run.attempt > 1 + case.deaths:
            yield (
                f'10 (attempts count crashes): attempt {run.attempt} of '
                f'{case.task.id} after {case.deaths} crashes'
            )


def _pushes(case: Case, errand: Errand) -> Iterable[str]:
    if not errand.webhook:
        return
    task, state = case.task, case.task.status.state
    if others := (set(case.told) & TERMINAL) - {state}:
        yield (
            f'6 (one outcome): {task.id} is {state_name(state)}, its '
            f'webhook heard {[state_name(s) for s in others]} too'
        )
    if state in case.told or case.passed_over:
        return
    if state == CANCELED and any(
        life.may_count_as_dead() for life in errand.cancels
    ):
        # No lease tells of the cancel of a paused task.
        return
    yield (
        f'6 (each webhook is told): {task.id} is {state_name(state)}, its '
        f'webhook heard {[state_name(s) for s in case.told]}'
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


def _outcome(task: Task, errand: Errand, logged: Runs) -> Iterable[str]:
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
