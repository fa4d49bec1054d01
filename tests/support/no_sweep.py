"""A lease store that shows no sessions that ended, so that nobody sweeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from a2a_lease import LeaseStore


class NoSweep:
    """Delegates everything to a store, but for what the sweep lives on."""

    def __new__(cls, inner: LeaseStore) -> Any:
        methods = {
            name: _delegate(name) for name in LeaseStore.__abstractmethods__
        }
        methods |= {'look': _look, 'claim': _claim, 'detached': _detached}
        made = type('NoSweep', (LeaseStore,), methods)()
        made.inner = inner
        return made


def _delegate(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


async def _look(self: Any, *args: Any, **kwargs: Any) -> Any:
    look = await self.inner.look(*args, **kwargs)
    return dataclasses.replace(look, ended=())


async def _claim(self: Any, *args: Any, **kwargs: Any) -> Any:
    return ()


def _detached(self: Any) -> Any:
    return NoSweep(self.inner.detached())
