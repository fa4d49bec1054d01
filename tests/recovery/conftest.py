from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease import DatabaseLeaseStore
from support.inprocess import Service


if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    engine = create_async_engine(f'sqlite+aiosqlite:///{tmp_path}/tasks.db')
    service = Service(engine, DatabaseLeaseStore(engine))
    await service.leases.initialize()
    async with service.stack:
        yield service
    await engine.dispose()
