"""A save that outlasts an outage and is never doubled."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from a2a.server.cluster import ConcurrentTaskModificationError
from google.protobuf.json_format import MessageToDict

from a2a_lease.outage import is_outage, pauses
from a2a_lease.turns.stopping import letting_go


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from a2a.server.cluster import StoredTask, TaskVersion, VersionedTaskStore
    from a2a.server.context import ServerCallContext
    from a2a.server.events.event_queue import Event
    from a2a.types.a2a_pb2 import Task


logger = logging.getLogger(__name__)


async def save_through_outages(
    store: VersionedTaskStore,
    task: Task,
    *,
    event: Event | None,
    prev: Task | None,
    prev_version: TaskVersion,
    context: ServerCallContext,
    permit: Callable[[], Awaitable[None]],
    tries: int | None = None,
) -> TaskVersion:
    """Saves once, however often the connection breaks meanwhile.

    A connection that is lost during the commit leaves open whether the save
    landed. What is stored then decides: our own content means done, the
    version that we built on means again, anything else is a conflict. The
    SDK's store repeats some of these errors itself, so that a save of ours
    that landed comes back as a conflict; it is recognised in the same way.

    Args:
        store: The task store of the SDK.
        task: What to save.
        event: What brought it about.
        prev: As the SDK hands it over.
        prev_version: What the save builds on.
        context: The call context, for the owner.
        permit: Asked before each try; raises to stop.
        tries: How often an outage may be met before its error is raised, or
            None for as long as `permit` lets it.

    Raises:
        ConcurrentTaskModificationError: Somebody else wrote.
    """
    for met, pause in enumerate(pauses(), start=1):
        await permit()
        try:
            with letting_go():
                return await store.save(
                    task,
                    event=event,
                    prev=prev,
                    prev_version=prev_version,
                    context=context,
                )
        except ConcurrentTaskModificationError:
            stored = await read_through_outages(
                store, task.id, context, permit=permit, tries=tries
            )
            if stored is not None and _landed(stored, task, prev_version):
                return stored.version
            raise
        except Exception as error:
            if not is_outage(error) or met == tries:
                raise
            logger.warning(
                'Saving task %s waits for the database: %s',
                task.id,
                error,
                extra={'task_id': task.id},
            )
        await asyncio.sleep(pause)
        stored = await read_through_outages(
            store, task.id, context, permit=permit, tries=tries
        )
        if stored is None:
            if prev_version.is_missing:
                continue
            raise ConcurrentTaskModificationError(task.id)
        if stored.version == prev_version:
            continue
        if _landed(stored, task, prev_version):
            return stored.version
        raise ConcurrentTaskModificationError(task.id)
    raise AssertionError('unreachable: the pauses never end')


async def always() -> None:
    """Permits a read for as long as it is waited for."""


async def read_through_outages(
    store: VersionedTaskStore,
    task_id: str,
    context: ServerCallContext,
    *,
    permit: Callable[[], Awaitable[None]],
    tries: int | None = None,
) -> StoredTask | None:
    """Reads a task, however often the connection breaks meanwhile.

    Args:
        store: The task store of the SDK.
        task_id: What to read.
        context: The call context, for the owner.
        permit: Asked after an outage; raises to stop.
        tries: As for `save_through_outages`.
    """
    for met, pause in enumerate(pauses(), start=1):
        try:
            with letting_go():
                return await store.get(task_id, context)
        except Exception as error:
            if not is_outage(error) or met == tries:
                raise
            logger.debug(
                'Reading task %s waits for the database.',
                task_id,
                exc_info=True,
            )
        await asyncio.sleep(pause)
        await permit()
    raise AssertionError('unreachable: the pauses never end')


def _landed(stored: StoredTask, task: Task, prev_version: TaskVersion) -> bool:
    return stored.version.is_after(prev_version) and _content(
        stored.task
    ) == _content(task)


def _content(task: Task) -> dict[str, object]:
    content = MessageToDict(task)
    # The SDK's store keeps no empty metadata.
    if not content.get('metadata'):
        content.pop('metadata', None)
    return content
