"""A lease store that hides what ended sessions left, to show what is missed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from a2a_lease.stores.lease_store import LeaseStore


if TYPE_CHECKING:
    from a2a_lease.model import Look


def without_sweep(inner: LeaseStore) -> LeaseStore:
    """Returns a store with which nobody takes over anything."""

    async def look(self: LeaseStore, *args: Any, **options: Any) -> Look:
        del self
        seen = await inner.look(*args, **options)
        return dataclasses.replace(seen, ended=())

    async def claim(self: LeaseStore, *args: Any, **options: Any) -> list[Any]:
        del self, args, options
        return []

    def detached(self: LeaseStore) -> LeaseStore:
        del self
        return without_sweep(inner.detached())

    def delegate(name: str) -> Any:
        def method(self: LeaseStore, *args: Any, **options: Any) -> Any:
            del self
            return getattr(inner, name)(*args, **options)

        return method

    methods = {
        name: delegate(name) for name in LeaseStore.__abstractmethods__
    } | {'look': look, 'claim': claim, 'detached': detached}
    return type('LeaseStoreWithoutSweep', (LeaseStore,), methods)()
