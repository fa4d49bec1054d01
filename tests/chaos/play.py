"""Plays one scenario with one fault, and checks the promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from chaos.promises import broken
from chaos.stage import Stage


if TYPE_CHECKING:
    from pathlib import Path

    from chaos.faults import Fault
    from chaos.scenarios import Scenario
    from support.databases import Database


@dataclass
class Result:
    """What came of it."""

    broken: list[str] = field(default_factory=list)
    """The promises that broke; none, if all is well."""
    reached: bool = False
    """Whether the victim came to where the fault is."""
    steps: list[str] = field(default_factory=list)
    """The statements that the victim counted, up to its fault."""
    logs: str = ''
    """What the replicas logged, if something broke."""


async def play(
    scenario: Scenario, fault: Fault | None, database: Database, folder: Path
) -> Result:
    """Plays a scenario once.

    Args:
        scenario: What happens.
        fault: What goes wrong in its victim; None for nothing.
        database: An empty one.
        folder: For logs.
    """
    stage = Stage(scenario, database, folder, fault)
    result = Result()
    try:
        async with stage.cluster:
            await stage.play()
            result.broken = await broken(stage)
            if result.broken:
                result.logs = await _told(stage)
    except* (TimeoutError, DBAPIError) as error:
        result.broken = [f'The scenario does not come to its end: {error!r}']
        result.logs = '\n'.join(
            f'--- {replica.name}\n{replica.log_tail(80)}'
            for replica in stage.cluster.replicas
        )
    result.reached = stage.reached
    result.steps = stage.steps()
    return result


async def _told(stage: Stage) -> str:
    cluster = stage.cluster
    lines = [
        f'--- {replica.name}\n{replica.log_tail(80)}'
        for replica in cluster.replicas
    ]
    lines += [str(session) for session in await cluster.leases.sessions()]
    lines += [str(lease) for lease in await cluster.leases.leases()]
    lines += [str(line) for line in cluster.agent_log()]
    lines += stage.refused
    return '\n'.join(lines)
