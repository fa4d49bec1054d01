"""What a lease keeps of a turn, so that it can run again as it began."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from a2a.types.a2a_pb2 import SendMessageRequest, Task, TaskStatus
from google.protobuf.message import DecodeError


if TYPE_CHECKING:
    from collections.abc import Sequence

    from a2a.types.a2a_pb2 import Message


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The request of a turn, and the status in which it met its task."""

    request: SendMessageRequest
    """With the ids of task and context, without push credentials."""
    status: TaskStatus | None
    """None if there was no task yet."""

    @classmethod
    def of(
        cls,
        request: SendMessageRequest,
        *,
        task_id: str,
        context_id: str,
        task: Task | None,
    ) -> TurnRecord:
        """Copies what is needed of a request that is about to run."""
        kept = SendMessageRequest()
        kept.CopyFrom(request)
        kept.message.task_id = task_id
        kept.message.context_id = context_id
        # They are in the push config store already.
        kept.configuration.ClearField('task_push_notification_config')
        if not request.HasField('configuration'):
            kept.ClearField('configuration')
        return cls(kept, task.status if task is not None else None)

    @property
    def size(self) -> int:
        """Bytes of what the user sent."""
        return self.request.ByteSize()

    def dump(self) -> bytes:
        """Writes it, as `load` reads it."""
        return json.dumps(
            {
                'request': _text(self.request.SerializeToString()),
                'status': (
                    _text(self.status.SerializeToString())
                    if self.status is not None
                    else None
                ),
            },
            separators=(',', ':'),
        ).encode()

    @classmethod
    def load(cls, data: bytes) -> TurnRecord:
        """Reads what `dump` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            kept = json.loads(data)
            request = SendMessageRequest.FromString(_bytes(kept['request']))
            status = kept['status']
            return cls(
                request,
                TaskStatus.FromString(_bytes(status))
                if status is not None
                else None,
            )
        except (KeyError, TypeError, DecodeError) as error:
            raise ValueError(
                f'The stored request of the turn cannot be read: {error!r}'
            ) from error

    @property
    def message(self) -> Message:
        """What the user said."""
        return self.request.message

    def as_it_began(self, task: Task) -> Task | None:
        """Returns the task as the agent saw it when the turn began.

        An agent that asks `current_task` whether this is an answer to its
        question takes the same branch again. What the turn has produced since
        stays: artifacts and metadata.
        """
        if self.status is None:
            return None
        began = Task()
        began.CopyFrom(task)
        began.status.CopyFrom(self.status)
        later = [self.message]
        if self.status.HasField('message'):
            later.append(self.status.message)
        numbers = [_find(message, began.history) for message in later]
        del began.history[min(numbers) :]
        return began


def _find(wanted: Message, history: Sequence[Message]) -> int:
    """Returns where a message is, or the length of the history."""
    if wanted.message_id:
        for number, message in enumerate(history):
            if message.message_id == wanted.message_id:
                return number
        return len(history)
    # Agents may leave out the id; the same may have been said before.
    for number in reversed(range(len(history))):
        if history[number] == wanted:
            return number
    return len(history)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
