"""Times and limits, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from a2a_lease.errors import LeaseConfigurationError


_LARGEST = 1e9
"""No number of seconds, bytes or tasks makes sense beyond."""


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """How fast death is noticed, and how long things may take.

    All times are seconds. A process that dies is noticed at the latest after
    `3 * heartbeat_interval + sweep_interval`, and by its silence alone after
    `ttl + heartbeat_interval + sweep_interval`.

    Raises:
        LeaseConfigurationError: A combination that cannot work; it is a
            `ValueError` too.
    """

    ttl: float = 20.0
    """Silence after which a replica is declared dead."""
    heartbeat_interval: float = 1.0
    """How often a replica beats."""
    sweep_interval: float = 1.0
    """How often a replica looks at the others."""
    liveness_lock: bool = True
    """Whether a process holds a lock that goes when it dies, so that others
    need not wait for `ttl`; see "Death" in the README."""
    acquire_timeout: float = 30.0
    """How long a message waits for the running turn of its task."""
    drain_timeout: float = 20.0
    """How long running turns may go on after SIGTERM; 0 hands over at once."""
    stop_timeout: float = 5.0
    """How long a canceled agent may take to stop before it is given up on."""
    inactivity_timeout: float | None = None
    """How long a running turn may go without an event or a checkpoint of its
    agent before it counts as abandoned; None for as long as it likes."""
    recovery_limit: int = 16
    """How many tasks one replica recovers at the same time."""
    run_again_limit: int = 16
    """How many turns one replica runs again at the same time; the rest waits
    for others."""
    request_limit: int = 1_000_000
    """Bytes of a request that are stored to run it again; a turn with a larger
    one fails."""
    checkpoint_limit: int = 1_000_000
    """Bytes of a checkpoint, as JSON."""

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        self._check_types()
        for name in (
            'ttl',
            'heartbeat_interval',
            'sweep_interval',
            'acquire_timeout',
            'stop_timeout',
        ):
            value = getattr(self, name)
            if value <= 0:
                raise LeaseConfigurationError(
                    f'{name} must be greater than 0 seconds, not {value:g}.'
                )
        if self.inactivity_timeout is not None and self.inactivity_timeout <= 0:
            raise LeaseConfigurationError(
                f'inactivity_timeout must be greater than 0 seconds, or None, '
                f'not {self.inactivity_timeout:g}.'
            )
        if self.drain_timeout < 0:
            raise LeaseConfigurationError(
                f'drain_timeout must be 0 or more seconds, not '
                f'{self.drain_timeout:g}.'
            )
        for name, least in (
            ('recovery_limit', 1),
            ('run_again_limit', 1),
            ('request_limit', 0),
            ('checkpoint_limit', 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise LeaseConfigurationError(
                    f'{name} must be a whole number of {least} or more, not '
                    f'{value!r}.'
                )
        # A save trusts a beat for two intervals, and a beat may be lost and
        # tried again; below four intervals a living replica could be fenced
        # while it still trusts its last beat.
        if self.ttl < 4 * self.heartbeat_interval:
            raise LeaseConfigurationError(
                f'ttl ({self.ttl:g} s) must be at least 4 heartbeat '
                f'intervals (4 x {self.heartbeat_interval:g} s = '
                f'{4 * self.heartbeat_interval:g} s).'
            )
        # A gap between two looks adds two sweep intervals of silence at most.
        if self.ttl < 4 * self.sweep_interval:
            raise LeaseConfigurationError(
                f'ttl ({self.ttl:g} s) must be at least 4 sweep intervals '
                f'(4 x {self.sweep_interval:g} s = '
                f'{4 * self.sweep_interval:g} s).'
            )

    def _check_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise LeaseConfigurationError(
                        f'{field.name} must be True or False, not {value!r}.'
                    )
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LeaseConfigurationError(
                    f'{field.name} must be a number, not {value!r}.'
                )
            if not -_LARGEST < value < _LARGEST:
                raise LeaseConfigurationError(
                    f'{field.name} must be less than {_LARGEST:g}, not '
                    f'{value!r}.'
                )

    @property
    def beat_timeout(self) -> float:
        """Seconds after which a beat without an answer is given up."""
        return self.ttl / 4

    @property
    def trust(self) -> float:
        """Seconds for which a confirmed beat lets saves pass unasked."""
        return 2 * self.heartbeat_interval
