from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from a2a_lease import DatabaseLeaseStore
from support.inprocess import Service


if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.databases import Database


@pytest.fixture
async def service(database: Database) -> AsyncIterator[Service]:
    engine = database.engine()
    service = Service(engine, DatabaseLeaseStore(engine))
    await service.leases.initialize()
    async with service.stack:
        yield service
    await engine.dispose()
