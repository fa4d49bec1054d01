"""Replicas of one agent that may be declared dead, and what it was asked."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from a2a.types.a2a_pb2 import Task

from a2a_lease import ReExecute, RecoveryPolicy, current_lease
from support.inprocess import (
    SETTINGS,
    Desk,
    ScriptedAgent,
    call,
    message,
    until,
)


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.inprocess import InProcessReplica, Service


AT_ONCE = dataclasses.replace(SETTINGS, drain_timeout=0)


class Stage:
    """Two replicas of one agent; the first can be declared dead."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.began: list[int] = []
        self.stopped: list[int] = []
        self.task_ids: list[str] = []
        self.contexts: list[Any] = []

    async def open(
        self,
        script: Callable[[Desk, int], Awaitable[None]],
        *,
        policy: RecoveryPolicy | None = None,
        size: int = 2,
        **options: Any,
    ) -> Stage:
        async def run(desk: Desk) -> None:
            lease = current_lease()
            self.began.append(lease.attempt)
            self.task_ids.append(desk.task_id)
            self.contexts.append(_copied(desk.context.current_task))
            try:
                await script(desk, len(self.began))
            except asyncio.CancelledError:
                self.stopped.append(lease.attempt)
                raise

        options.setdefault('settings', AT_ONCE)
        self.replicas = [
            await self.service.replica(
                ScriptedAgent(run),
                recovery=policy or ReExecute(),
                **options,
            )
            for _ in range(size)
        ]
        return self

    def __getitem__(self, number: int) -> InProcessReplica:
        return self.replicas[number]

    async def until_began(self, number: int) -> None:
        async def began():
            return len(self.began) >= number

        await until(began)

    async def until_produced(self, number: int) -> None:
        async def produced():
            task = self.task_ids and await self[-1].stored(self.task_ids[0])
            return bool(task) and len(texts(task)) >= number

        await until(produced)

    async def kill(self, number: int = 0) -> None:
        """Declares a replica dead; it learns of it as one that wakes up."""
        session = self.replicas[number].handler._replica.session
        leases = self.service.leases

        async def fenced() -> bool:
            beats = {s.id: s.beat for s in await leases.sessions()}
            return await leases.fence(session.id, beat=beats[session.id])

        await until(fenced)

    async def close(self, number: int = 0, *, timeout: float = 0) -> None:
        await self.replicas[number].handler.drain(timeout=timeout)

    async def until_state(self, state: int) -> Task:
        async def reached():
            if not self.task_ids:
                return None
            task = await self.replicas[-1].stored(self.task_ids[0])
            return task if task and task.status.state == state else None

        return await until(reached)

    async def until_free(self) -> None:
        async def free():
            return all(
                lease.session_id is None
                for lease in await self.service.leases.leases()
            )

        await until(free)


def _copied(task: Task | None) -> Task | None:
    if task is None:
        return None
    copy = Task()
    copy.CopyFrom(task)
    return copy


async def forever() -> None:
    await asyncio.Event().wait()


def texts(task: Task) -> list[str]:
    return [part.text for a in task.artifacts for part in a.parts]


def spawn(
    stage: Stage, request=None, number: int = 0, context=None
) -> asyncio.Future[Any]:
    sending = asyncio.ensure_future(
        stage[number].handler.on_message_send(
            request or message(), context or call()
        )
    )
    stage.service.clients.append(sending)
    return sending
