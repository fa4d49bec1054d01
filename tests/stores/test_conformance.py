from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from a2a_lease import DatabaseLeaseStore, InMemoryLeaseStore
from a2a_lease.testing import LeaseStoreConformance


if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from a2a_lease import LeaseStore
    from support.databases import Database


class TestInMemoryLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    async def store(self) -> LeaseStore:
        return InMemoryLeaseStore()


class TestDatabaseLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    async def store(self, database: Database) -> AsyncIterator[LeaseStore]:
        engine = database.engine()
        store = DatabaseLeaseStore(engine)
        await store.initialize()
        yield store
        await store.close()
        await engine.dispose()
