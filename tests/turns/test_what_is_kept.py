"""What a lease keeps of a request: whatever was said, and whatever is there."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from a2a.server.context import ServerCallContext
from a2a.types.a2a_pb2 import (
    Message,
    Part,
    SendMessageRequest,
    Task,
    TaskState,
    TaskStatus,
)
from hypothesis import example, given
from hypothesis import strategies as st

from a2a_lease import ContextCodec, LeaseConfigurationError, LeaseSettings
from a2a_lease.turns.codec import survives
from a2a_lease.turns.record import TurnRecord
from support.inprocess import NamedUser


ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""With what cannot be encoded, and with NUL."""
SENDABLE = st.text()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    'request',
                    'status',
                    'user_name',
                    'is_authenticated',
                    'tenant',
                    'extensions',
                    'state',
                    'else',
                ]
            ),
            inner,
            max_size=8,
        )
    ),
    max_leaves=12,
)
STORED = st.binary() | JSON.map(lambda value: json.dumps(value).encode())


@given(name=ANY_TEXT, tenant=ANY_TEXT, extensions=st.sets(ANY_TEXT))
@example(name="'; DROP TABLE tasks; --", tenant='\\', extensions={'%s', '{x}'})
@example(name='<script>', tenant='\ud800\0', extensions={'\N{FOX FACE}'})
def test_every_user_comes_back(
    name: str, tenant: str, extensions: set[str]
) -> None:
    context = ServerCallContext(
        user=NamedUser(name),
        tenant=tenant,
        requested_extensions=extensions,
        state={'headers': {'authorization': 'Bearer secret'}},
    )
    data, owner = survives(
        ContextCodec(), context, lambda c: f'{c.tenant}/{c.user.user_name}'
    )
    assert b'secret' not in data
    assert owner == f'{tenant}/{name}'
    again = ContextCodec().load(data)
    assert again.user.user_name == name
    assert again.user.is_authenticated
    assert again.tenant == tenant
    assert again.requested_extensions == extensions


@given(data=STORED)
@example(data=b'{"user_name":1,"is_authenticated":[],"tenant":{},')
@example(
    data=b'{"user_name":"","is_authenticated":0,"tenant":"",'
    b'"extensions":[{}],"state":{}}'
)
def test_a_context_that_is_none_is_said(data: bytes) -> None:
    """Recovery sets such a task aside, whatever its row holds."""
    try:
        context = ContextCodec().load(data)
    except ValueError:
        return
    assert isinstance(context, ServerCallContext)


@given(data=STORED)
@example(data=b'{"request":"AAAA","status":null}')
@example(data=b'{"request":"\xff"}')
def test_a_request_that_is_none_is_said(data: bytes) -> None:
    try:
        record = TurnRecord.load(data)
    except ValueError:
        return
    assert isinstance(record, TurnRecord)


@given(
    texts=st.lists(SENDABLE, max_size=5),
    ids=st.tuples(SENDABLE, SENDABLE, SENDABLE),
    metadata=st.dictionaries(SENDABLE, SENDABLE, max_size=3),
    state=st.none() | st.sampled_from(TaskState.values()),
)
def test_every_request_comes_back(
    texts: list[str],
    ids: tuple[str, str, str],
    metadata: dict[str, str],
    state: int | None,
) -> None:
    message_id, task_id, context_id = ids
    request = SendMessageRequest(
        message=Message(
            message_id=message_id, parts=[Part(text=text) for text in texts]
        )
    )
    request.metadata.update(metadata)
    task = None if state is None else Task(status=TaskStatus(state=state))
    record = TurnRecord.of(
        request, task_id=task_id, context_id=context_id, task=task
    )
    again = TurnRecord.load(record.dump())
    assert again == record
    assert again.message.task_id == task_id
    assert again.message.context_id == context_id
    assert [part.text for part in again.message.parts] == texts
    assert dict(again.request.metadata) == metadata


@given(
    given_history=st.lists(
        st.tuples(st.sampled_from(['', 'a', 'b', 'c']), st.sampled_from('xy')),
        max_size=5,
    ),
    said=st.tuples(st.sampled_from(['', 'a', 'z']), st.sampled_from('xy')),
)
def test_a_task_as_it_began_is_a_beginning(
    given_history: list[tuple[str, str]], said: tuple[str, str]
) -> None:
    """Nothing of the history is invented, changed or out of order."""
    history = [
        Message(message_id=message_id, parts=[Part(text=text)])
        for message_id, text in given_history
    ]
    request = SendMessageRequest(
        message=Message(message_id=said[0], parts=[Part(text=said[1])])
    )
    before = Task(
        status=TaskStatus(state=TaskState.TASK_STATE_INPUT_REQUIRED),
        history=history,
    )
    record = TurnRecord.of(request, task_id='t', context_id='c', task=before)
    began = record.as_it_began(before)
    assert began is not None
    assert list(began.history) == history[: len(began.history)]
    assert began.status == before.status
    assert record.message not in began.history


@given(
    values=st.dictionaries(
        st.sampled_from([field.name for field in fields(LeaseSettings)]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.floats(min_value=0.001, max_value=100),
    )
)
@example(values={'ttl': float('nan')})
@example(values={'ttl': 10**400})
@example(values={'recovery_limit': 1.5})
def test_settings_work_or_are_refused(values: dict[str, Any]) -> None:
    try:
        settings = LeaseSettings(**values)
    except LeaseConfigurationError as error:
        said = str(error).replace('_', ' ')
        assert any(name.replace('_', ' ') in said for name in values)
        return
    assert settings.ttl >= 4 * settings.heartbeat_interval
    assert settings.ttl >= 4 * settings.sweep_interval
    assert settings.trust < settings.ttl
    assert settings.recovery_limit >= 1
