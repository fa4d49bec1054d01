"""Leases in the database that the replicas share already."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    and_,
    case,
    delete,
    event,
    exists,
    insert,
    literal,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from a2a_lease.errors import (
    LeaseConfigurationError,
    LeaseConflictError,
    LeaseError,
    SessionEndedError,
)
from a2a_lease.model import (
    ClaimedLease,
    LeaseState,
    LivenessLock,
    Look,
    Renewal,
    Session,
    SessionState,
    StoredTurn,
    TaskLease,
    TaskMark,
)
from a2a_lease.stores.dialect import dialect_of, is_contention, is_locked
from a2a_lease.stores.encryption import Cipher
from a2a_lease.stores.lease_store import LeaseStore
from a2a_lease.stores.liveness import LivenessLocks, locks_of
from a2a_lease.stores.schema import LONGEST_ID, make_schema


if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from sqlalchemy import ColumnElement, Insert, Row
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from a2a_lease.model import LeaseRequest


logger = logging.getLogger(__name__)

_T = TypeVar('_T')
_State = TypeVar('_State', SessionState, LeaseState)
_RING = 3
_SQLITE_WAIT = 250
"""Milliseconds for which the heartbeat waits for the write lock."""
_TRIES = 5
_NOTHING: dict[str, Any] = {'turn': null(), 'checkpoint': null()}
"""What a lease keeps for another attempt if there will be none."""
_OF_CLAIM = ('previous_session_id', 'previous_state', 'previous_closed')
_ENDED = (SessionState.CLOSED.value, SessionState.FENCED.value)
"""What a newer version may write besides is alive, for all one knows."""
_KNOWN = tuple(state.value for state in LeaseState)
_ACQUIRABLE = (LeaseState.FREE.value, LeaseState.IDLE.value)
_LETTING_GO = (LeaseState.FREE, LeaseState.IDLE)
_CLAIMABLE = (
    LeaseState.RUNNING.value,
    LeaseState.IDLE.value,
    LeaseState.RECOVERING.value,
)


class DatabaseLeaseStore(LeaseStore):
    """Keeps sessions and leases in two tables beside the SDK's.

    Works on PostgreSQL 13, MySQL 8, MariaDB 10.6 and later, and on SQLite
    files. The `owner` and `call_context` of a lease tell who its task belongs
    to; guard the tables as you guard the tasks.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        create_table: bool = True,
        table_prefix: str = 'a2a_lease_',
        encryption_key: str | bytes | None = None,
    ) -> None:
        """Makes a store over an engine, which stays yours to dispose of.

        Args:
            engine: An async engine on the database that all replicas share.
            create_table: Create the tables if they are missing.
            table_prefix: What the names of the tables begin with.
            encryption_key: A Fernet key, the same on all replicas. With it,
                what is kept for another attempt, the user's message and the
                agent's checkpoint, is encrypted.

        Raises:
            LeaseConfigurationError: The database cannot keep leases, or an
                argument cannot be; the message says what to do.
        """
        if not re.fullmatch(r'\w{0,40}', table_prefix, re.ASCII):
            raise LeaseConfigurationError(
                f'table_prefix must be up to 40 letters, digits and _, not '
                f'{table_prefix!r}.'
            )
        self._dialect = dialect_of(engine)
        self._engine = engine
        self._working = (
            engine.execution_options(isolation_level=self._dialect.isolation)
            if self._dialect.isolation is not None
            else engine
        )
        self._beating = engine.execution_options(isolation_level='AUTOCOMMIT')
        self._create_table = create_table
        self._prefix = table_prefix
        self._owns_engine = False
        self._locks: LivenessLocks | None = None
        self._initialized = False
        self._tries = _TRIES
        self._running: set[asyncio.Future[Any]] = set()
        schema = make_schema(table_prefix)
        self._metadata = schema.metadata
        self._sessions = schema.sessions
        self._leases = schema.leases
        self._cipher = (
            Cipher(encryption_key) if encryption_key is not None else None
        )
        # All but what may be large, and what is of claims only.
        self._of_lease = [
            column
            for column in schema.leases.c
            if column.name not in ('turn', 'checkpoint', *_OF_CLAIM)
        ]
        self._of_claim = [
            *self._of_lease,
            *(schema.leases.c[name] for name in _OF_CLAIM),
        ]

    async def initialize(self) -> None:
        """Creates the tables, or makes sure that they are there.

        Raises:
            LeaseConfigurationError: They are missing, and `create_table` is
                off.
        """
        if self._initialized:
            return
        if self._create_table:
            await self._create()
        try:
            async with self._working.connect() as connection:
                for table in (self._sessions, self._leases):
                    await connection.execute(select(table).limit(0))
        except DBAPIError as error:
            if is_contention(error) or error.connection_invalidated:
                raise
            raise LeaseConfigurationError(
                f'The tables {self._sessions.name} and {self._leases.name} '
                f'cannot be read: {error.orig}. Create them, or pass '
                f'create_table=True; those of another version do not fit.'
            ) from error
        self._initialized = True

    async def _create(self) -> None:
        # Replicas that start together create the tables at the same time,
        # and all but one of them may be refused.
        for number in range(_TRIES):
            try:
                async with self._engine.begin() as connection:
                    await connection.run_sync(self._metadata.create_all)
                return
            except DBAPIError as error:
                if error.connection_invalidated or number == _TRIES - 1:
                    raise
                logger.debug('Creating the tables again.', exc_info=True)
            await asyncio.sleep(random.uniform(0.02, 0.1))  # noqa: S311

    def detached(self) -> LeaseStore:
        """Returns a store with an engine of its own, for another thread.

        Cloning the URL would lose connect arguments, a custom creator and
        listeners; a pool made again keeps them.
        """
        engine = self._recreated()
        store = DatabaseLeaseStore(
            engine, create_table=False, table_prefix=self._prefix
        )
        if self._dialect.name == 'sqlite':
            # What is given up runs to its end there: a beat must not wait
            # for the write lock for longer than it is waited for itself.
            event.listen(engine.sync_engine, 'connect', _wait_briefly)
            store._tries = 1
        store._owns_engine = True
        store._locks = locks_of(self._dialect.name, self._recreated())
        store._initialized = self._initialized
        return store

    def _recreated(self) -> AsyncEngine:
        return create_async_engine(
            self._engine.url, pool=self._engine.sync_engine.pool.recreate()
        )

    async def close(self) -> None:
        """Disposes of what `detached` made."""
        if self._locks is not None:
            await self._locks.close()
        if self._running:
            await asyncio.wait(set(self._running))
        if self._owns_engine:
            await self._engine.dispose()

    # Sessions

    async def open_session(
        self,
        *,
        session_id: str,
        service: str,
        ttl: float,
        heartbeat_interval: float,
        label: str,
    ) -> None:
        """Records a new session as open."""
        opening = self._opening(
            session_id, service, ttl, heartbeat_interval, label
        )
        await self.initialize()
        try:
            await self._transaction(lambda c: c.execute(opening))
        except IntegrityError:
            logger.debug('Session %s was opened already.', session_id)

    def _opening(
        self,
        session_id: str,
        service: str,
        ttl: float,
        heartbeat_interval: float,
        label: str,
    ) -> Insert:
        now = self._dialect.now
        return insert(self._sessions).values(
            id=_key(session_id, 'session id'),
            service=_key(service, 'service'),
            state=SessionState.OPEN.value,
            done=False,
            beat=0,
            notices=0,
            ttl=ttl,
            heartbeat_interval=heartbeat_interval,
            label=_printable(label)[:LONGEST_ID],
            started_at=now,
            renewed_at=now,
        )

    async def renew(
        self, session_id: str, *, lock: LivenessLock | None = None
    ) -> Renewal | None:
        """Beats: one update by primary key, which commits by itself.

        A replica that is paused in the middle of a transaction keeps its row
        locked, and nobody could declare it dead. A beat that lands though it
        was given up does no harm.
        """
        sessions = self._sessions
        beat = (
            update(sessions)
            .where(
                sessions.c.id == session_id,
                sessions.c.state == SessionState.OPEN.value,
            )
            .values(
                beat=sessions.c.beat + 1,
                renewed_at=self._dialect.now,
                lock_server=lock.server if lock else None,
                lock_number=lock.number if lock else None,
            )
        )

        async def renew(connection: AsyncConnection) -> Renewal | None:
            if self._dialect.returns_updates:
                row = (
                    await connection.execute(
                        beat.returning(sessions.c.beat, sessions.c.notices)
                    )
                ).one_or_none()
            else:
                if (await connection.execute(beat)).rowcount == 0:
                    return None
                row = (
                    await connection.execute(
                        select(sessions.c.beat, sessions.c.notices).where(
                            sessions.c.id == session_id
                        )
                    )
                ).one_or_none()
            return Renewal(beat=row[0], notices=row[1]) if row else None

        if lock is not None and self._locks is not None:
            async with self._locks.holder() as holder:
                if holder is not None:
                    # It commits by itself too. That it holds the lock yet
                    # shows in that it answers.
                    return await renew(holder)
        return await self._transaction(renew, engine=self._beating)

    async def take_liveness_lock(
        self, session_id: str, *, number: int
    ) -> LivenessLock | None:
        """Takes a lock of the connection that beats from now on."""
        if self._locks is None:
            return None
        return await self._locks.take(session_id, number)

    async def released_locks(self, sessions: Sequence[Session]) -> set[str]:
        """Returns the ids of sessions whose lock nobody holds any more."""
        if self._locks is None:
            return set()
        return await self._locks.released(
            {session.id: session.lock for session in sessions if session.lock}
        )

    async def close_session(self, session_id: str) -> bool:
        """Ends a session in order."""
        return await self._changes(
            self._ending(session_id, SessionState.CLOSED)
        )

    def _ending(self, session_id: str, state: SessionState) -> Any:  # noqa: ANN401
        sessions = self._sessions
        return (
            update(sessions)
            .where(
                sessions.c.id == session_id,
                sessions.c.state == SessionState.OPEN.value,
            )
            .values(state=state.value, ended_at=self._dialect.now)
        )

    async def fence(self, session_id: str, *, beat: int) -> bool:
        """Declares a session dead if its counter still stands at `beat`.

        If it waited behind a lock that stops everybody's beats, it would run
        ahead of the beat that waits there too.
        """
        fencing = self._ending(session_id, SessionState.FENCED).where(
            self._sessions.c.beat == beat
        )

        async def fence(connection: AsyncConnection) -> bool:
            async with self._dialect.not_queueing(connection):
                if self._dialect.name == 'mysql':
                    # Its timeouts are whole seconds; this one waits not at all.
                    await connection.execute(
                        select(self._sessions.c.id)
                        .where(self._sessions.c.id == session_id)
                        .with_for_update(nowait=True)
                    )
                return (await connection.execute(fencing)).rowcount == 1

        try:
            fenced = await self._transaction(fence, tries=1)
        except DBAPIError as error:
            # A deadlock with a beat shows that it beats.
            if is_locked(error) or is_contention(error):
                return False
            raise
        if fenced and self._locks is not None and self._locks.leave_files:
            number = (
                await self._read(
                    select(self._sessions.c.lock_number).where(
                        self._sessions.c.id == session_id
                    )
                )
            )[0][0]
            if number is not None:
                await self._locks.clear(session_id, number)
        return fenced

    async def look(
        self,
        service: str,
        session_id: str,
        *,
        everyone: bool,
        also: Collection[str] = (),
    ) -> Look:
        """Reads what the heartbeat needs, in one query."""
        sessions = self._sessions
        waiting = and_(
            sessions.c.service == service, sessions.c.done.is_(False)
        )
        is_open = sessions.c.state == SessionState.OPEN.value
        ended = select(sessions).where(
            waiting,
            sessions.c.state.in_(_ENDED),
        )
        if everyone:
            others = [
                select(sessions).where(
                    waiting, is_open, sessions.c.id != session_id
                )
            ]
        else:
            others = [
                _first(
                    select(sessions).where(waiting, is_open, side),
                    sessions.c.id,
                )
                for side in (
                    sessions.c.id > session_id,
                    sessions.c.id < session_id,
                )
            ]
            if also:
                others.append(
                    select(sessions).where(
                        waiting, is_open, sessions.c.id.in_(list(also))
                    )
                )
        query = union_all(ended, *others)
        rows = await self._read(query)
        found = {row.id: _session(row) for row in rows}
        opened = sorted(
            (s for s in found.values() if s.state is SessionState.OPEN),
            key=lambda session: (session.id < session_id, session.id),
        )
        if not everyone:
            near = {s.id for s in opened if s.id not in also}
            ring = [s.id for s in opened if s.id in near or s.id in also]
            keep = set(ring[:_RING]) | set(also)
            opened = [s for s in opened if s.id in keep]
        return Look(
            open=tuple(opened),
            ended=tuple(
                s for s in found.values() if s.state is not SessionState.OPEN
            ),
        )

    async def forget_session(self, session_id: str) -> bool:
        """Marks an ended session as done if it holds no lease any more."""
        holds = exists().where(self._leases.c.session_id == session_id)
        if await self._changes(
            update(self._sessions)
            .where(
                self._sessions.c.id == session_id,
                self._sessions.c.state.in_(_ENDED),
                ~holds,
            )
            .values(done=True)
        ):
            return True
        rows = await self._read(
            select(self._leases.c.task_id)
            .where(self._leases.c.session_id == session_id)
            .limit(1)
        )
        return not rows

    async def prune_sessions(self, service: str, *, older_than: float) -> int:
        """Deletes sessions that are done and ended long ago."""
        sessions = self._sessions
        rows = await self._read(
            select(sessions.c.id).where(
                sessions.c.service == service,
                sessions.c.done.is_(True),
                sessions.c.ended_at <= self._dialect.now - older_than,
            )
        )
        if not rows:
            return 0
        # By primary key: a delete that scans locks rows that others beat on.
        pruning = delete(sessions).where(
            sessions.c.id.in_([row.id for row in rows])
        )

        async def prune(connection: AsyncConnection) -> int:
            return (await connection.execute(pruning)).rowcount

        return await self._transaction(prune)

    # Leases

    def _of(self, service: str, task_id: str) -> ColumnElement[bool]:
        return and_(
            self._leases.c.service == service,
            self._leases.c.task_id == task_id,
        )

    def _with(
        self, service: str, task_id: str, token: int
    ) -> ColumnElement[bool]:
        return and_(self._of(service, task_id), self._leases.c.token == token)

    async def get(self, service: str, task_id: str) -> TaskLease | None:
        """Returns the lease on a task."""
        rows = await self._read(
            select(*self._of_lease).where(self._of(service, task_id))
        )
        return _lease(rows[0]) if rows else None

    async def holder(
        self, service: str, task_id: str
    ) -> tuple[TaskLease | None, bool]:
        """Returns the lease on a task and whether it may be acquired."""
        rows = await self._read(
            select(
                *self._of_lease,
                self._sessions.c.state.label('session_state'),
            )
            .outerjoin(
                self._sessions,
                self._sessions.c.id == self._leases.c.session_id,
            )
            .where(self._of(service, task_id))
        )
        if not rows:
            return None, True
        row = rows[0]
        return _lease(row), (
            row.state in _ACQUIRABLE
            or row.session_state is None
            or row.session_state in _ENDED
        )

    async def acquire(self, request: LeaseRequest) -> TaskLease:
        """Takes the lease on a task, in one statement."""
        _key(request.service, 'service')
        _key(request.task_id, 'task id')
        _checked(request.context_id, 'context id')
        _checked(request.owner, 'owner', longest=None)
        lease = TaskLease(
            service=request.service,
            task_id=request.task_id,
            context_id=request.context_id,
            owner=request.owner,
            session_id=request.session_id,
            acquire_id=request.acquire_id,
            token=(request.expected_token or 0) + 1,
            attempt=1,
            state=LeaseState.RUNNING,
            before=request.before,
            task_stored=request.before is not None,
            cancel_requested=False,
            call_context=request.call_context,
            acquired_at=datetime.now(UTC),
        )
        try:
            taken = await self._changes(self._taking(lease, request))
        except IntegrityError:
            taken = False
        if taken:
            return lease
        rows = await self._read(
            select(*self._of_lease).where(
                self._of(request.service, request.task_id),
                self._leases.c.acquire_id == request.acquire_id,
                self._leases.c.session_id == request.session_id,
            )
        )
        if rows:
            return _lease(rows[0])
        if not await self._is_open(request.session_id):
            raise SessionEndedError(request.session_id)
        raise LeaseConflictError(request.task_id)

    def _taking(self, lease: TaskLease, request: LeaseRequest) -> Any:  # noqa: ANN401
        leases, sessions = self._leases, self._sessions
        values = _row(lease)
        values['turn'] = self._sealed(request.turn)
        values['checkpoint'] = None
        asker_lives = exists().where(
            sessions.c.id == request.session_id,
            sessions.c.state == SessionState.OPEN.value,
        )
        if request.expected_token is None:
            names = list(values)
            return insert(leases).from_select(
                names,
                select(
                    *(literal(values[n], leases.c[n].type) for n in names)
                ).where(asker_lives),
            )
        holders = sessions.alias()
        holder_lives = (
            exists()
            .where(
                holders.c.id == leases.c.session_id,
                holders.c.state.not_in(_ENDED),
            )
            .correlate(leases)
        )
        return (
            update(leases)
            .where(
                self._with(
                    request.service, request.task_id, request.expected_token
                ),
                or_(leases.c.state.in_(_ACQUIRABLE), ~holder_lives),
                asker_lives,
            )
            .values(
                {
                    name: value
                    for name, value in values.items()
                    if name not in ('service', 'task_id')
                }
            )
        )

    async def _is_open(self, session_id: str) -> bool:
        return bool(
            await self._read(
                select(self._sessions.c.id).where(
                    self._sessions.c.id == session_id,
                    self._sessions.c.state == SessionState.OPEN.value,
                )
            )
        )

    async def move(
        self, service: str, task_id: str, *, token: int, state: LeaseState
    ) -> bool:
        """Changes the state of a lease."""
        values: dict[str, Any] = {'state': state.value}
        if state is LeaseState.FREE:
            values |= {'session_id': null(), **_NOTHING}
        held = self._with(service, task_id, token)
        if state is not LeaseState.FREE:
            # A parked lease keeps its token when its session dies; whoever
            # held it must not take it up again.
            held = and_(held, self._leases.c.session_id.is_not(None))
        if state in _LETTING_GO:
            held = and_(held, self._leases.c.cancel_requested.is_(False))
        return await self._changes(
            update(self._leases).where(held).values(values)
        )

    async def release(self, service: str, task_id: str, *, token: int) -> bool:
        """Deletes a lease."""
        return await self._changes(
            delete(self._leases).where(self._with(service, task_id, token))
        )

    async def stored_turn(
        self, service: str, task_id: str, *, token: int
    ) -> StoredTurn | None:
        """Returns what a lease keeps for another attempt."""
        rows = await self._read(
            select(self._leases.c.turn, self._leases.c.checkpoint).where(
                self._with(service, task_id, token)
            )
        )
        if not rows:
            return None
        return StoredTurn(
            turn=self._opened(rows[0].turn),
            checkpoint=self._opened(rows[0].checkpoint),
        )

    async def save_checkpoint(
        self, service: str, task_id: str, *, token: int, checkpoint: bytes
    ) -> bool:
        """Replaces the checkpoint of a lease."""
        return await self._changes(
            update(self._leases)
            .where(
                self._with(service, task_id, token),
                self._leases.c.session_id.is_not(None),
            )
            .values(checkpoint=self._sealed(checkpoint))
        )

    def _sealed(self, data: bytes | None) -> bytes | None:
        if data is None or self._cipher is None:
            return data
        return self._cipher.encrypt(data)

    def _opened(self, data: bytes | None) -> bytes | None:
        if data is None or self._cipher is None:
            return data
        return self._cipher.decrypt(bytes(data))

    async def note_stored(
        self, service: str, tokens: Mapping[str, int]
    ) -> None:
        """Notes of many leases at once that their tasks were stored."""
        await self._transaction(
            lambda connection: self._update_each(
                connection, service, tokens, {'task_stored': True}
            )
        )

    async def _update_each(
        self,
        connection: AsyncConnection,
        service: str,
        tokens: Mapping[str, int],
        values: dict[str, Any],
        *conditions: ColumnElement[bool],
    ) -> None:
        # By primary key, in one order, so that two cannot deadlock.
        for task_id in sorted(tokens):
            await connection.execute(
                update(self._leases)
                .where(
                    self._with(service, task_id, tokens[task_id]), *conditions
                )
                .values(values)
            )

    async def request_cancel(self, service: str, task_id: str) -> bool:
        """Tells the holder of a lease that its task was canceled."""

        async def work(connection: AsyncConnection) -> bool:
            asked = await connection.execute(
                update(self._leases)
                .where(
                    self._of(service, task_id),
                    self._leases.c.session_id.is_not(None),
                    self._leases.c.state != LeaseState.IDLE.value,
                )
                .values(cancel_requested=True)
            )
            if asked.rowcount == 0:
                return False
            holder = (
                select(self._leases.c.session_id)
                .where(self._of(service, task_id))
                .scalar_subquery()
            )
            await connection.execute(
                update(self._sessions)
                .where(self._sessions.c.id == holder)
                .values(notices=self._sessions.c.notices + 1)
            )
            return True

        return await self._transaction(work)

    async def cancel_requests(
        self, service: str, session_id: str
    ) -> Sequence[TaskLease]:
        """Returns the leases of a session whose tasks were canceled."""
        rows = await self._read(
            select(*self._of_lease).where(
                self._leases.c.session_id == session_id,
                self._leases.c.service == service,
                self._leases.c.cancel_requested.is_(True),
            )
        )
        return list(_known(_lease, rows))

    async def claim(
        self,
        service: str,
        *,
        session_id: str,
        limit: int,
        ended: Collection[str] | None,
    ) -> Sequence[ClaimedLease]:
        """Takes over leases of sessions that have ended."""
        if not await self._is_open(session_id):
            raise SessionEndedError(session_id)
        sessions = await self._ended_sessions(service, ended)
        if not sessions:
            return []
        leases = self._leases
        held = and_(
            leases.c.service == service,
            leases.c.session_id.in_(list(sessions)),
        )
        crashed_in = [
            each
            for each, session in sessions.items()
            if not _is_closed(session)
        ]

        async def work(connection: AsyncConnection) -> Sequence[Row[Any]]:
            await self._dialect.begin_writing(connection)
            await connection.execute(
                update(leases)
                .where(
                    held,
                    leases.c.state == LeaseState.PARKED.value,
                    leases.c.cancel_requested.is_(False),
                )
                .values(
                    state=LeaseState.FREE.value, session_id=null(), **_NOTHING
                )
            )
            claimable: Any = (
                select(*self._of_claim)
                .where(
                    held,
                    or_(
                        leases.c.state.in_(_CLAIMABLE),
                        leases.c.cancel_requested.is_(True),
                    ),
                    leases.c.state.in_(_KNOWN),
                )
                .order_by(leases.c.task_id)
                .limit(limit)
            )
            if self._dialect.skips_locked:
                claimable = claimable.with_for_update(skip_locked=True)
            before = (await connection.execute(claimable)).all()
            if not before:
                return []
            crashed = and_(
                leases.c.state == LeaseState.RUNNING.value,
                leases.c.session_id.in_(crashed_in),
            )
            # It was claimed, and that recovery died.
            claimed = and_(
                leases.c.state == LeaseState.RECOVERING.value,
                leases.c.previous_session_id.is_not(None),
            )
            closed = leases.c.session_id.not_in(crashed_in)
            await connection.execute(
                update(leases)
                .where(held, leases.c.task_id.in_([b.task_id for b in before]))
                # Not in alphabetical order: MySQL computes each assignment
                # with what the ones before it have assigned.
                .ordered_values(
                    (
                        leases.c.attempt,
                        leases.c.attempt + case((crashed, 1), else_=0),
                    ),
                    (
                        leases.c.previous_closed,
                        case((claimed, leases.c.previous_closed), else_=closed),
                    ),
                    (
                        leases.c.previous_state,
                        case(
                            (claimed, leases.c.previous_state),
                            else_=leases.c.state,
                        ),
                    ),
                    (
                        leases.c.previous_session_id,
                        case(
                            (claimed, leases.c.previous_session_id),
                            else_=leases.c.session_id,
                        ),
                    ),
                    (leases.c.token, leases.c.token + 1),
                    (leases.c.state, LeaseState.RECOVERING.value),
                    (leases.c.session_id, session_id),
                )
            )
            return before

        before = await self._transaction(work)
        sessions |= await self._sessions_of(list(filter(_was_claimed, before)))
        return [_claimed(row, sessions, claimer=session_id) for row in before]

    async def claimed_by(
        self, service: str, session_id: str
    ) -> Sequence[ClaimedLease]:
        """Returns what a session has claimed and still recovers."""
        leases = self._leases
        rows = await self._read(
            select(*self._of_claim)
            .where(
                leases.c.service == service,
                leases.c.session_id == session_id,
                leases.c.state == LeaseState.RECOVERING.value,
                leases.c.previous_session_id.is_not(None),
            )
            .order_by(leases.c.task_id)
        )
        sessions = await self._sessions_of(rows)
        return [
            _taken(_lease(row), row, sessions.get(row.previous_session_id))
            for row in rows
        ]

    async def _sessions_of(
        self, rows: Sequence[Row[Any]]
    ) -> dict[str, Session]:
        """Returns the sessions that leases were claimed from."""
        ids = {row.previous_session_id for row in rows} - {None}
        if not ids:
            return {}
        found = await self._read(
            select(self._sessions).where(self._sessions.c.id.in_(ids))
        )
        return {row.id: _session(row) for row in found}

    async def _ended_sessions(
        self, service: str, ended: Collection[str] | None
    ) -> dict[str, Session | None]:
        """Returns which of the sessions have ended, and how."""
        leases, sessions = self._leases, self._sessions
        if ended is not None:
            rows = await self._read(
                select(sessions.c.id.label('session_id'), sessions).where(
                    sessions.c.id.in_(list(ended)),
                    sessions.c.state.in_(_ENDED),
                )
            )
        else:
            rows = await self._read(
                select(leases.c.session_id, sessions)
                .distinct()
                .outerjoin(sessions, sessions.c.id == leases.c.session_id)
                .where(
                    leases.c.service == service,
                    leases.c.session_id.is_not(None),
                    or_(
                        sessions.c.id.is_(None),
                        sessions.c.state.in_(_ENDED),
                    ),
                )
            )
        return {
            row.session_id: _session(row) if row.id is not None else None
            for row in rows
        }

    async def reclaim(
        self, service: str, task_id: str, *, token: int, session_id: str
    ) -> TaskLease | None:
        """Takes over a lease of one's own, whose turn died here."""
        if not await self._changes(
            update(self._leases)
            .where(
                self._with(service, task_id, token),
                self._leases.c.session_id == session_id,
            )
            .values(
                token=token + 1,
                attempt=self._leases.c.attempt + 1,
                previous_session_id=session_id,
                previous_state=LeaseState.RUNNING.value,
                previous_closed=False,
                state=LeaseState.RECOVERING.value,
            )
        ):
            # Its answer may have been lost the first time.
            lease = await self.get(service, task_id)
            mine = (
                lease is not None
                and lease.token == token + 1
                and lease.session_id == session_id
                and lease.state is LeaseState.RECOVERING
            )
            return lease if mine else None
        return await self.get(service, task_id)

    async def hand_over(
        self, service: str, tokens: Mapping[str, int], *, session_id: str
    ) -> None:
        """Leaves leases to others while their session lives on."""
        now = self._dialect.now
        opening = self._opening(
            session_id,
            service,
            ttl=0.0,
            heartbeat_interval=0.0,
            label='hand-over',
        ).values(state=SessionState.CLOSED.value, ended_at=now)

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(opening)
            # A free lease is nobody's; its session would never be forgotten.
            await self._update_each(
                connection,
                service,
                tokens,
                {'session_id': session_id},
                self._leases.c.session_id.is_not(None),
            )

        try:
            await self._transaction(work)
        except IntegrityError:
            logger.debug('Hand-over %s had landed already.', session_id)

    # For people

    async def sessions(self, service: str | None = None) -> Sequence[Session]:
        """Returns all sessions on record, by start."""
        query = select(self._sessions).order_by(
            self._sessions.c.started_at, self._sessions.c.id
        )
        if service is not None:
            query = query.where(self._sessions.c.service == service)
        return list(_known(_session, await self._read(query)))

    async def leases(
        self, service: str | None = None, *, limit: int = 1000
    ) -> Sequence[TaskLease]:
        """Returns leases, by task id, free ones included."""
        query = select(*self._of_lease).order_by(self._leases.c.task_id)
        if service is not None:
            query = query.where(self._leases.c.service == service)
        return list(_known(_lease, await self._read(query.limit(limit))))

    # Transactions

    async def _read(self, query: Any) -> Sequence[Row[Any]]:  # noqa: ANN401
        async def read(connection: AsyncConnection) -> Sequence[Row[Any]]:
            return (await connection.execute(query)).all()

        return await self._transaction(read)

    async def _changes(self, statement: Any) -> bool:  # noqa: ANN401
        async def change(connection: AsyncConnection) -> bool:
            return (await connection.execute(statement)).rowcount > 0

        return await self._transaction(change)

    async def _transaction(
        self,
        work: Callable[[AsyncConnection], Awaitable[_T]],
        *,
        tries: int | None = None,
        engine: AsyncEngine | None = None,
    ) -> _T:
        """Runs one short transaction, again after a deadlock or the like.

        It is an explicit one unless `engine` commits by itself, so that a
        client that gave up while a statement waited never commits what it did.
        """
        await self.initialize()
        running = self._run(work, tries or self._tries, engine or self._working)
        if self._dialect.name != 'sqlite':
            return await running
        # Its driver works in a thread that a cancellation does not reach; a
        # transaction that is canceled between its write and its commit can
        # keep the file locked for good. So it runs to its end.
        transaction = asyncio.ensure_future(running)
        self._running.add(transaction)
        transaction.add_done_callback(self._ran)
        return await asyncio.shield(transaction)

    def _ran(self, transaction: asyncio.Future[Any]) -> None:
        self._running.discard(transaction)
        if not transaction.cancelled():
            transaction.exception()

    async def _run(
        self,
        work: Callable[[AsyncConnection], Awaitable[_T]],
        tries: int,
        engine: AsyncEngine,
    ) -> _T:
        number = 0
        while True:
            number += 1
            try:
                async with engine.begin() as connection:
                    return await work(connection)
            except DBAPIError as error:
                if not is_contention(error) or number >= tries:
                    raise
            await asyncio.sleep(random.uniform(0.01, 0.05) * number)  # noqa: S311


def _wait_briefly(connection: Any, record: object) -> None:  # noqa: ANN401
    del record
    cursor = connection.cursor()
    cursor.execute(f'PRAGMA busy_timeout = {_SQLITE_WAIT}')
    cursor.close()


def _first(query: Any, key: Any) -> Any:  # noqa: ANN401
    # In a subquery, since SQLite sorts and limits a union as a whole only.
    return select(query.order_by(key).limit(_RING).subquery())


def _checked(text: str, what: str, *, longest: int | None = LONGEST_ID) -> str:
    """Refuses text that the database would refuse, or take for another."""
    if longest is not None and len(text) > longest:
        raise LeaseError(
            f'The {what} has {len(text)} characters; at most {longest} can '
            f'be stored: {text[:40]!r}...'
        )
    if '\0' in text:
        raise LeaseError(f'The {what} contains a NUL character: {text!r}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LeaseError(f'The {what} is not Unicode text: {error}') from error
    return text


def _key(text: str, what: str) -> str:
    if text.endswith(' '):
        # MySQL and MariaDB compare as if it were not there.
        raise LeaseError(f'The {what} ends with a space: {text!r}')
    return _checked(text, what)


def _printable(text: str) -> str:
    return text.replace('\0', '').encode(errors='replace').decode()


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _known(read: Callable[[Any], _T], rows: Iterable[Row[Any]]) -> Iterator[_T]:
    """Reads what this version can read, and says what it cannot."""
    for row in rows:
        try:
            yield read(row)
        except LeaseError as error:
            logger.warning('A row is left out: %s', error)


def _state(of: type[_State], row: Row[Any], what: str) -> _State:
    try:
        return of(row.state)
    except ValueError as error:
        raise LeaseError(
            f'{what} is in the state {row.state!r}, which this version of '
            f'a2a-lease does not know. It is left alone; upgrade this replica.'
        ) from error


def _session(row: Any) -> Session:  # noqa: ANN401
    return Session(
        id=row.id,
        service=row.service,
        state=_state(SessionState, row, f'Session {row.id}'),
        beat=row.beat,
        ttl=row.ttl,
        heartbeat_interval=row.heartbeat_interval,
        lock=(
            LivenessLock(server=row.lock_server, number=row.lock_number)
            if row.lock_server is not None and row.lock_number is not None
            else None
        ),
        label=row.label,
        started_at=_time(row.started_at),
        renewed_at=_time(row.renewed_at),
        expires_at=_time(row.renewed_at + row.ttl),
        ended_at=_time(row.ended_at) if row.ended_at is not None else None,
    )


def _row(lease: TaskLease) -> dict[str, Any]:
    return {
        'service': lease.service,
        'task_id': lease.task_id,
        'context_id': lease.context_id,
        'owner': lease.owner,
        'session_id': lease.session_id,
        'acquire_id': lease.acquire_id,
        'token': lease.token,
        'attempt': lease.attempt,
        'state': lease.state.value,
        'before_state': lease.before.state if lease.before else None,
        'before_timestamp': lease.before.timestamp if lease.before else None,
        'task_stored': lease.task_stored,
        'cancel_requested': lease.cancel_requested,
        'call_context': lease.call_context,
        'acquired_at': lease.acquired_at.timestamp(),
    }


def _lease(row: Any) -> TaskLease:  # noqa: ANN401
    return TaskLease(
        service=row.service,
        task_id=row.task_id,
        context_id=row.context_id,
        owner=row.owner,
        session_id=row.session_id,
        acquire_id=row.acquire_id,
        token=row.token,
        attempt=row.attempt,
        state=_state(LeaseState, row, f'The lease on task {row.task_id}'),
        before=(
            TaskMark(
                state=row.before_state, timestamp=row.before_timestamp or ''
            )
            if row.before_state is not None
            else None
        ),
        task_stored=bool(row.task_stored),
        cancel_requested=bool(row.cancel_requested),
        call_context=bytes(row.call_context),
        acquired_at=_time(row.acquired_at),
    )


def _claimed(
    row: Row[Any],
    sessions: Mapping[str, Session | None],
    *,
    claimer: str,
) -> ClaimedLease:
    """Returns what came of a row that was claimed."""
    lease = _lease(row)
    session = sessions[row.session_id]
    crashed = lease.state is LeaseState.RUNNING and not _is_closed(session)
    taken = dataclasses.replace(
        lease,
        session_id=claimer,
        token=lease.token + 1,
        attempt=lease.attempt + crashed,
        state=LeaseState.RECOVERING,
    )
    if _was_claimed(row):
        return _taken(
            taken,
            row,
            sessions.get(row.previous_session_id),
            given_back=_is_closed(session),
        )
    return ClaimedLease(
        lease=taken,
        previous_session_id=row.session_id,
        previous_state=lease.state,
        previous_closed=_is_closed(session),
        previous_session=session,
        given_back=_is_closed(session),
    )


def _was_claimed(row: Row[Any]) -> bool:
    """Whether a recovery had the lease, and died."""
    return (
        row.state == LeaseState.RECOVERING.value
        and row.previous_session_id is not None
    )


def _taken(
    lease: TaskLease,
    row: Row[Any],
    session: Session | None,
    *,
    given_back: bool = False,
) -> ClaimedLease:
    return ClaimedLease(
        lease=lease,
        previous_session_id=row.previous_session_id,
        previous_state=LeaseState(row.previous_state),
        previous_closed=bool(row.previous_closed),
        previous_session=session,
        given_back=given_back,
    )


def _is_closed(session: Session | None) -> bool:
    return session is not None and session.state is SessionState.CLOSED
