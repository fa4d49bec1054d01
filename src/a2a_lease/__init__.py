"""Task leases for A2A servers: when a replica dies, its tasks end."""

from a2a_lease.errors import (
    LeaseConfigurationError,
    LeaseConflictError,
    LeaseError,
    LeaseLostError,
    SessionEndedError,
)
from a2a_lease.handler import LeasedRequestHandler
from a2a_lease.model import TaskLease
from a2a_lease.recovery.policy import (
    Fail,
    FailAbandoned,
    Leave,
    ReExecute,
    RecoveryPolicy,
    RunAgain,
)
from a2a_lease.settings import LeaseSettings
from a2a_lease.stores.database import DatabaseLeaseStore
from a2a_lease.stores.lease_store import LeaseStore
from a2a_lease.stores.memory import InMemoryLeaseStore
from a2a_lease.turns.codec import ContextCodec
from a2a_lease.turns.current import CurrentLease, current_lease


__all__ = [
    'ContextCodec',
    'CurrentLease',
    'DatabaseLeaseStore',
    'Fail',
    'FailAbandoned',
    'InMemoryLeaseStore',
    'LeaseConfigurationError',
    'LeaseConflictError',
    'LeaseError',
    'LeaseLostError',
    'LeaseSettings',
    'LeaseStore',
    'LeasedRequestHandler',
    'Leave',
    'ReExecute',
    'RecoveryPolicy',
    'RunAgain',
    'SessionEndedError',
    'TaskLease',
    'current_lease',
]
