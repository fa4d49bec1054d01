"""Turns of killed and paused replicas run again, on others, once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest
from a2a.types.a2a_pb2 import SubscribeToTaskRequest

from support.cluster import (
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    WORKING,
    Cluster,
)


if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Heard
    from support.databases import Database


def _told(heard: Heard) -> str:
    """The artifact as a client puts it together from its stream."""
    text = ''
    for event in heard.events:
        if event.HasField('task'):
            parts = [p.text for a in event.task.artifacts for p in a.parts]
            text = ''.join(parts)
        elif event.HasField('artifact_update'):
            said = event.artifact_update.artifact.parts[0].text
            text = text + said if event.artifact_update.append else said
    return text


async def _text(cluster: Cluster, task_id: str) -> str:
    task = await cluster.task(task_id)
    return ''.join(p.text for a in task.artifacts for p in a.parts)


def _runs(cluster: Cluster, task_id: str) -> list[dict[str, Any]]:
    return [
        line
        for line in cluster.agent_log()
        if line['task'] == task_id and line['what'] != 'stopped'
    ]


def _overlap(lines: list[dict[str, Any]]) -> bool:
    running = False
    for line in lines:
        if line['what'].startswith('began'):
            if running:
                return True
            running = True
        elif line['what'] == 'ended':
            running = False
    return False


async def test_a_killed_replica_s_turn_goes_on_elsewhere(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, size=3, re_execute={}) as cluster:
        own = await cluster.stream(
            0, 'task; working; count 6 at; complete', push=True
        )
        await own.until(lambda heard: heard.texts)
        at_b = await cluster.client(1)
        subscriber = cluster.hear(
            at_b.subscribe(SubscribeToTaskRequest(id=own.task_id))
        )
        await subscriber.until(lambda heard: heard.events)
        cluster.kill(0)
        for number in range(6):
            cluster.open_gate(f'at{number}')
        await subscriber.ended()
        assert subscriber.error is None
        assert subscriber.states[-1] == COMPLETED
        assert _told(subscriber) == '0 1 2 3 4 5 '
        task = await cluster.task(own.task_id)
        assert await _text(cluster, own.task_id) == '0 1 2 3 4 5 '
        assert len(task.history) == 1
        assert task.metadata['a2a_lease']['attempt'] == 2
        await cluster.webhook.until(lambda heard: COMPLETED in heard.states)
        await cluster.until_no_leases()
        assert not await cluster.leases.leases()
        began = [
            line['what']
            for line in cluster.agent_log()
            if line['what'].startswith('began')
        ]
        assert began == ['began 1', 'began 2']


@pytest.mark.parametrize('moment', ['early', 'claimed', 'mid-turn', 'late'])
async def test_a_zombie_wakes(database: Database, tmp_path: Path, moment: str):
    """Before the claim, before the takeover, in the new turn, after its end."""
    async with Cluster(database, tmp_path, decides_after='decide') as cluster:
        client = await cluster.stream(
            0,
            'task; working; artifact a.; first wait zombie; later append b.; '
            'later wait new; append c.; complete',
        )
        await client.until(lambda heard: heard.texts)
        task_id = client.task_id
        await cluster.stop(0)

        async def claimed():
            return (tmp_path / 'claimed').exists()

        async def again():
            return 'b.' in await _text(cluster, task_id)

        if moment == 'early':
            await asyncio.sleep(1.0)  # Shorter than the time to live.
            cluster.go_on(0)
            cluster.open_gate('zombie')
            await client.ended()
            assert _told(client) == 'a.c.'
            assert not (tmp_path / 'claimed').exists()
            return
        cluster.open_gate('zombie')
        await cluster.until(claimed)
        if moment == 'claimed':
            cluster.go_on(0)
            await _until_stopped(cluster, task_id)
        cluster.open_gate('decide')
        await cluster.until(again)
        if moment == 'mid-turn':
            cluster.go_on(0)
            await _until_stopped(cluster, task_id)
        cluster.open_gate('new')
        await cluster.until_state(task_id, COMPLETED)
        cluster.go_on(0)
        await client.ended()
        assert client.error is None
        assert client.states[-1] == COMPLETED
        await _until_stopped(cluster, task_id)
        # The second run began with the artifact anew.
        assert await _text(cluster, task_id) == 'a.b.c.'
        assert _told(client) == 'a.b.c.'
        task = await cluster.task(task_id)
        assert task.status.state == COMPLETED
        # It lives on and serves.
        assert (await cluster.send(0, 'task; complete')).status.state == (
            COMPLETED
        )


async def _until_stopped(cluster: Cluster, task_id: str) -> None:
    async def stopped():
        return any(
            line['what'] == 'ended' and line['replica'] == 'A'
            for line in _runs(cluster, task_id)
        )

    await cluster.until(stopped)


async def test_a_zombie_s_first_save_comes_after_recovery_s(
    database: Database, tmp_path: Path
):
    """The SDK would read what recovery created, and go on with that."""
    async with Cluster(database, tmp_path, re_execute={}) as cluster:
        client = await cluster.stream(
            0,
            'first wait zombie; task; working; artifact a.; first append z.; '
            'later wait new; complete',
        )

        async def begun():
            return cluster.agent_log()

        [line] = await cluster.until(begun)
        task_id = line['task']
        await cluster.stop(0)

        async def again():
            task = await cluster.task(task_id)
            return task and task.artifacts

        await cluster.until(again)
        cluster.open_gate('zombie')
        cluster.go_on(0)
        await _until_stopped(cluster, task_id)
        cluster.open_gate('new')
        await client.ended()
        assert client.error is None
        assert client.states[-1] == COMPLETED
        assert await _text(cluster, task_id) == 'a.'


async def test_a_poison_task_takes_no_innocent_one_with_it(
    database: Database, tmp_path: Path
):
    """It fails after its budget; all others complete."""
    async with Cluster(
        database,
        tmp_path,
        size=4,
        re_execute={'max_attempts': 3, 'backoff': 0.0},
        settings={'ttl': 1.6, 'run_again_limit': 32},
    ) as cluster:
        innocent = [
            await cluster.stream(number % 4, 'task; working; sleep 1; complete')
            for number in range(30)
        ]
        for heard in innocent:
            await heard.until(lambda heard: WORKING in heard.states)
        poison = await cluster.stream(0, 'task; working; wait poison; oom')
        await poison.until(lambda heard: WORKING in heard.states)
        poisoned = poison.task_id
        cluster.open_gate('poison')

        async def next_life() -> None:
            # As an orchestrator restarts what died.
            while True:
                for replica in cluster.replicas:
                    if not replica.is_running:
                        replica.start()
                        await replica.ready()
                await asyncio.sleep(0.1)

        restarting = asyncio.ensure_future(next_life())
        try:
            failed = await cluster.until_state(poisoned, FAILED)
            assert failed.metadata['a2a_lease']['attempt'] == 3
            for heard in innocent:
                await cluster.until_state(heard.task_id, COMPLETED)
        finally:
            restarting.cancel()
        began = [
            line['what']
            for line in cluster.agent_log()
            if line['task'] == poisoned
        ]
        assert began == ['began 1', 'began 2', 'began 3']
        await cluster.until_no_leases()


async def test_a_long_task_goes_through_a_rolling_restart(
    database: Database, tmp_path: Path
):
    async with Cluster(
        database,
        tmp_path,
        size=3,
        re_execute={'max_attempts': 2},
        settings={'drain_timeout': 0.0},
    ) as cluster:
        first = await cluster.stream(0, 'task; working; count 4 at; complete')
        await first.until(lambda heard: heard.texts)
        task_id = first.task_id
        watcher = cluster.hear(
            (await cluster.client(2)).subscribe(
                SubscribeToTaskRequest(id=task_id)
            )
        )
        for number in range(3):

            async def counted(number: int = number):
                lease = await cluster.leases.get('commanded', task_id)
                text = await _text(cluster, task_id)
                return lease if f'{number} ' in text else None

            await cluster.until(counted)
            lines = _runs(cluster, task_id)
            name = lines[-1]['replica']
            replica = next(r for r in cluster.replicas if r.name == name)
            replica.send_signal(signal.SIGTERM)
            await replica.ended()
            replica.start()
            await replica.ready()
        for number in range(4):
            cluster.open_gate(f'at{number}')
        task = await cluster.until_state(task_id, COMPLETED)
        assert await _text(cluster, task_id) == '0 1 2 3 '
        assert task.metadata['a2a_lease']['attempt'] == 1
        lines = _runs(cluster, task_id)
        assert [x['what'] for x in lines].count('began 1') == 4
        # Each began when the one before had stopped, never earlier.
        assert not _overlap(lines)
        await asyncio.wait({watcher.done}, timeout=20)


@pytest.mark.parametrize('moment', ['before', 'during', 'after'])
async def test_an_impatient_client_sends_again_elsewhere(
    database: Database, tmp_path: Path, moment: str
):
    """Its answer is in the history once, and nothing runs twice at a time."""
    async with Cluster(
        database,
        tmp_path,
        size=2,
        re_execute={},
        settings={'acquire_timeout': 10.0},
    ) as cluster:
        paused = await cluster.send(1, 'task; input')
        message = cluster.message('working; wait new; complete', task=paused)
        client = await cluster.client(0, streaming=False)
        first = asyncio.ensure_future(_send(client, message))

        async def runs():
            task = await cluster.task(paused.id)
            return task.status.state == WORKING

        await cluster.until(runs)
        cluster.kill(0)
        if moment == 'during':

            async def again():
                return len(_runs(cluster, paused.id)) >= 4

            await cluster.until(again)
        elif moment == 'after':
            cluster.open_gate('new')
            await cluster.until_state(paused.id, COMPLETED)
        elsewhere = await cluster.client(1, streaming=False)
        second = asyncio.ensure_future(_send(elsewhere, message))
        if moment == 'after':
            with pytest.raises(Exception, match='terminal'):
                await second
        else:
            cluster.open_gate('new')
            await cluster.until_state(paused.id, COMPLETED)
            await asyncio.wait({second}, timeout=20)
            assert second.done()
            second.exception()
        await asyncio.wait({first}, timeout=20)
        first.exception()
        task = await cluster.task(paused.id)
        said = [m.message_id for m in task.history]
        assert said.count(message.message.message_id) == 1
        survivors = [
            line for line in _runs(cluster, paused.id) if line['replica'] == 'B'
        ]
        assert not _overlap(survivors)


async def _send(client, message):
    async for response in client.send_message(message):
        return response
    raise AssertionError('no answer')


async def test_a_resumed_turn_of_a_killed_replica_keeps_the_answer(
    database: Database, tmp_path: Path
):
    async with Cluster(database, tmp_path, re_execute={}) as cluster:
        paused = await cluster.send(1, 'task; input')
        resuming = await cluster.stream(
            0, 'first wait never; working; artifact x; complete', task=paused
        )

        async def running():
            return len(_runs(cluster, paused.id)) == 3

        await cluster.until(running)
        assert (await cluster.task(paused.id)).status.state == INPUT_REQUIRED
        cluster.kill(0)
        task = await cluster.until_state(paused.id, COMPLETED)
        assert len(task.history) == 2
        await resuming.ended()
