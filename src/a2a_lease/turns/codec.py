"""Keeping a task's owner, so that recovery can act in its scope."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from a2a.auth.user import User
from a2a.server.context import ServerCallContext


if TYPE_CHECKING:
    from collections.abc import Callable


class RestoredUser(User):
    """The user of a stored call context."""

    def __init__(self, *, user_name: str, is_authenticated: bool) -> None:
        self._user_name = user_name
        self._is_authenticated = is_authenticated

    @property
    def is_authenticated(self) -> bool:
        """Whether the user was authenticated when the turn began."""
        return self._is_authenticated

    @property
    def user_name(self) -> str:
        """The user's name when the turn began."""
        return self._user_name


class ContextCodec:
    """Writes a call context into the lease, and makes it again.

    It keeps the user's name, whether they were authenticated, the tenant and
    the requested extensions. Whatever else your `owner_resolver` needs lies
    in `ServerCallContext.state`; name it in a subclass:

        class AccountCodec(ContextCodec):
            def dump_state(self, state):
                return {'account': state['account']}

    Name single keys, and never credentials: the state holds the headers of
    the request, and what is returned here is stored in clear.
    """

    def dump_state(self, state: Any) -> dict[str, Any]:  # noqa: ANN401
        """Returns what to keep of the state, as JSON types."""
        del state
        return {}

    def load_state(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Returns the state again, of what `dump_state` kept."""
        return kept

    def dump(self, context: ServerCallContext) -> bytes:
        """Writes the parts of a call context that are kept."""
        return json.dumps(
            {
                'user_name': context.user.user_name,
                'is_authenticated': context.user.is_authenticated,
                'tenant': context.tenant,
                'extensions': sorted(context.requested_extensions),
                'state': self.dump_state(context.state),
            },
            separators=(',', ':'),
        ).encode()

    def load(self, data: bytes) -> ServerCallContext:
        """Makes a call context of what `dump` wrote.

        Raises:
            ValueError: The bytes are not of this codec.
        """
        try:
            kept = json.loads(data)
            return ServerCallContext(
                user=RestoredUser(
                    user_name=str(kept['user_name']),
                    is_authenticated=bool(kept['is_authenticated']),
                ),
                tenant=str(kept['tenant']),
                requested_extensions=set(kept['extensions']),
                state=self.load_state(kept['state']),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f'The stored call context cannot be read: {error!r}'
            ) from error


def survives(
    codec: ContextCodec,
    context: ServerCallContext,
    owner_resolver: Callable[[ServerCallContext], str],
) -> tuple[bytes, str]:
    """Writes a call context and makes sure that its owner can be restored.

    Returns:
        The bytes to store, and the owner.

    Raises:
        ValueError: The owner would be another one after a recovery, or the
            codec fails; the message says what to do.
    """
    owner = owner_resolver(context)
    try:
        data = codec.dump(context)
        restored = owner_resolver(codec.load(data))
    except Exception as error:
        raise ValueError(
            f'The call context cannot be stored and restored for recovery '
            f'({type(error).__name__}: {error}). {_advice(codec)}'
        ) from error
    if restored != owner:
        raise ValueError(
            f'The owner of this request is {owner!r}, but would be '
            f'{restored!r} after a recovery. {_advice(codec)}'
        )
    return data, owner


def _advice(codec: ContextCodec) -> str:
    if type(codec) is ContextCodec:
        return (
            'Pass context_codec= to LeasedRequestHandler: a ContextCodec '
            'whose dump_state() keeps what your owner_resolver reads from the '
            'state.'
        )
    return (
        f'Let {type(codec).__name__}.dump_state() keep what your '
        f'owner_resolver reads from the state, for each request.'
    )
