"""What becomes of the tasks that a dead session left."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from a2a.types.a2a_pb2 import (
    GetTaskRequest,
    Task,
    TaskPushNotificationConfig,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from a2a_lease import (
    ContextCodec,
    Fail,
    FailAbandoned,
    Leave,
    RecoveryPolicy,
)
from a2a_lease.model import LeaseRequest, LeaseState, TaskMark
from a2a_lease.stores.database import DatabaseLeaseStore
from a2a_lease.turns.marks import mark_of
from support.inprocess import (
    AUTH_REQUIRED,
    COMPLETED,
    FAILED,
    INPUT_REQUIRED,
    SETTINGS,
    WORKING,
    Desk,
    call,
    message,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import InProcessReplica, Service


async def _nothing(desk: Desk) -> None:
    raise AssertionError('No turn is run here.')


class Dead:
    """A replica that left things in a state of the test's choice."""

    def __init__(self, service: Service) -> None:
        self.leases = service.leases
        self.session_id = uuid.uuid4().hex
        self.tasks: Any = None

    async def open(self, replica: InProcessReplica) -> Dead:
        self.tasks = replica.tasks
        await self.leases.open_session(
            session_id=self.session_id,
            service='agent',
            ttl=60,
            heartbeat_interval=1,
            label='dead',
        )
        return self

    async def store(
        self, task_id: str, state: int, *, seconds: int | None = 1
    ) -> Task:
        status = TaskStatus(state=state)
        if seconds is not None:
            status.timestamp.FromSeconds(seconds)
        task = Task(id=task_id, context_id='context', status=status)
        stored = await self.tasks.get(task_id, call())
        from a2a.server.cluster import TaskVersion

        await self.tasks.save(
            task,
            event=task,
            prev=stored.task if stored else None,
            prev_version=stored.version if stored else TaskVersion.MISSING,
            context=call(),
        )
        return task

    async def lease(
        self,
        task_id: str,
        *,
        before: TaskMark | None = None,
        state: LeaseState = LeaseState.RUNNING,
        call_context: bytes | None = None,
    ) -> None:
        await self.leases.acquire(
            LeaseRequest(
                service='agent',
                task_id=task_id,
                context_id='context',
                owner='ada',
                session_id=self.session_id,
                acquire_id=uuid.uuid4().hex,
                expected_token=None,
                before=before,
                call_context=(
                    ContextCodec().dump(call())
                    if call_context is None
                    else call_context
                ),
            )
        )
        await self.leases.move('agent', task_id, token=1, state=state)

    async def die(self) -> None:
        # It gives up where another one writes.
        await until(lambda: self.leases.fence(self.session_id, beat=0))

    async def close(self) -> None:
        assert await self.leases.close_session(self.session_id)


@pytest.fixture
async def replica(service: Service) -> InProcessReplica:
    return await service.replica(_nothing)


@pytest.fixture
async def dead(service: Service, replica: InProcessReplica) -> Dead:
    return await Dead(service).open(replica)


async def _settled(service: Service) -> None:
    async def none_held():
        return not [
            lease
            for lease in await service.leases.leases()
            if lease.session_id is not None
        ]

    await until(none_held)


async def _events(replica: InProcessReplica, task_id: str) -> list[Any]:
    """All events of a task that other replicas can see."""
    from a2a.server.cluster import TaskVersion

    events = []
    stream = replica.events.subscribe(task_id, after=TaskVersion.MISSING)
    try:
        async with asyncio.timeout(0.5):
            async for event in stream:
                events.append(event)
    except TimeoutError:
        pass
    return events


async def test_a_working_task_fails_with_its_event_and_push(
    service: Service, replica: InProcessReplica, dead: Dead, caplog
):
    await dead.store('t', WORKING)
    await dead.lease('t')
    await dead.die()
    await _settled(service)
    task = await replica.stored('t')
    assert task.status.state == FAILED
    assert task.status.timestamp.seconds > 1
    assert 'stopped' in task.status.message.parts[0].text
    details = dict(task.metadata['a2a_lease'])
    assert details['reason'] == 'replica_lost'
    assert details['attempt'] == 1
    assert details['session'] == dead.session_id
    assert details['silence_seconds'] >= 0
    events = [e.event for e in await _events(replica, 't')]
    assert isinstance(events[-1], TaskStatusUpdateEvent)
    assert events[-1].status == task.status
    assert dict(events[-1].metadata['a2a_lease']) == details
    assert len(events) == 2
    assert replica.pushes.states('t') == [FAILED]
    assert await service.leases.leases() == []
    [line] = [r for r in caplog.records if getattr(r, 'task_id', '') == 't']
    assert line.owner == 'ada'
    assert line.cause == 'replica_lost'
    assert line.from_session == dead.session_id


@pytest.mark.parametrize('state', [INPUT_REQUIRED, AUTH_REQUIRED])
async def test_a_turn_that_paused_its_task_leaves_it_paused(
    service: Service, replica: InProcessReplica, dead: Dead, state: int
):
    before = await dead.store('t', state, seconds=1)
    await dead.lease('t', before=mark_of(before.status))
    # The same state again, by an event of this turn.
    paused = await dead.store('t', state, seconds=2)
    await dead.die()
    await _settled(service)
    assert (await replica.stored('t')).status == paused.status
    lease = await replica.lease('t')
    assert lease.state is LeaseState.FREE
    # It died before its push may have been sent.
    assert replica.pushes.states('t') == [state]


async def test_a_resumed_turn_that_only_flushed_is_abandoned(
    service: Service, replica: InProcessReplica, dead: Dead
):
    before = await dead.store('t', INPUT_REQUIRED, seconds=1)
    await dead.lease('t', before=mark_of(before.status))
    await dead.store('t', INPUT_REQUIRED, seconds=1)
    await dead.die()
    await _settled(service)
    assert await replica.state('t') == FAILED


async def test_a_parked_lease_is_dropped_and_never_acted_on(
    service: Service, replica: InProcessReplica, dead: Dead
):
    await dead.store('t', AUTH_REQUIRED)
    await dead.lease('t', state=LeaseState.PARKED)
    await dead.store('u', WORKING)
    await dead.lease('u')
    await dead.die()
    await _settled(service)
    assert await replica.state('t') == AUTH_REQUIRED
    assert await replica.state('u') == FAILED
    assert replica.pushes.states('t') == []


@pytest.mark.parametrize('how', ['dies', 'closes'])
async def test_an_idle_task_is_recovered_only_if_its_replica_died(
    service: Service, replica: InProcessReplica, dead: Dead, how: str
):
    await dead.store('t', WORKING)
    await dead.lease('t', state=LeaseState.IDLE)
    if how == 'dies':
        await dead.die()
        await _settled(service)
        assert await replica.state('t') == FAILED
        return
    await dead.close()

    async def adopted():
        lease = await replica.lease('t')
        return (
            lease.state is LeaseState.IDLE
            and lease.session_id != dead.session_id
        )

    await until(adopted)
    assert await replica.state('t') == WORKING
    assert (await replica.lease('t')).attempt == 1


async def test_a_finished_task_is_pushed_again_and_kept(
    service: Service, replica: InProcessReplica, dead: Dead
):
    done = await dead.store('t', COMPLETED)
    await dead.lease('t')
    await dead.die()
    await _settled(service)
    assert (await replica.stored('t')).status == done.status
    assert replica.pushes.states('t') == [COMPLETED]
    assert await replica.lease('t') is None


async def test_a_deleted_task_is_not_made_again(
    service: Service, replica: InProcessReplica, dead: Dead
):
    await dead.lease('t')
    await service.leases.note_stored('agent', {'t': 1})
    await service.configs.set_info(
        't', TaskPushNotificationConfig(url='http://x'), call()
    )
    await dead.die()
    await _settled(service)
    assert await replica.stored('t') is None
    assert await replica.lease('t') is None
    assert replica.pushes.sent == []


@pytest.mark.parametrize('pushed_to', [True, False])
async def test_a_task_that_never_was_is_made_only_if_somebody_waits(
    service: Service, replica: InProcessReplica, dead: Dead, pushed_to: bool
):
    if pushed_to:
        await service.configs.set_info(
            't', TaskPushNotificationConfig(url='http://x'), call()
        )
    await dead.lease('t')
    await dead.die()
    await _settled(service)
    task = await replica.stored('t')
    if not pushed_to:
        assert task is None
        assert replica.pushes.sent == []
        return
    assert task.status.state == FAILED
    assert task.context_id == 'context'
    assert replica.pushes.states('t') == [FAILED]
    assert await replica.stored('t', user='eve') is None


async def test_a_bad_row_is_set_aside_and_holds_up_nobody(
    service: Service, replica: InProcessReplica, dead: Dead, caplog
):
    for number in range(4):
        await dead.store(f'bad {number}', WORKING)
        await dead.lease(f'bad {number}', call_context=b'no codec wrote this')
    for number in range(6):
        await dead.store(f'good {number}', WORKING)
        await dead.lease(f'good {number}')
    await dead.die()

    async def good_ones_failed():
        states = [await replica.state(f'good {n}') for n in range(6)]
        return states == [FAILED] * 6

    await until(good_ones_failed)

    async def said():
        aside = [
            r.task_id
            for r in caplog.records
            if getattr(r, 'action', '') == 'set_aside'
        ]
        return set(aside) == {f'bad {n}' for n in range(4)}

    await until(said)
    for number in range(4):
        assert await replica.state(f'bad {number}') == WORKING
        lease = await replica.lease(f'bad {number}')
        # It is not left: this replica goes on trying.
        assert lease.state is LeaseState.RECOVERING


async def test_more_than_the_limit_are_recovered_in_rounds(service: Service):
    settings = dataclasses.replace(SETTINGS, recovery_limit=2)
    replica = await service.replica(_nothing, settings=settings)
    dead = await Dead(service).open(replica)
    at_once = most = 0
    gate = asyncio.Event()

    async def count(task_id, event):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1

    replica.pushes.before_send = count
    for number in range(9):
        await dead.store(f't {number}', WORKING)
        await dead.lease(f't {number}')
    await dead.die()

    async def two_at_once():
        return at_once >= 2

    await until(two_at_once)
    # Whoever took more would have by now: several sweeps.
    await asyncio.sleep(4 * SETTINGS.sweep_interval)
    gate.set()
    await _settled(service)
    assert most == 2
    for number in range(9):
        assert await replica.state(f't {number}') == FAILED
    assert len(replica.pushes.sent) == 9


async def test_a_claimer_that_dies_is_recovered_from(service: Service):
    replica = await service.replica(_nothing)
    dead = await Dead(service).open(replica)
    await dead.store('t', WORKING)
    await dead.lease('t', state=LeaseState.RECOVERING)
    await dead.die()
    await _settled(service)
    task = await replica.stored('t')
    assert task.status.state == FAILED
    # The claimer's death is no crash of the turn.
    assert task.metadata['a2a_lease']['attempt'] == 1


async def test_two_sweepers_make_one_outcome(service: Service):
    replicas = [await service.replica(_nothing) for _ in range(3)]
    dead = await Dead(service).open(replicas[0])
    for number in range(12):
        await dead.store(f't {number}', WORKING)
        await dead.lease(f't {number}')
    await dead.die()
    await _settled(service)
    pushed = [i for r in replicas for i, _ in r.pushes.sent]
    assert sorted(pushed) == sorted(f't {n}' for n in range(12))
    events = [e.event for e in await _events(replicas[0], 't 3')]
    assert [e.status.state for e in events] == [WORKING, FAILED]


async def test_a_policy_decides_per_task(service: Service):
    seen = {}

    class Choosy(RecoveryPolicy):
        def decide(self, lease, task):
            seen[lease.task_id] = (lease, task)
            if lease.task_id == 'leave':
                return Leave()
            return Fail('Because.')

    replica = await service.replica(_nothing, recovery=Choosy())
    dead = await Dead(service).open(replica)
    for task_id in ('leave', 'fail'):
        await dead.store(task_id, WORKING)
        await dead.lease(task_id)
    await dead.die()
    await _settled(service)
    assert await replica.state('leave') == WORKING
    assert (await replica.lease('leave')).state is LeaseState.FREE
    failed = await replica.stored('fail')
    assert failed.status.message.parts[0].text == 'Because.'
    lease, task = seen['fail']
    assert lease.attempt == 2
    assert task.status.state == FAILED or task.status.state == WORKING


async def test_the_default_policy_takes_another_reason():
    decision = FailAbandoned('Bad luck.').decide(None, None)
    assert decision == Fail('Bad luck.')


async def test_an_agent_that_goes_deaf_is_stopped_and_recovered(
    service: Service,
):
    """The SDK stops listening; the agent would talk to nobody for hours."""
    stopped = asyncio.Event()

    async def agent(desk: Desk) -> None:
        await desk.reply('a message first')
        await desk.task()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    replica = await service.replica(agent)
    with pytest.raises(Exception, match='message mode'):
        await replica.handler.on_message_send(message(), call())
    await stopped.wait()
    await _settled(service)


async def test_an_agent_that_cancels_itself_is_recovered(service: Service):
    async def agent(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        raise asyncio.CancelledError

    replica = await service.replica(agent)
    task = await replica.handler.on_message_send(message(), call())

    async def polled() -> bool:
        # A client that asks all the time keeps no turn alive.
        polled = await replica.handler.on_get_task(
            GetTaskRequest(id=task.id), call()
        )
        return polled.status.state == FAILED

    await until(polled)
    await _settled(service)
    stored = await replica.stored(task.id)
    assert stored.status.state == FAILED
    assert stored.metadata['a2a_lease']['reason'] == 'turn_died'
    assert replica.pushes.states(task.id)[-1] == FAILED


class LosesAnswers(DatabaseLeaseStore):
    """A call lands, and the connection breaks before it says so."""

    def __init__(self, engine: Any, *lost: str) -> None:
        super().__init__(engine)
        self._lost = list(lost)

    def _once(self, name: str, answer: Any) -> Any:
        if answer and self._lost[:1] == [name]:
            self._lost.pop(0)
            raise ConnectionResetError('lost as it committed')
        return answer

    async def claim(self, *args: Any, **rest: Any) -> Any:
        return self._once('claim', await super().claim(*args, **rest))

    async def claimed_by(self, *args: Any) -> Any:
        return self._once('claimed_by', await super().claimed_by(*args))

    async def acquire(self, request: Any) -> Any:
        return self._once('acquire', await super().acquire(request))

    async def reclaim(self, *args: Any, **rest: Any) -> Any:
        return self._once('reclaim', await super().reclaim(*args, **rest))


@pytest.mark.parametrize('lost', [['claim'], ['claim', 'claimed_by']])
async def test_a_claim_without_an_answer_is_found(
    service: Service, lost: list[str]
):
    """Nobody else may claim it while its claimer lives."""
    replica = await service.replica(
        _nothing, leases=LosesAnswers(service.engine, *lost)
    )
    dead = await Dead(service).open(replica)
    await dead.store('lost', WORKING)
    await dead.lease('lost')
    await dead.store('idle', WORKING)
    await dead.lease('idle', state=LeaseState.IDLE)
    await dead.close()

    async def decided():
        lease = await replica.lease('idle')
        return (
            await replica.state('lost') == FAILED
            and lease.state is LeaseState.IDLE
            and lease.session_id != dead.session_id
        )

    await until(decided)
    task = await replica.stored('lost')
    assert task is not None
    assert task.metadata['a2a_lease']['reason'] == 'replica_closed'
    # Its turn had ended in good order.
    assert await replica.state('idle') == WORKING


@pytest.mark.parametrize('lost', ['acquire', 'reclaim'])
async def test_a_task_is_taken_up_though_an_answer_is_lost(
    service: Service, lost: str
):
    """What a save left that landed after its lease was gone."""
    replica = await service.replica(
        _nothing, leases=LosesAnswers(service.engine, lost)
    )
    dead = await Dead(service).open(replica)
    await dead.store('t', WORKING)
    handler = replica.handler
    turn = handler._turns.new_turn(
        context=call(), owner='ada', kept_context=ContextCodec().dump(call())
    )
    await dead.lease('t', state=LeaseState.FREE)
    lease = await replica.lease('t')
    session = handler._replica.session
    assert session is not None
    turn.hold(lease, session)
    handler._turns.dead_turns.take_up(turn)
    await _settled(service)

    async def failed():
        return await replica.state('t') == FAILED

    await until(failed)
