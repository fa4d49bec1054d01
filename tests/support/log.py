"""What is true of every task's log of events, and what clients make of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from a2a.types.a2a_pb2 import Task, TaskArtifactUpdateEvent, TaskState

from a2a_lease.turns.marks import INTERRUPTED, TERMINAL


def state_name(state: int) -> str:
    return TaskState.Name(state).removeprefix('TASK_STATE_')


def artifacts_of(task: Task) -> dict[str, list[str]]:
    """Returns the texts of each artifact."""
    return {
        artifact.artifact_id: [part.text for part in artifact.parts]
        for artifact in task.artifacts
    }


def rebuilt(
    events: Iterable[Any], *, subscribed: bool = False
) -> dict[str, list[str]]:
    """Puts artifacts together as a client does.

    Args:
        events: what it heard.
        subscribed: whether it subscribed to a task that was there. The SDK
            reads the task after it began to listen, and does not tell apart
            what came in between.
    """
    parts: dict[str, list[str]] = defaultdict(list)
    known: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, Task):
            parts = defaultdict(list, artifacts_of(event))
            known = artifacts_of(event) if subscribed else {}
        elif isinstance(event, TaskArtifactUpdateEvent):
            texts = [part.text for part in event.artifact.parts]
            name = event.artifact.artifact_id
            if set(texts) <= set(known.get(name, [])):
                continue
            parts[name] = parts[name] + texts if event.append else texts
    return dict(parts)


def broken_stream(
    who: str, heard: list[Any], task: Task, *, subscribed: bool
) -> Iterable[str]:
    """Names each promise that a stream breaks which ended in order.

    Args:
        who: whose stream, for people.
        heard: what came over it.
        task: as it is in the end.
        subscribed: as in `rebuilt`.
    """
    states = [event.status.state for event in heard if hasattr(event, 'status')]
    last, state = states[-1] if states else None, task.status.state
    if last not in TERMINAL | INTERRUPTED:
        yield (
            f'4 (streams go on): {who} ended with '
            f'{[state_name(each) for each in states]}'
        )
    elif last in INTERRUPTED:
        return  # The task may have gone on since.
    elif last != state:
        yield (
            f'6 (one outcome): {who} ended with {state_name(last)}, the task '
            f'is {state_name(state)}'
        )
    elif state != TaskState.TASK_STATE_CANCELED:
        # (The SDK's cancel overwrites what was saved meanwhile.)
        parts, whole = rebuilt(heard, subscribed=subscribed), artifacts_of(task)
        if not any(isinstance(event, Task) for event in heard):
            # Of a task that it knew it hears what is new.
            whole = {
                name: whole.get(name, [])[-len(texts) :]
                for name, texts in parts.items()
            }
        if parts != whole:
            yield (
                f'4 (streams go on): {who} brought {parts}, the task has '
                f'{whole}'
            )


def broken_log(
    task_id: str, events: Iterable[Any], state: int | None
) -> Iterable[str]:
    """Names each promise that a log breaks.

    Agents write the token of their lease into each event; the handler's own
    mark says that a newer lease took over.

    Args:
        task_id: whose log it is.
        events: in the order of the log.
        state: of the stored task, if there is one.
    """
    floor, ended, last = 0, None, None
    for event in events:
        kind = type(event).__name__
        metadata = dict(event.metadata)
        token = int(metadata.get('token', 0))
        if isinstance(event, Task) and event.status.state == (
            TaskState.TASK_STATE_CANCELED
        ):
            # The SDK's own, which repeats what the task says.
            token = 0
        if ended is not None:
            yield (
                f'5 (a terminal state never changes): {kind} of {task_id} '
                f'after {state_name(ended)}'
            )
        if not isinstance(event, TaskArtifactUpdateEvent):
            last = event.status.state
            if last in TERMINAL:
                ended = last
        if 'a2a_lease' in metadata:
            # From here on nothing of an older lease.
            floor += 1
        elif token and token < floor:
            yield (
                f'4 (fenced): token {token} wrote {kind} of {task_id} after '
                f'token {floor} had taken over'
            )
        else:
            floor = max(floor, token)
    if state is not None and last is not None and state != last:
        yield (
            f'6 (one outcome): {task_id} is {state_name(state)}, its last '
            f'event says {state_name(last)}'
        )
