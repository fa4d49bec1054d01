"""The two tables, and what differs between databases in their columns."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects import mysql


LONGEST_ID = 255


def _text(length: int) -> String:
    # MySQL compares text without case by default: two ids that differ in case
    # only would share a lease.
    return String(length).with_variant(
        mysql.VARCHAR(length, charset='utf8mb4', collation='utf8mb4_bin'),
        'mysql',
        'mariadb',
    )


def _long_text() -> Text:
    return Text().with_variant(
        mysql.LONGTEXT(charset='utf8mb4', collation='utf8mb4_bin'),
        'mysql',
        'mariadb',
    )


def _blob() -> LargeBinary:
    # A plain BLOB ends at 64 KB there.
    return LargeBinary().with_variant(mysql.LONGBLOB(), 'mysql', 'mariadb')


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tables of one store."""

    metadata: MetaData
    sessions: Table
    leases: Table


def make_schema(prefix: str) -> Schema:
    """Makes the tables, in a metadata of their own.

    Times are seconds since the epoch: the same number on each database,
    whatever its time zone.

    Args:
        prefix: What the names of tables and indexes begin with.
    """
    metadata = MetaData()
    sessions = Table(
        f'{prefix}sessions',
        metadata,
        Column('id', _text(LONGEST_ID), primary_key=True),
        Column('service', _text(LONGEST_ID), nullable=False),
        Column('state', _text(16), nullable=False),
        Column('done', Boolean(), nullable=False, default=False),
        Column('beat', BigInteger(), nullable=False),
        Column('notices', BigInteger(), nullable=False),
        Column('ttl', Float(53), nullable=False),
        Column('heartbeat_interval', Float(53), nullable=False),
        Column('lock_server', _text(LONGEST_ID)),
        Column('lock_number', BigInteger()),
        Column('label', _text(LONGEST_ID), nullable=False),
        Column('started_at', Float(53), nullable=False),
        Column('renewed_at', Float(53), nullable=False),
        Column('ended_at', Float(53)),
        # A beat changes no indexed column.
        Index(f'{prefix}sessions_look', 'service', 'done', 'state', 'id'),
        mysql_engine='InnoDB',
        mariadb_engine='InnoDB',
    )
    leases = Table(
        f'{prefix}leases',
        metadata,
        Column('service', _text(LONGEST_ID), primary_key=True),
        Column('task_id', _text(LONGEST_ID), primary_key=True),
        Column('context_id', _text(LONGEST_ID), nullable=False),
        Column('owner', _long_text(), nullable=False),
        Column('session_id', _text(LONGEST_ID)),
        Column('acquire_id', _text(LONGEST_ID), nullable=False),
        Column('token', BigInteger(), nullable=False),
        Column('attempt', Integer(), nullable=False),
        Column('state', _text(16), nullable=False),
        Column('before_state', _text(64)),
        Column('before_timestamp', _text(64)),
        Column('task_stored', Boolean(), nullable=False),
        Column('cancel_requested', Boolean(), nullable=False),
        Column('call_context', _blob(), nullable=False),
        Column('acquired_at', Float(53), nullable=False),
        # From whom a recovering lease was claimed.
        Column('previous_session_id', _text(LONGEST_ID)),
        Column('previous_state', _text(16)),
        Column('previous_closed', Boolean()),
        # These two may be large, and are read for another attempt only.
        Column('turn', _blob()),
        Column('checkpoint', _blob()),
        Index(f'{prefix}leases_session', 'session_id'),
        mysql_engine='InnoDB',
        mariadb_engine='InnoDB',
    )
    return Schema(metadata=metadata, sessions=sessions, leases=leases)
