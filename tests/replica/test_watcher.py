"""Who is judged dead, on a clock that is turned by hand."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2a_lease import LeaseSettings
from a2a_lease.model import LivenessLock, Look, Session, SessionState
from a2a_lease.replica.watcher import Verdict, Watcher


SETTINGS = LeaseSettings(ttl=20, heartbeat_interval=1, sweep_interval=1)
NOW = datetime.now(UTC)


def session(name: str = 'other', *, beat: int, ttl: float = 20.0) -> Session:
    return Session(
        id=name,
        service='s',
        state=SessionState.OPEN,
        beat=beat,
        ttl=ttl,
        heartbeat_interval=1.0,
        lock=LivenessLock(server='one', number=1),
        label='host:1',
        started_at=NOW,
        renewed_at=NOW,
        expires_at=NOW,
    )


def look(*sessions: Session) -> Look:
    return Look(open=sessions, ended=())


def test_a_counter_that_stands_still_for_the_ttl_is_death():
    watcher = Watcher(SETTINGS)
    for now in range(21):
        assert not watcher.observe(
            look(session(beat=1)), now=now, everyone=True
        )
    [verdict] = watcher.observe(look(session(beat=1)), now=21, everyone=True)
    assert verdict.session.beat == 1
    assert verdict.silence == 21


def test_a_beat_starts_the_silence_anew():
    watcher = Watcher(SETTINGS)
    for now in range(100):
        beat = now // 15
        assert not watcher.observe(
            look(session(beat=beat)), now=now, everyone=True
        )


def test_what_nobody_watched_hardly_counts():
    watcher = Watcher(SETTINGS)
    watcher.observe(look(session(beat=1)), now=0, everyone=True)
    # It slept for an hour, or the database was away.
    assert not watcher.observe(look(session(beat=1)), now=3600, everyone=True)
    for now in range(3601, 3619):
        assert not watcher.observe(
            look(session(beat=1)), now=now, everyone=True
        )
    assert watcher.observe(look(session(beat=1)), now=3619, everyone=True)


def test_each_is_judged_by_the_longer_time_to_live():
    watcher = Watcher(SETTINGS)
    sessions = session('short', beat=1, ttl=5), session('long', beat=1, ttl=40)
    fenced = {}
    for now in range(60):
        for verdict in watcher.observe(look(*sessions), now=now, everyone=True):
            fenced.setdefault(verdict.session.id, now)
    assert fenced == {'short': 21, 'long': 41}


def test_a_suspect_makes_it_look_at_everyone():
    watcher = Watcher(SETTINGS)
    assert watcher.wants_everyone(0)
    watcher.observe(look(session(beat=1)), now=0, everyone=True)
    assert not watcher.wants_everyone(1)
    watcher.observe(look(session(beat=1)), now=1, everyone=False)
    assert watcher.suspects(3) == []
    watcher.observe(look(session(beat=1)), now=3.5, everyone=False)
    assert watcher.suspects(3.5) == ['other']
    assert watcher.wants_everyone(3.5)
    watcher.observe(look(session(beat=2)), now=4, everyone=True)
    assert not watcher.wants_everyone(5)
    # Once per time to live in any case.
    assert watcher.wants_everyone(24)


def test_whoever_is_gone_is_forgotten():
    watcher = Watcher(SETTINGS)
    watcher.observe(look(session(beat=1)), now=0, everyone=True)
    watcher.observe(look(session(beat=1)), now=5, everyone=False)
    assert watcher.suspects(6)
    watcher.observe(look(), now=6, everyone=True)
    assert not watcher.suspects(7)


@given(
    gaps=st.lists(st.floats(min_value=0.0, max_value=10_000.0), max_size=200),
    beats=st.data(),
)
def test_one_that_is_seen_to_beat_in_time_is_never_judged(gaps, beats):
    watcher = Watcher(SETTINGS)
    now, beat, silent = 0.0, 1, 0.0
    for gap in gaps:
        now += gap
        silent += min(gap, 2 * SETTINGS.sweep_interval)
        if silent > SETTINGS.ttl / 2 or beats.draw(st.booleans()):
            beat, silent = beat + 1, 0.0
        assert not watcher.observe(
            look(session(beat=beat)), now=now, everyone=True
        )


def _looks(watcher: Watcher, *looks: tuple[float, int, bool]) -> list[Verdict]:
    """Looks at times, at a beat and at whether its lock is free."""
    found = []
    for now, beat, free in looks:
        seen = look(session(beat=beat))
        assert not watcher.observe(seen, now=now, everyone=True)
        found += watcher.certify(
            watcher.overdue(seen), {'other'} if free else set()
        )
    return found


def test_a_lock_that_stays_free_is_death():
    watcher = Watcher(SETTINGS)
    assert not _looks(watcher, (0, 1, False), (1, 1, True), (2, 1, True))
    assert watcher.expects_death
    [verdict] = _looks(watcher, (3, 1, True))
    assert verdict.let_go
    assert verdict.session.beat == 1


@pytest.mark.parametrize(
    'looks',
    [
        # A beat that came just now, and the next is not due.
        [(0, 1, True), (0.5, 1, True), (0.8, 1, True)],
        # It beat again, with a lock or without one.
        [(0, 1, False), (1, 1, True), (2, 2, True), (3, 2, True), (4, 2, True)],
        # It is held again.
        [(0, 1, False), (1, 1, True), (2, 1, False), (3, 1, True)],
        # Nobody looked meanwhile.
        [(0, 1, False), (1, 1, True), (3600, 1, True)],
        # Silence alone takes longer.
        [(0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False)],
    ],
)
def test_a_lock_that_was_seen_free_is_not_yet_death(looks):
    assert not _looks(Watcher(SETTINGS), *looks)


def test_whoever_has_no_lock_dies_by_silence_alone():
    watcher = Watcher(SETTINGS)
    other = dataclasses.replace(session(beat=1), lock=None)
    for now in range(10):
        watcher.observe(look(other), now=now, everyone=True)
        assert not watcher.overdue(look(other))


@given(
    looks=st.lists(
        st.tuples(st.floats(0, 10), st.booleans(), st.booleans()), max_size=60
    )
)
def test_one_that_beats_within_two_intervals_of_its_loss_is_not_dead(looks):
    """Whoever reconnects has two intervals for it, as its observer counts."""
    watcher = Watcher(SETTINGS)
    now, beat, free_since = 0.0, 1, None
    for gap, beats, free in looks:
        counted = min(gap, 1.0)
        now += gap
        if beats or (free_since is not None and free_since + counted > 1.8):
            beat, free_since = beat + 1, None
        elif not free:
            free_since = None
        elif free_since is not None:
            free_since += counted
        else:
            free_since = 0.0
        seen = look(session(beat=beat))
        watcher.observe(seen, now=now, everyone=True)
        assert not watcher.certify(
            watcher.overdue(seen), {'other'} if free else set()
        )
