from __future__ import annotations

import asyncio
import gc
import io
from typing import TYPE_CHECKING

import pytest

from a2a_lease import DatabaseLeaseStore
from support.databases import (
    Database,
    PgBouncer,
    PrivateMariaDB,
    Servers,
    make_database,
)
from support.inprocess import Service
from support.stage import Stage


if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


KINDS = [
    'sqlite',
    'postgresql',
    pytest.param(
        'mariadb',
        marks=pytest.mark.skipif(
            not PrivateMariaDB.is_installed(), reason='mariadbd is missing'
        ),
    ),
]


@pytest.fixture(scope='session')
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(params=KINDS)
def database(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> Database:
    return make_database(request.param, servers, tmp_path)


@pytest.fixture
def postgresql(servers: Servers, tmp_path: Path) -> Database:
    return make_database('postgresql', servers, tmp_path)


@pytest.fixture
def mariadb(servers: Servers, tmp_path: Path) -> Database:
    if not PrivateMariaDB.is_installed():
        pytest.skip('mariadbd is missing')
    return make_database('mariadb', servers, tmp_path)


@pytest.fixture
async def service(database: Database) -> AsyncIterator[Service]:
    engine = database.engine()
    service = Service(engine, DatabaseLeaseStore(engine))
    await service.leases.initialize()
    async with service.stack:
        yield service
        await service.let_clients_go()
    await engine.dispose()


@pytest.fixture
def stage(service: Service) -> Stage:
    return Stage(service)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    outcome = yield
    if call.excinfo is not None and 'pytest-timeout' in str(call.excinfo.value):
        # Where the event loop stood still, which its own stack does not say.
        stacks = io.StringIO()
        for held in gc.get_objects():
            if isinstance(held, asyncio.Task) and not held.done():
                held.print_stack(file=stacks)
        outcome.get_result().sections.append(('Tasks', stacks.getvalue()))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    for server, program, package in (
        (PrivateMariaDB, 'mariadbd', 'mariadb-server'),
        (PgBouncer, 'pgbouncer', 'pgbouncer'),
    ):
        if not server.is_installed():
            terminalreporter.write_line(
                f'NOT ALL WAS TESTED: {program} is missing. Install '
                f'{package} to test with it too.',
                red=True,
                bold=True,
            )
