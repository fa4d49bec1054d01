"""The leased handler is the plain one, but for what that does wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from conversations.conversations import CONVERSATIONS
from conversations.talk import JSONRPC, OTHERS, Conversation, Talk


if TYPE_CHECKING:
    from pathlib import Path


async def transcript_of(
    conversation: Conversation, transport: str, folder: Path, *, leased: bool
) -> list[tuple[str, str]]:
    name = 'leased' if leased else 'plain'
    engine = create_async_engine(f'sqlite+aiosqlite:///{folder}/{name}.db')
    try:
        async with Talk(leased, transport, engine, conversation) as talk:
            await conversation.play(talk)
            return talk.transcript
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    ('conversation', 'transport'),
    [
        pytest.param(
            conversation, transport, id=f'{conversation.name}-{transport}'
        )
        for number, conversation in enumerate(CONVERSATIONS)
        # The handler is below the transports: two for each will do.
        for transport in (JSONRPC, OTHERS[number % 2])
    ],
)
async def test_both_handlers_say_the_same(
    conversation: Conversation, transport: str, tmp_path: Path
):
    plain, leased = await asyncio.gather(
        *(
            transcript_of(conversation, transport, tmp_path, leased=leased)
            for leased in (False, True)
        )
    )
    assert leased
    if not conversation.plain_is_wrong:
        assert leased == plain
        return
    assert leased != plain, 'The plain one is right by now: take it off.'
    for what, text in conversation.instead:
        assert [line for line in leased if line[0] == what and text in line[1]]
        assert not [
            line for line in plain if line[0] == what and text in line[1]
        ], 'The plain one is right by now: take it off.'
