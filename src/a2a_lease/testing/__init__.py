"""For those who implement a `LeaseStore`: the tests that it must pass."""

from a2a_lease.testing.conformance import LeaseStoreConformance


__all__ = ['LeaseStoreConformance']
