"""Replicas die by SIGKILL and stop by SIGSTOP; their tasks end, once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import GetTaskRequest, SubscribeToTaskRequest

from a2a_lease.model import LeaseState, SessionState
from support.cluster import (
    AUTH_REQUIRED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
    Cluster,
)


if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


MANY_LOOKS = 5
"""More than it takes to take a free lock for a death."""


async def test_a_killed_replica_s_task_fails_and_all_are_told(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=3) as cluster:
        paused = await cluster.send(0, 'task; input')
        long = await cluster.stream(1, 'task; working; wait long; complete')
        victim = await cluster.stream(
            0, 'task; working; artifact one; wait never', push=True
        )
        await victim.until(lambda heard: heard.texts)
        await long.until(lambda heard: WORKING in heard.states)
        at_b = await cluster.client(1)
        subscriber = cluster.hear(
            at_b.subscribe(SubscribeToTaskRequest(id=victim.task_id))
        )
        await subscriber.until(lambda heard: heard.events)

        cluster.kill(0)
        await subscriber.ended()
        assert subscriber.error is None
        assert subscriber.states[-1] == FAILED
        await cluster.webhook.until(lambda heard: FAILED in heard.states)
        await cluster.until_state(victim.task_id, FAILED)
        at_c = await cluster.client(2)
        task = await at_c.get_task(GetTaskRequest(id=victim.task_id))
        assert task.status.state == FAILED
        assert task.status.HasField('timestamp')
        assert task.status.message.parts[0].text
        details = task.metadata['a2a_lease']
        assert details['reason'] == 'replica_lost'
        assert details['silence_seconds'] > 0
        assert [p.text for p in task.artifacts[0].parts] == ['one']

        # Nothing else was touched.
        now = await cluster.task(paused.id)
        assert now.status == paused.status
        assert long.error is None
        cluster.open_gate('long')
        await long.ended()
        assert long.states[-1] == COMPLETED
        answered = await cluster.send(2, 'complete', task=paused)
        assert answered.status.state == COMPLETED
        await cluster.until_no_leases()
        assert subscriber.states.count(FAILED) == 1
        assert cluster.webhook.states.count(FAILED) == 1


async def test_a_process_that_dies_is_noticed_long_before_its_time_to_live(
    database: Database, tmp_path: Path
):
    """By the lock that goes with it: nobody waits here for that time."""
    settings = {'ttl': 600.0}
    async with Cluster(database, tmp_path, settings=settings) as cluster:
        victim = await cluster.stream(0, 'task; working; wait never')
        await victim.until(lambda heard: WORKING in heard.states)

        async def all_locked():
            sessions = await cluster.leases.sessions()
            return all(session.lock is not None for session in sessions)

        await cluster.until(all_locked)
        await cluster.stop(0)
        # Silence alone is no proof.
        for _ in range(MANY_LOOKS):
            await cluster.next_beat(1)
        assert (await cluster.task(victim.task_id)).status.state == WORKING
        cluster.go_on(0)
        cluster.kill(0)
        await cluster.until_state(victim.task_id, FAILED)


async def test_a_task_of_a_killed_replica_fails_in_its_owner_s_scope(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        streams = [
            await cluster.stream(0, 'task; working; wait never', user=user)
            for user in ('ada', 'bob', '')
        ]
        for heard in streams:
            await heard.until(lambda heard: WORKING in heard.states)
        cluster.kill(0)
        for heard, user in zip(streams, ('ada', 'bob', ''), strict=True):
            await cluster.until_state(heard.task_id, FAILED, user=user)
            assert await cluster.task(heard.task_id, user='eve') is None


async def test_a_resumed_turn_that_dies_before_any_event_is_abandoned(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        paused = await cluster.send(1, 'task; input')
        resuming = await cluster.stream(0, 'wait never', task=paused)

        async def running():
            lease = await cluster.leases.get('commanded', paused.id)
            # Not still that of the turn before.
            return lease.state is LeaseState.RUNNING and lease.token == 2

        await cluster.until(running)
        # It still reads as paused.
        assert (await cluster.task(paused.id)).status == paused.status
        cluster.kill(0)
        await cluster.until_state(paused.id, FAILED)
        await resuming.ended()


async def test_a_parked_turn_that_dies_leaves_its_task_paused(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        waiting = await cluster.stream(0, 'task; auth; wait never')
        await waiting.until(lambda heard: AUTH_REQUIRED in heard.states)
        other = await cluster.stream(0, 'task; working; wait never')
        await other.until(lambda heard: WORKING in heard.states)
        cluster.kill(0)
        await cluster.until_state(other.task_id, FAILED)
        await cluster.until_no_leases()
        task = await cluster.task(waiting.task_id)
        assert task.status.state == AUTH_REQUIRED
        answered = await cluster.send(1, 'working; complete', task=task)
        assert answered.status.state == COMPLETED


async def test_a_zombie_that_wakes_lands_nothing_and_stops(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        victim = await cluster.stream(
            0,
            'task; working; artifact one; wait gate; append two; complete',
            push=True,
        )
        await victim.until(lambda heard: heard.texts)
        task_id = victim.task_id
        await cluster.stop(0)
        await cluster.until_state(task_id, FAILED)
        cluster.open_gate('gate')
        cluster.go_on(0)
        # Its own stream gets the outcome from whoever took over.
        await victim.ended()
        assert victim.states[-1] == FAILED
        assert victim.error is None

        async def ended():
            return [
                line for line in cluster.agent_log() if line['what'] == 'ended'
            ]

        await cluster.until(ended)
        # It lives on and serves.
        again = await cluster.send(0, 'task; complete')
        assert again.status.state == COMPLETED
        task = await cluster.task(task_id)
        assert task.status.state == FAILED
        assert [p.text for p in task.artifacts[0].parts] == ['one']
        assert cluster.webhook.states.count(FAILED) == 1
        assert COMPLETED not in cluster.webhook.states


async def test_a_pause_of_everybody_is_nobody_s_death(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=3) as cluster:
        streams = [
            await cluster.stream(n, 'task; working; wait end; complete')
            for n in range(3)
        ]
        for heard in streams:
            await heard.until(lambda heard: WORKING in heard.states)
        for number in range(3):
            await cluster.stop(number)
        await asyncio.sleep(2 * 3.0)  # Longer than the time to live.
        for number in range(3):
            cluster.go_on(number)
        cluster.open_gate('end')
        for heard in streams:
            await heard.ended()
            assert heard.states[-1] == COMPLETED
        sessions = await cluster.leases.sessions()
        assert {s.state for s in sessions} == {SessionState.OPEN}


async def test_a_blocked_loop_is_not_death(database: Database, tmp_path: Path):
    async with Cluster(database, tmp_path) as cluster:
        heard = await cluster.stream(
            0, 'task; working; block 6; artifact one; complete'
        )
        await heard.ended()
        assert heard.states[-1] == COMPLETED
        assert {s.state for s in await cluster.leases.sessions()} == {
            SessionState.OPEN
        }


async def test_a_whole_service_that_died_is_recovered_by_the_next_life(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        streams = [
            await cluster.stream(n % 2, 'task; working; wait never')
            for n in range(6)
        ]
        paused = await cluster.send(0, 'task; input')
        for heard in streams:
            await heard.until(lambda heard: WORKING in heard.states)
        cluster.kill(0)
        cluster.kill(1)
        cluster.replicas[0].start()
        await cluster.replicas[0].ready()
        for heard in streams:
            await cluster.until_state(heard.task_id, FAILED)
        assert (await cluster.task(paused.id)).status.state == INPUT_REQUIRED
        await cluster.until_no_leases()
