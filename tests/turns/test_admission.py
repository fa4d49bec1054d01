"""One turn at a time; what cannot begin waits, or is refused with a reason."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
from a2a.types.a2a_pb2 import CancelTaskRequest
from a2a.utils.errors import (
    InternalError,
    TaskNotFoundError,
    UnsupportedOperationError,
)

from a2a_lease import ContextCodec, DatabaseLeaseStore
from a2a_lease.demo.sabotage import without_sweep
from a2a_lease.model import LeaseRequest, LeaseState
from a2a_lease.turns.marks import mark_of
from support.inprocess import (
    CANCELED,
    COMPLETED,
    INPUT_REQUIRED,
    SETTINGS,
    WORKING,
    Desk,
    ScriptedAgent,
    call,
    message,
    until,
)


if TYPE_CHECKING:
    from support.inprocess import Service


async def _ask(desk: Desk) -> None:
    if desk.context.current_task is None:
        await desk.task()
    await desk.status(INPUT_REQUIRED)


async def _finish(desk: Desk) -> None:
    await desk.status(COMPLETED)


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_a_follow_up_waits_for_the_running_turn(
    service: Service, where: str
):
    go_on = asyncio.Event()

    async def long(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()
        await desk.status(INPUT_REQUIRED)

    one = ScriptedAgent(long, _finish)
    two = ScriptedAgent(_finish)
    first = await service.replica(one)
    second = await service.replica(two)
    sending = asyncio.ensure_future(
        first.handler.on_message_send(message(), call())
    )
    task = await first.working()
    through = first if where == 'here' else second
    following = asyncio.ensure_future(
        through.handler.on_message_send(message(task=task), call())
    )
    done, _ = await asyncio.wait({following}, timeout=0.3)
    assert not done
    assert one.turns + two.turns == 1
    go_on.set()
    assert (await sending).status.state == INPUT_REQUIRED
    assert (await following).status.state == COMPLETED
    assert not one.overlapped


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_a_follow_up_that_waited_too_long_is_refused(
    service: Service, where: str
):
    go_on = asyncio.Event()

    async def long(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        await go_on.wait()
        await desk.status(COMPLETED)

    settings = dataclasses.replace(SETTINGS, acquire_timeout=0.2)
    first = await service.replica(long, settings=settings)
    second = await service.replica(long, settings=settings)
    sending = asyncio.ensure_future(
        first.handler.on_message_send(message(), call())
    )
    task = await first.working()
    before = await first.tasks.get(task.id, call())
    through = first if where == 'here' else second
    with pytest.raises(UnsupportedOperationError, match=task.id) as refused:
        await through.handler.on_message_send(message(task=task), call())
    assert type(refused.value) is UnsupportedOperationError
    with pytest.raises(UnsupportedOperationError, match='earlier message'):
        async for _ in through.handler.on_message_send_stream(
            message(task=task), call()
        ):
            pass
    after = await first.tasks.get(task.id, call())
    assert after.version == before.version
    go_on.set()
    assert (await sending).status.state == COMPLETED


async def test_many_follow_ups_at_once_run_one_after_another(
    service: Service,
):
    running = 0
    overlapped = False

    async def ask(desk: Desk) -> None:
        nonlocal running, overlapped
        running += 1
        overlapped = overlapped or running > 1
        await _ask(desk)
        await asyncio.sleep(0)
        running -= 1

    replicas = [
        await service.replica(ask, settings=_patient()) for _ in range(3)
    ]
    task = await replicas[0].handler.on_message_send(message(), call())
    answers = await asyncio.gather(
        *(
            replicas[n % 3].handler.on_message_send(message(task=task), call())
            for n in range(9)
        )
    )
    assert [a.status.state for a in answers] == [INPUT_REQUIRED] * 9
    assert not overlapped

    async def all_ran():
        lease = await replicas[0].lease(task.id)
        return lease.session_id is None and lease.token == 10

    await until(all_ran)
    stored = await replicas[0].stored(task.id)
    assert len({m.message_id for m in stored.history}) == 10
    assert len(stored.history) == 10


def _patient():
    return dataclasses.replace(SETTINGS, acquire_timeout=60)


@pytest.mark.parametrize('where', ['here', 'elsewhere'])
async def test_a_message_that_names_only_its_task_goes_on(
    service: Service, where: str
):
    first = await service.replica(ScriptedAgent(_ask, _ask, _finish))
    second = await service.replica(ScriptedAgent(_ask, _finish))
    task = await first.handler.on_message_send(message(), call())
    through = first if where == 'here' else second
    answer = await through.handler.on_message_send(
        message(task=task.id), call()
    )
    assert answer.status.state == INPUT_REQUIRED
    assert answer.context_id == task.context_id
    answer = await through.handler.on_message_send(
        message(task=task.id), call()
    )
    assert answer.status.state == COMPLETED


async def test_a_dead_owner_is_taken_over_by_the_next_message_at_once(
    service: Service,
):
    begun = asyncio.Event()

    async def hang(desk: Desk) -> None:
        await desk.task()
        await desk.status(WORKING)
        begun.set()
        await asyncio.Event().wait()

    old = await service.replica(hang)
    sending = asyncio.ensure_future(
        old.handler.on_message_send(message(), call())
    )
    await begun.wait()
    task = await old.working()
    lease = await old.lease(task.id)
    # Nobody sweeps here: the message itself must take over.
    new = await service.replica(
        ScriptedAgent(_finish), leases=without_sweep(service.leases)
    )
    old.handler._recovery._round.cancel()

    async def fenced():
        for session in await service.leases.sessions():
            if session.id == lease.session_id:
                return await service.leases.fence(session.id, beat=session.beat)
        return False

    await until(fenced)
    answer = await new.handler.on_message_send(message(task=task), call())
    assert answer.status.state == COMPLETED
    assert (await sending).status.state == COMPLETED


async def test_an_owner_that_would_not_survive_is_refused_at_once(
    service: Service,
):
    def by_account(context):
        return context.state['account']

    agent = ScriptedAgent(_ask)
    replica = await service.replica(agent, owner_resolver=by_account)
    with pytest.raises(InternalError, match='context_codec='):
        await replica.handler.on_message_send(message(), call(account='acme'))
    assert agent.turns == 0
    assert not await service.leases.leases()


async def test_a_codec_keeps_what_the_owner_needs(service: Service):
    def by_account(context):
        return context.state['account']

    class AccountCodec(ContextCodec):
        def dump_state(self, state):
            return {'account': state['account']}

    replica = await service.replica(
        _ask, owner_resolver=by_account, context_codec=AccountCodec()
    )
    await replica.handler.on_message_send(
        message(), call(account='acme', headers={'authorization': 'secret'})
    )
    [lease] = await service.leases.leases()
    assert lease.owner == 'acme'
    assert b'secret' not in lease.call_context


class LosesAnswers(DatabaseLeaseStore):
    """An acquire lands, its answer is lost, and the database goes away."""

    away = False
    armed = True

    def __init__(self, engine):
        super().__init__(engine)
        self.says_so = asyncio.Event()
        self.says_so.set()

    async def acquire(self, request):
        if self.away:
            await self.says_so.wait()
            raise ConnectionRefusedError('away')
        lease = await super().acquire(request)
        if request.before is not None and self.armed:
            self.armed = False
            self.away = True
            raise ConnectionResetError('lost as it committed')
        return lease


@pytest.mark.parametrize('meanwhile', ['patience ends', 'drain'])
async def test_an_acquire_that_landed_after_all_is_undone(
    service: Service, meanwhile: str
):
    """Its client was told to send again; the task is paused as before."""
    leases = LosesAnswers(service.engine)
    replica = await service.replica(
        _ask,
        leases=leases,
        settings=dataclasses.replace(
            SETTINGS, acquire_timeout=0.5, stop_timeout=20
        ),
    )
    other = await service.replica(_finish)
    task = await replica.handler.on_message_send(message(), call())

    async def free():
        return (await other.lease(task.id)).session_id is None

    # Its patience is for the acquire alone.
    await until(free)
    sending = asyncio.ensure_future(
        replica.handler.on_message_send(message(task=task), call())
    )

    async def lost():
        return leases.away

    await until(lost)
    draining = None
    if meanwhile == 'drain':
        leases.says_so.clear()
        draining = asyncio.ensure_future(replica.handler.drain(timeout=0))
        # Long enough to close the session, and to be taken over.
        await service.beats(other, 6)
        leases.says_so.set()
    with pytest.raises(InternalError):
        await sending
    leases.away = False
    if draining is not None:
        await draining

    await until(free)
    assert await other.state(task.id) == INPUT_REQUIRED
    answer = await other.handler.on_message_send(message(task=task), call())
    assert answer.status.state == COMPLETED


@pytest.mark.parametrize('meanwhile', ['an outage', 'a cancel'])
async def test_what_a_canceled_acquire_took_is_let_go(
    service: Service, meanwhile: str
):
    replica = await service.replica(_ask)
    task = await replica.handler.on_message_send(message(), call())

    async def free():
        lease = await replica.lease(task.id)
        return lease if lease.session_id is None else None

    lease = await until(free)
    store = service.leases
    session = replica.handler._replica.session
    request = LeaseRequest(
        service='agent',
        task_id=task.id,
        context_id=task.context_id,
        owner='ada',
        session_id=session.id,
        acquire_id='canceled',
        expected_token=lease.token,
        before=mark_of(task.status),
        call_context=b'{}',
    )
    acquiring = asyncio.ensure_future(store.acquire(request))
    await acquiring
    if meanwhile == 'a cancel':
        other = await service.replica(_ask)
        canceled = await other.handler.on_cancel_task(
            CancelTaskRequest(id=task.id), call()
        )
        assert canceled.status.state == CANCELED
        await replica.handler._turns.undo(acquiring, request, call())
        assert await replica.lease(task.id) is None
        told = replica.pushes.states(task.id) + other.pushes.states(task.id)
        assert told.count(CANCELED) == 1
        return
    move, lost = store.move, []

    async def move_or_lose(*which, **how):
        if not lost:
            lost.append(which)
            raise ConnectionResetError('lost')
        return await move(*which, **how)

    store.move = move_or_lose
    await replica.handler._turns.undo(acquiring, request, call())
    assert lost
    assert (await replica.lease(task.id)).state is LeaseState.FREE


async def test_an_id_in_another_case_is_another_task(service: Service):
    """MySQL's task table would say that it is the same one."""
    replica = await service.replica(_ask)
    other = await service.replica(_finish)
    task = await replica.handler.on_message_send(message(), call())
    with pytest.raises(TaskNotFoundError):
        await other.handler.on_message_send(
            message(task=task.id.upper()), call()
        )
    assert other.agent.turns == 0
    assert len(await service.leases.leases()) == 1
