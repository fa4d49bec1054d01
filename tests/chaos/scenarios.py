"""What a replica does while its fault comes: one scenario for each role.

Replica 0 is A, 1 is B, 2 is C. Scenarios end when the client has done its
part; `Stage.play` lets all settle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from a2a.types.a2a_pb2 import TaskState

from chaos.faults import NOT_ON_SQLITE
from support.cluster import (
    AUTH_REQUIRED,
    CANCELED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
)


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chaos.stage import Stage


@dataclass(frozen=True)
class Scenario:
    """One scenario."""

    name: str
    play: Callable[[Stage], Awaitable[None]]
    outcomes: frozenset[int]
    """How its tasks end if nobody dies but whom it kills itself."""
    deadly: frozenset[int]
    """How they may end besides if the victim dies or stands still."""
    victim: int = 0
    size: int = 2
    starts: int = 2
    """Those beyond come when the fault has happened."""
    config: dict[str, Any] = field(default_factory=dict)
    first: str = ''
    """What goes wrong in the victim before its fault comes."""

    def can_be_on(self, database: str) -> bool:
        """Whether it can be played on a database."""
        kind = self.first.partition('@')[0]
        return database != 'sqlite' or kind not in NOT_ON_SQLITE


SCENARIOS: dict[str, Scenario] = {}
AGAIN = {'re_execute': {'max_attempts': 5, 'backoff': 0.1}}


def _scenario(
    *outcomes: int, deadly: tuple[int, ...] = (FAILED,), **rest: Any
) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    def add(play: Callable[[Stage], Awaitable[None]]) -> None:
        name = play.__name__.strip('_').replace('_', '-')
        SCENARIOS[name] = Scenario(
            name, play, frozenset(outcomes), frozenset(deadly), **rest
        )

    return add


@_scenario(COMPLETED)
async def _new_task(stage: Stage) -> None:
    stage.arm()
    await stage.stream(
        0, 'task; working; artifact one; append two; complete', push=True
    )


@_scenario(COMPLETED)
async def _resumed_turn(stage: Stage) -> None:
    paused = await stage.cluster.send(1, 'task; input')
    stage.arm()
    await stage.stream(
        0, 'working; artifact one; append two; complete', task=paused
    )


@_scenario(COMPLETED, deadly=(FAILED, AUTH_REQUIRED))
async def _goes_on_after_a_login(stage: Stage) -> None:
    stage.arm()
    await stage.stream(
        0, 'task; working; auth; working; artifact one; complete', push=True
    )


@_scenario(INPUT_REQUIRED)
async def _question(stage: Stage) -> None:
    stage.arm()
    await stage.stream(0, 'task; working; artifact one; input', push=True)


@_scenario()
async def _plain_message(stage: Stage) -> None:
    stage.arm()
    await stage.stream(0, 'message hello')


@_scenario(COMPLETED, deadly=(), victim=1, size=3, config=AGAIN)
async def _runs_again(stage: Stage) -> None:
    heard = await stage.stream(
        0, 'task; working; count 3 go; complete', push=True
    )
    await heard.until(lambda heard: heard.texts)
    subscriber = await stage.subscribe(1, heard.task_id)
    await subscriber.until(lambda heard: heard.events)
    stage.arm()
    stage.kill(0)
    stage.let_count(after=0)


@_scenario(COMPLETED, deadly=(), victim=1, size=3, config=AGAIN)
async def _resumed_turn_runs_again(stage: Stage) -> None:
    paused = await stage.cluster.send(0, 'task; input')
    heard = await stage.stream(0, 'working; count 3 go; complete', task=paused)
    await heard.until(lambda heard: heard.texts)
    stage.arm()
    stage.kill(0)
    stage.let_count(after=0)


@_scenario(COMPLETED, deadly=(), config=AGAIN)
async def _new_task_that_may_run_again(stage: Stage) -> None:
    stage.let_count()
    stage.arm()
    await stage.stream(0, 'task; working; count 3 go; complete', push=True)


@_scenario(COMPLETED, deadly=(), config=AGAIN)
async def _hand_over(stage: Stage) -> None:
    stage.arm()
    heard = await stage.stream(
        0, 'task; working; count 3 go; complete', push=True
    )
    await stage.until_heard(heard, lambda heard: heard.texts)
    if heard.task_id:
        subscriber = await stage.subscribe(1, heard.task_id)
        # To a task that is over nobody subscribes.
        await stage.until_heard(subscriber, lambda heard: heard.events)
    stage.terminate(0)
    stage.let_count(after=0)


@_scenario(FAILED)
async def _shutdown(stage: Stage) -> None:
    heard = await stage.stream(
        0, 'task; working; artifact one; wait never', push=True
    )
    await heard.until(lambda heard: heard.texts)
    subscriber = await stage.subscribe(1, heard.task_id)
    await subscriber.until(lambda heard: heard.events)
    stage.arm()
    stage.terminate(0)


@_scenario(CANCELED)
async def _canceled_elsewhere(stage: Stage) -> None:
    heard = await stage.stream(
        0, 'task; working; artifact one; wait never', push=True
    )
    await heard.until(lambda heard: heard.texts)
    stage.arm()
    await stage.cancel(1, heard.task_id)


@_scenario(CANCELED, deadly=(COMPLETED,), victim=1)
async def _cancels(stage: Stage) -> None:
    heard = await stage.stream(
        0, 'task; working; artifact one; wait go; complete', push=True
    )
    await heard.until(lambda heard: heard.texts)
    stage.arm()
    await stage.cancel(1, heard.task_id)


async def _is_running(stage: Stage, task_id: str, token: int) -> bool:
    lease = await stage.cluster.leases.get('commanded', task_id)
    return lease is not None and lease.token == token


async def _leave_behind(stage: Stage) -> None:
    """Lets A die with one task of each kind."""
    working = await stage.stream(
        0, 'task; working; artifact one; wait never', push=True
    )
    parked = await stage.stream(0, 'task; auth; wait never')
    paused = await stage.cluster.send(0, 'task; input')
    await stage.stream(0, 'wait never', task=paused)
    await working.until(lambda heard: heard.texts)
    await parked.until(
        lambda heard: TaskState.TASK_STATE_AUTH_REQUIRED in heard.states
    )
    await stage.until(lambda: _is_running(stage, paused.id, 2))


@_scenario(FAILED, AUTH_REQUIRED, deadly=(), victim=1, size=3)
async def _recovers(stage: Stage) -> None:
    await _leave_behind(stage)
    task_id = stage.clients[0].heard.task_id
    subscriber = await stage.subscribe(1, task_id)
    await subscriber.until(lambda heard: WORKING in heard.states)
    stage.arm()
    stage.kill(0)


@_scenario(FAILED, AUTH_REQUIRED, deadly=(), victim=1, size=3, starts=1)
async def _starts(stage: Stage) -> None:
    await _leave_behind(stage)
    stage.kill(0)
    stage.arm()
    await stage.start(1)


@_scenario(
    FAILED,
    AUTH_REQUIRED,
    deadly=(),
    victim=1,
    size=3,
    first='lost@loop:/SET attempt=/1+',
)
async def _hears_nothing_of_its_claim(stage: Stage) -> None:
    await _leave_behind(stage)
    stage.arm()
    stage.kill(0)
