"""Where a scenario is played: replicas, one of which has a fault."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from a2a.server.models import TaskModel
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    SubscribeToTaskRequest,
    TaskState,
)
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from a2a_lease.model import SessionState
from chaos.faults import DEADLY, Fault, Kind
from chaos.writes import frozen
from support.cluster import Cluster, Heard


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from chaos.scenarios import Scenario
    from support.databases import Database


TTL = 2.0
SETTINGS = {
    'ttl': TTL,
    'heartbeat_interval': 0.25,
    'sweep_interval': 0.25,
    'acquire_timeout': 30.0,
    'drain_timeout': 0.3,
    'stop_timeout': 2.0,
}
PATIENCE = 45.0
GATES = ['go', *(f'go{number}' for number in range(9))]
"""What agents wait for and what opens in the end."""
OVER = {
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
}
PAUSED = {
    TaskState.TASK_STATE_INPUT_REQUIRED,
    TaskState.TASK_STATE_AUTH_REQUIRED,
}


@dataclass
class Client:
    """One who waits for a task, and on which replica."""

    replica: int
    heard: Heard
    pushed: bool = False


@dataclass
class Stage:
    """What happens, and what is known of it."""

    scenario: Scenario
    database: Database
    folder: Path
    fault: Fault | None = None
    clients: list[Client] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    """Replicas that were killed, by the scenario or by the fault."""
    leaving: set[int] = field(default_factory=set)
    """Replicas that were told to end."""
    pids: dict[int, int] = field(default_factory=dict)
    """Which process was which replica."""
    refused: list[str] = field(default_factory=list)
    """What was answered to clients that did not stream."""
    unsettled: str = ''
    """What had not come to rest in the end."""

    def __post_init__(self) -> None:
        """Names its replicas."""
        scenario = self.scenario
        self.cluster = Cluster(
            self.database,
            self.folder,
            size=scenario.size,
            starts=scenario.starts,
            settings=SETTINGS,
            faults={
                scenario.victim: {
                    'fault': str(self.fault or ''),
                    'first': scenario.first,
                    'folder': str(self.folder),
                    'seconds': 2 * TTL,
                }
            },
            **scenario.config,
        )

    # What scenarios do.

    def arm(self) -> None:
        """Has the victim count its statements from now on."""
        (self.folder / 'armed').touch()

    async def stream(
        self, replica: int, script: str, *, push: bool = False, **rest: Any
    ) -> Heard:
        """Sends a message as a client that streams."""
        heard = await self.cluster.stream(replica, script, push=push, **rest)
        self.clients.append(Client(replica, heard, push))
        return heard

    async def subscribe(self, replica: int, task_id: str) -> Heard:
        """Listens to a task."""
        client = await self.cluster.client(replica)
        heard = self.cluster.hear(
            client.subscribe(SubscribeToTaskRequest(id=task_id))
        )
        self.clients.append(Client(replica, heard))
        return heard

    async def cancel(self, replica: int, task_id: str) -> None:
        """Cancels a task; that the server dies meanwhile is no matter."""
        client = await self.cluster.client(replica, streaming=False)
        try:
            await client.cancel_task(CancelTaskRequest(id=task_id))
        except Exception as error:
            self.refused.append(f'cancel: {error!r}')

    def kill(self, replica: int) -> None:
        """Kills a replica that is not the victim."""
        self.note_pids()
        self.cluster.kill(replica)
        self.dead.add(replica)

    def terminate(self, replica: int) -> None:
        """Tells a replica to end."""
        self.note_pids()
        self.leaving.add(replica)
        if self.cluster.replicas[replica].is_running:
            self.cluster.terminate(replica)

    async def start(self, replica: int) -> None:
        """Starts a replica, and waits until it serves or is dead.

        One that meets an error as it starts ends with it, and is started
        again, as an orchestrator does.
        """
        server = self.cluster.replicas[replica]
        async with asyncio.timeout(PATIENCE):
            while not self._is_out(replica):
                server.start()
                self.note_pids()
                ready = asyncio.ensure_future(server.ready())
                try:
                    while not ready.done() and not self._is_out(replica):
                        await asyncio.wait({ready}, timeout=0.05)
                finally:
                    ready.cancel()
                if ready.done() and ready.exception() is None:
                    return

    def _is_out(self, replica: int) -> bool:
        return (
            replica == self.scenario.victim
            and self.fault is not None
            and self.fault.kind in DEADLY
            and self.reached
        )

    async def until(self, condition: Callable[[], Awaitable[Any]]) -> Any:
        """Waits for a condition, but not longer than the victim goes on."""
        async with asyncio.timeout(PATIENCE):
            while not (result := await condition()):
                if self._is_out(self.scenario.victim):
                    return None
                await asyncio.sleep(0.02)
            return result

    async def until_heard(
        self, heard: Heard, condition: Callable[[Heard], Any]
    ) -> None:
        """Waits for something in a stream, in the same way."""

        async def holds() -> bool:
            return bool(condition(heard)) or heard.error is not None

        await self.until(holds)

    def let_count(self, *, after: int = -1) -> None:
        """Lets agents count on, but for one that waits at a number."""
        for number in range(after + 1, 4):
            self.cluster.open_gate(f'go{number}')

    # What is seen.

    @property
    def reached(self) -> bool:
        """Whether the fault has happened."""
        return (self.folder / 'reached').exists()

    def note_pids(self) -> None:
        """Remembers which process is which replica."""
        for number, replica in enumerate(self.cluster.replicas):
            if replica.is_running:
                self.pids[replica.pid] = number

    def steps(self) -> list[str]:
        """Returns the statements that the victim counted."""
        file = self.folder / 'steps'
        return file.read_text().splitlines() if file.exists() else []

    def living(self) -> list[int]:
        """Returns the replicas that should be there."""
        return [
            number
            for number, replica in enumerate(self.cluster.replicas)
            if replica.is_running
            and number not in self.dead
            and number not in self.leaving
        ]

    async def task_ids(self) -> list[str]:
        """Returns all tasks that are stored."""
        async with self.cluster.engine.connect() as connection:
            return list(await connection.scalars(select(TaskModel.id)))

    # The end.

    async def play(self) -> None:
        """Plays the scenario, has its fault happen, and lets all settle."""
        self.note_pids()
        for replica in self.living():
            # Nobody's agent card is fetched from a replica that is dead.
            await self.cluster.client(replica)
            await self.cluster.client(replica, streaming=False)
        await self.scenario.play(self)
        await self._until_it_happened()
        fault = self.fault
        if fault is not None and self.reached:
            if fault.kind is Kind.KILL:
                victim = self.cluster.replicas[self.scenario.victim]
                await victim.ended()
                self.dead.add(self.scenario.victim)
            elif fault.kind is Kind.FREEZE:
                await self._freeze()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_the_rest())
            if fault is not None and self.reached and fault.kind is Kind.STOP:
                group.create_task(self._wake(fault))
        for gate in GATES:
            self.cluster.open_gate(gate)
        try:
            async with asyncio.timeout(PATIENCE):
                while unsettled := await self._unsettled():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.unsettled = unsettled

    async def _until_it_happened(self) -> None:
        """Waits for the fault, or until nothing is under way any more.

        A fault on the heartbeat's thread comes in any case.
        """
        waits = self.fault is not None and self.fault.thread == 'beat'
        async with asyncio.timeout(PATIENCE):
            while not self.reached:
                try:
                    if not await self._unsettled() and not waits:
                        return
                except DBAPIError:  # It stands still with a file locked.
                    continue
                if self.scenario.victim in self.leaving and not (
                    self.cluster.replicas[self.scenario.victim].is_running
                ):
                    return
                await asyncio.sleep(0.02)

    async def _start_the_rest(self) -> None:
        # Those that come later leave the first recovery to the victim.
        await self.until(self._has_come_to_rest)
        for number, replica in enumerate(self.cluster.replicas):
            if number not in self.dead and not replica.is_running:
                if number in self.leaving:
                    continue
                await self.start(number)

    async def _has_come_to_rest(self) -> bool:
        return self.scenario.size == self.scenario.starts or not (
            await self._unsettled()
        )

    async def _wake(self, fault: Fault) -> None:
        """Wakes the victim once it was declared dead, or recovered from.

        One that stands still in a transaction keeps its locks, and with them
        the others from going on, or even us from looking: it is woken all the
        same.
        """
        victim = self.scenario.victim
        pid = self.cluster.replicas[victim].pid
        try:
            async with asyncio.timeout(3 * TTL):
                while not await self._is_declared_dead(pid):
                    await asyncio.sleep(0.02)
                # Every other one wakes while others recover from it.
                while fault.number % 2 and await self._leases_of(pid):
                    await asyncio.sleep(0.02)
        except (TimeoutError, DBAPIError):
            pass
        self.cluster.go_on(victim)

    async def _is_declared_dead(self, pid: int) -> bool:
        return any(
            session.label.endswith(str(pid))
            and session.state is not SessionState.OPEN
            for session in await self.cluster.leases.sessions()
        )

    async def _leases_of(self, pid: int) -> list[Any]:
        sessions = {
            session.id
            for session in await self.cluster.leases.sessions()
            if session.label.endswith(str(pid))
        }
        return [
            lease
            for lease in await self.cluster.leases.leases()
            if lease.session_id in sessions
        ]

    async def _freeze(self) -> None:
        async with frozen(self.cluster.engine, self.database.kind):
            await asyncio.sleep(2 * TTL)

    async def _unsettled(self) -> str:
        """Says what is still under way, or ''."""
        # Leases first: what they stand for ends before they go.
        for lease in await self.cluster.leases.leases():
            if lease.session_id is not None:
                return f'a lease is left: {lease}'
        for task_id in await self.task_ids():
            task = await self.cluster.task(task_id)
            if task is None:
                return f"task {task_id} is not its owner's"
            if task.status.state not in OVER | PAUSED:
                state = TaskState.Name(task.status.state)
                return f'task {task_id} is {state}, under no lease'
        for client in self.clients:
            if client.replica in self.living() and not (
                client.heard.done and client.heard.done.done()
            ):
                return (
                    f'a stream of replica {client.replica} goes on after '
                    f'{[TaskState.Name(s) for s in client.heard.states]}'
                )
        for number in self.leaving - self.dead:
            if self.cluster.replicas[number].is_running:
                return f'replica {number} does not end'
        if running := self.running():
            return f'runs go on: {running}'
        return ''

    def running(self) -> list[dict[str, Any]]:
        """Returns the runs of the agent that have not ended."""
        runs: list[dict[str, Any]] = []
        for line in self.cluster.agent_log():
            if line['what'].startswith('began'):
                runs.append(line)
            elif line['what'] == 'ended':
                for run in runs:
                    if (run['pid'], run['task']) == (
                        line['pid'],
                        line['task'],
                    ):
                        runs.remove(run)
                        break
        alive = {
            replica.pid
            for replica in self.cluster.replicas
            if replica.is_running
        }
        return [run for run in runs if run['pid'] in alive]
