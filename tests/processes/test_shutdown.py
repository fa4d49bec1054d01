"""SIGTERM: turns may end, what is left is taken over at once, nobody hangs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx
import pytest
from a2a.client.errors import A2AClientError
from a2a.types.a2a_pb2 import SubscribeToTaskRequest
from a2a.utils.errors import InternalError

from a2a_lease.model import SessionState
from support.cluster import (
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
    Cluster,
)


if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


async def test_what_is_left_at_shutdown_is_failed_within_a_sweep(
    database: Database, tmp_path: Path
):
    # A time to live so long that only the hand-over explains the outcome.
    settings = {'ttl': 600.0, 'drain_timeout': 0.5}
    async with Cluster(database, tmp_path, settings=settings) as cluster:
        streaming = await cluster.stream(
            0, 'task; working; wait never', push=True
        )
        blocking = asyncio.ensure_future(
            cluster.send(0, 'task; working; wait never')
        )
        paused = await cluster.send(0, 'task; input')
        await streaming.until(lambda heard: WORKING in heard.states)

        async def two_running():
            leases = await cluster.leases.leases()
            return len([x for x in leases if x.session_id is not None]) == 2

        await cluster.until(two_running)
        at_b = await cluster.client(1)
        subscriber = cluster.hear(
            at_b.subscribe(SubscribeToTaskRequest(id=streaming.task_id))
        )
        await subscriber.until(lambda heard: heard.events)

        cluster.terminate(0)
        await cluster.replicas[0].ended()
        with pytest.raises(
            (InternalError, A2AClientError), match='shutting down'
        ):
            await blocking
        await streaming.ended()
        await subscriber.ended()
        assert subscriber.states[-1] == FAILED
        await cluster.until_no_leases()
        task = await cluster.task(streaming.task_id)
        assert task.status.state == FAILED
        details = task.metadata['a2a_lease']
        assert details['reason'] == 'replica_closed'
        assert details['attempt'] == 1
        assert cluster.webhook.states.count(FAILED) == 1
        assert (await cluster.task(paused.id)).status == paused.status
        # The agent of the replica that went said nothing after its end.
        assert 'stopped' in {line['what'] for line in cluster.agent_log()}


async def test_turns_that_end_in_time_are_left_alone(
    database: Database, tmp_path: Path
):
    async with Cluster(
        database, tmp_path, settings={'drain_timeout': 30.0}
    ) as cluster:
        blocking = asyncio.ensure_future(
            cluster.send(0, 'task; working; wait end; complete')
        )
        paused = asyncio.ensure_future(
            cluster.send(0, 'task; working; wait end; input')
        )

        async def both_running():
            return len(await cluster.leases.leases()) == 2

        await cluster.until(both_running)
        session = (await cluster.leases.leases())[0].session_id
        cluster.terminate(0)
        # Beats go on while it drains: longer than the time to live.
        await asyncio.sleep(4)
        states = {s.id: s.state for s in await cluster.leases.sessions()}
        assert states[session] is SessionState.OPEN
        cluster.open_gate('end')
        assert (await blocking).status.state == COMPLETED
        assert (await paused).status.state == INPUT_REQUIRED
        await cluster.replicas[0].ended()
        await cluster.until_no_leases()
        states = {s.id: s.state for s in await cluster.leases.sessions()}
        assert states[session] is SessionState.CLOSED


async def test_an_agent_that_does_not_stop_is_not_handed_over_while_it_lives(
    database: Database, tmp_path: Path
):
    async with Cluster(
        database, tmp_path, settings={'drain_timeout': 0.0}
    ) as cluster:
        stubborn = await cluster.stream(
            0, 'task; working; stubborn gate; append late; complete'
        )
        other = await cluster.stream(0, 'task; working; wait never')
        await stubborn.until(lambda heard: WORKING in heard.states)
        await other.until(lambda heard: WORKING in heard.states)
        cluster.terminate(0)
        # The one that stopped is handed over at once.
        await cluster.until_state(other.task_id, FAILED)

        async def has_drained():
            return 'agent ignores its cancellation. It is recovered' in (
                cluster.replicas[0].log_tail()
            )

        await cluster.until(has_drained)
        task = await cluster.task(stubborn.task_id)
        assert task.status.state == WORKING
        lease = await cluster.leases.get('commanded', stubborn.task_id)
        states = {s.id: s.state for s in await cluster.leases.sessions()}
        assert states[lease.session_id] is SessionState.OPEN
        # The other one only when the process is gone: it ends without its
        # agent, or the orchestrator runs out of patience.
        with contextlib.suppress(ProcessLookupError):
            cluster.kill(0)
        task = await cluster.until_state(stubborn.task_id, FAILED)
        assert not task.artifacts
        assert task.metadata['a2a_lease']['reason'] == 'replica_lost'


async def test_new_messages_are_refused_with_the_reason_while_draining(
    database: Database, tmp_path: Path
):
    async with Cluster(
        database, tmp_path, settings={'drain_timeout': 30.0}
    ) as cluster:
        # An open connection, as a load balancer has it.
        client = await cluster.client(0, streaming=False)
        running = await cluster.stream(0, 'task; working; wait end; complete')
        await running.until(lambda heard: WORKING in heard.states)
        cluster.terminate(0)
        with pytest.raises(Exception) as refused:
            async for _ in client.send_message(
                cluster.message('task; complete')
            ):
                pass
        # Either it is told so, or the server closed the connection, which a
        # load balancer tries elsewhere.
        assert 'shutting down' in str(refused.value) or isinstance(
            refused.value.__cause__, httpx.TransportError
        )
        cluster.open_gate('end')
        await cluster.replicas[0].ended()
        assert (await cluster.task(running.task_id)).status.state == COMPLETED


async def test_a_second_signal_hands_over_at_once(
    database: Database, tmp_path: Path
):
    async with Cluster(
        database, tmp_path, settings={'drain_timeout': 600.0}
    ) as cluster:
        running = await cluster.stream(0, 'task; working; wait never')
        await running.until(lambda heard: WORKING in heard.states)
        cluster.terminate(0)

        async def drains():
            return 'Draining' in cluster.replicas[0].log_tail(20)

        await cluster.until(drains)
        cluster.terminate(0)
        await cluster.replicas[0].ended()
        task = await cluster.until_state(running.task_id, FAILED)
        assert task.metadata['a2a_lease']['reason'] == 'replica_closed'
