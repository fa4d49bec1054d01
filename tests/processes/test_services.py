"""Many replicas, two agents, and those who come back at the wrong moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import CancelTaskRequest

from support.cluster import (
    CANCELED,
    COMPLETED,
    FAILED,
    WORKING,
    Cluster,
)


if TYPE_CHECKING:
    from pathlib import Path

    from support.databases import Database


async def test_two_agents_on_one_database_leave_each_other_alone(
    database: Database, tmp_path: Path
):
    (tmp_path / 'one').mkdir()
    (tmp_path / 'two').mkdir()
    async with (
        Cluster(database, tmp_path / 'one', size=2) as one,
        Cluster(database, tmp_path / 'two', size=1, service='other') as two,
    ):
        mine = await one.stream(0, 'task; working; wait never')
        theirs = await two.stream(0, 'task; working; wait never')
        await mine.until(lambda heard: WORKING in heard.states)
        await theirs.until(lambda heard: WORKING in heard.states)
        two.kill(0)
        one.kill(0)
        await one.until_state(mine.task_id, FAILED)
        # Its own service has no replica that lives.
        task = await one.task(theirs.task_id)
        assert task.status.state == WORKING
        two.replicas[0].start()
        await two.replicas[0].ready()
        await one.until_state(theirs.task_id, FAILED)


async def test_a_cancel_through_another_replica_stops_the_agent(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path) as cluster:
        heard = await cluster.stream(0, 'task; working; wait never', push=True)
        await heard.until(lambda heard: WORKING in heard.states)
        client = await cluster.client(1)
        task = await client.cancel_task(CancelTaskRequest(id=heard.task_id))
        assert task.status.state == CANCELED
        await heard.ended()
        assert heard.states[-1] == CANCELED
        await cluster.until_no_leases()
        said = [line['what'] for line in cluster.agent_log()]
        assert said.count('cancel() called') == 1
        assert 'stopped' in said
        await cluster.webhook.until(lambda heard: CANCELED in heard.states)
        assert cluster.webhook.states.count(CANCELED) == 1


async def test_follow_ups_from_all_sides_run_one_at_a_time(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=3) as cluster:
        task = await cluster.send(0, 'task; input')
        await asyncio.gather(
            *(
                cluster.send(n % 3, 'working; input', task=task)
                for n in range(9)
            )
        )

        async def all_ran():
            ended = [x for x in cluster.agent_log() if x['what'] == 'ended']
            return len(ended) == 10

        await cluster.until(all_ran)
        running = 0
        for line in cluster.agent_log():
            running += line['what'].startswith('began')
            assert running <= 1
            running -= line['what'] == 'ended'
        answered = await cluster.send(1, 'complete', task=task)
        assert answered.status.state == COMPLETED


async def test_many_tasks_of_a_dead_replica_fail_exactly_once(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=4) as cluster:
        client = await cluster.client(0, streaming=False)
        ids = []
        for _ in range(40):
            request = cluster.message('task; working; wait never', push=True)
            request.configuration.return_immediately = True
            async for response in client.send_message(request):
                ids.append(response.task.id)
        for task_id in ids:
            await cluster.until_state(task_id, WORKING)
        cluster.kill(0)
        for task_id in ids:
            await cluster.until_state(task_id, FAILED)
        await cluster.until_no_leases()
        failed = [
            event.status_update.task_id
            for event in cluster.webhook.events
            if event.HasField('status_update')
            and event.status_update.status.state == FAILED
        ]
        assert sorted(failed) == sorted(ids)
