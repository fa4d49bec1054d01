"""One replica of the demo's agent.

Everything that a server needs to put its tasks under lease is in `make_app`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import httpx
from a2a.server.agent_execution import AgentExecutor
from a2a.server.cluster.database_event_stream import DatabaseTaskEventStream
from a2a.server.cluster.database_task_store import VersionedDatabaseTaskStore
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import BasePushNotificationSender, TaskUpdater
from a2a.server.tasks.database_push_notification_config_store import (
    DatabasePushNotificationConfigStore,
)
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Part,
    Task,
    TaskState,
    TaskStatus,
)
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

from a2a_lease import (
    DatabaseLeaseStore,
    FailAbandoned,
    LeaseSettings,
    LeasedRequestHandler,
    ReExecute,
    RecoveryPolicy,
    current_lease,
)
from a2a_lease.demo.sabotage import without_sweep
from a2a_lease.demo.serving import serve


if TYPE_CHECKING:
    from a2a.server.agent_execution import RequestContext
    from a2a.server.events import EventQueue


POLICIES: dict[str, RecoveryPolicy] = {
    'fail': FailAbandoned(),
    're-execute': ReExecute(),
}


class Chapters(AgentExecutor):
    """Writes as many chapters as it is asked to, one after another.

    Asked to `ask first`, it pauses for an answer before it writes.
    """

    def __init__(self, seconds_per_chapter: float) -> None:
        self._pause = seconds_per_chapter

    async def execute(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Writes."""
        task_id, context_id = context.task_id or '', context.context_id or ''
        wish = context.get_user_input()
        updates = TaskUpdater(event_queue, task_id, context_id)
        if context.current_task is None:
            await event_queue.enqueue_event(
                Task(
                    id=task_id,
                    context_id=context_id,
                    status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED),
                    history=[context.message] if context.message else [],
                )
            )
            if wish == 'ask first':
                await updates.requires_input(
                    updates.new_agent_message([Part(text='How many?')])
                )
                return
        await updates.start_work()
        lease = current_lease()
        done = lease.checkpoint or 0
        for number in range(done + 1, int(wish) + 1):
            if lease.lost.is_set():
                return
            await updates.add_artifact(
                [Part(text=f'Chapter {number}')],
                artifact_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f'{number}')),
            )
            # If this replica dies, another one goes on from here.
            await lease.save_checkpoint(number)
            await asyncio.sleep(self._pause)
        await updates.complete()

    async def cancel(
        self, context: RequestContext, event_queue: EventQueue
    ) -> None:
        """Ends the task as canceled."""
        await TaskUpdater(
            event_queue, context.task_id or '', context.context_id or ''
        ).cancel()


def make_app(config: dict[str, Any]) -> Starlette:
    """Makes the application of one replica.

    Args:
        config: Of the demo: `database_url`, `url`, `settings`,
            `seconds_per_chapter`, `policy` and `sabotage`.
    """
    engine = create_async_engine(config['database_url'])
    card = AgentCard(
        name='chapters',
        description='Writes chapters.',
        version='1.0.0',
        default_input_modes=['text/plain'],
        default_output_modes=['text/plain'],
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
        supported_interfaces=[
            AgentInterface(
                url=config['url'],
                protocol_binding='JSONRPC',
                protocol_version='1.0',
            )
        ],
        skills=[
            AgentSkill(
                id='write',
                name='Write',
                description='Writes as many chapters as you say.',
                tags=['demo'],
            )
        ],
    )
    push_configs = DatabasePushNotificationConfigStore(engine)
    leases = DatabaseLeaseStore(engine)
    handler = LeasedRequestHandler(
        agent_executor=Chapters(config['seconds_per_chapter']),
        agent_card=card,
        task_store=VersionedDatabaseTaskStore(engine),
        event_stream=DatabaseTaskEventStream(engine),
        lease_store=without_sweep(leases) if config['sabotage'] else leases,
        settings=LeaseSettings(**config['settings']),
        recovery=POLICIES[config['policy']],
        push_config_store=push_configs,
        push_sender=BasePushNotificationSender(
            httpx.AsyncClient(), push_configs
        ),
    )
    return Starlette(
        routes=[
            *create_agent_card_routes(card),
            *create_jsonrpc_routes(handler, rpc_url='/'),
        ],
        lifespan=handler.lifespan,
    )


if __name__ == '__main__':
    serve(make_app)
