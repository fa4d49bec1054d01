"""Small changes to the code, each of which breaks one promise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    """What is broken."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = 'not postgresql and not mariadb'
    """SQLite is enough to notice, and the quickest."""
    beyond_the_rig: str = ''
    """Why those who kill and disturb replicas cannot notice it."""


TURN = ('tests/turns/test_turn.py',)
FENCING = ('tests/turns/test_fencing.py', 'tests/turns/test_hold.py')
RECOVERY = ('tests/recovery/test_recovery.py',)
STORES = ('tests/stores',)
HOLD = ('tests/turns/test_hold.py',)
WATCHER = ('tests/replica/test_watcher.py',)
HEARTBEAT = ('tests/replica/test_heartbeat.py',)
LATE = ('tests/turns/test_late_saves.py',)
ADMISSION = ('tests/turns/test_admission.py',)
OUTAGES = ('tests/turns/test_outages.py',)
CANCEL = ('tests/turns/test_cancel.py',)
CROSSING = ('tests/recovery/test_crossing.py',)
CERTIFICATE = ('tests/replica/test_certificate.py',)
LIVENESS = ('tests/stores/test_liveness.py',)
AGAIN = ('tests/recovery/test_again.py',)

MUTANTS = [
    # Nothing is left behind
    Mutant(
        'the lease goes before the outcome was pushed',
        'turns/executor.py',
        'await turn.drained()',
        'await asyncio.sleep(0)',
        TURN,
    ),
    Mutant(
        'the lease goes while events are still to be saved',
        'turns/running.py',
        'if turn.has_pending and not (\n'
        '            turn.ending is Ending.RETURNED and turn.is_deaf()\n'
        '        ):',
        'if False:',
        RECOVERY,
    ),
    Mutant(
        'the lease goes while the agent goes on',
        'turns/running.py',
        'if turn.ending in (Ending.RAISED, Ending.CANCELED):\n'
        '                    self.conclude(turn)',
        'if turn.settled_for_good:\n'
        '                    self._let_go(turn, keep_token=False)',
        TURN,
    ),
    Mutant(
        'a plain answer leaves its lease behind',
        'turns/running.py',
        'if turn.ending is not Ending.RAISED:\n'
        '                self._let_go(turn, keep_token=False)',
        'return',
        TURN,
    ),
    Mutant(
        'a turn that died on a living replica stays',
        'turns/running.py',
        'self.dead_turns.adopt(turn)',
        'pass',
        (*OUTAGES, *RECOVERY),
    ),
    # A paused task is never touched
    Mutant(
        'the saved state alone decides whether a turn settled',
        'turns/marks.py',
        ') and mark_of(status) != before',
        ')',
        RECOVERY,
    ),
    Mutant(
        'pauses cannot be told apart',
        'turns/task_store.py',
        '_tell_apart(task, event, hold)\n',
        'pass\n',
        TURN,
    ),
    Mutant(
        'parked leases are acted on',
        'stores/database.py',
        'state=LeaseState.FREE.value, session_id=null(), **_NOTHING\n',
        'state=LeaseState.RUNNING.value\n',
        RECOVERY,
    ),
    Mutant(
        'an idle task of an orderly shutdown is failed',
        'recovery/claim.py',
        'was_idle=closed and claimed.previous_state is LeaseState.IDLE',
        'was_idle=False',
        RECOVERY,
    ),
    # A turn may go on after it paused
    Mutant(
        'a turn that paused is not parked',
        'turns/running.py',
        'self._move(turn, LeaseState.PARKED)',
        'pass',
        TURN,
    ),
    Mutant(
        'a parked lease does not run again',
        'turns/task_store.py',
        'await self._turns.resume(hold)',
        'pass',
        TURN,
    ),
    # The old owner is fenced
    Mutant(
        'a save never looks its lease up',
        'turns/hold.py',
        '        await self._look_up()\n',
        '        pass\n',
        FENCING,
    ),
    Mutant(
        'an old beat lets saves pass',
        'replica/session.py',
        'return not self.ended and self.silence < self._trust',
        'return not self.ended',
        FENCING,
    ),
    Mutant(
        'a version of another is built on unasked',
        'turns/hold.py',
        'return prev_version == self._own_version',
        'return True',
        FENCING,
    ),
    Mutant(
        'the loss of a session stops nothing',
        'turns/running.py',
        '            if turn.held and turn.session is session:',
        '            if False:',
        FENCING,
    ),
    Mutant(
        'the streams of a fenced replica end without an outcome',
        'handler.py',
        'async with aclosing(\n'
        '            self._follow_turn(\n'
        '                turn, context, after=local.seen',
        'return\n'
        '        async with aclosing(\n'
        '            self._follow_turn(\n'
        '                turn, context, after=local.seen',
        FENCING,
    ),
    Mutant(
        'the token is not checked',
        'stores/database.py',
        'return and_(self._of(service, task_id), self._leases.c.token == token)',
        'return self._of(service, task_id)',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        'a claim keeps the token',
        'stores/database.py',
        '(leases.c.token, leases.c.token + 1),',
        '(leases.c.token, leases.c.token),',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    # A terminal state never changes
    Mutant(
        'a terminal state is written over',
        'turns/hold.py',
        'or prev_version == self._final_version',
        'or False',
        TURN,
    ),
    # One abandonment, one outcome
    Mutant(
        'FAILED is written without its event',
        'recovery/recovery.py',
        'reason=reason)\n        await manager.save_task_event(event)\n',
        'reason=reason)\n        task.status.CopyFrom(event.status)\n'
        '        await self._task_store.save(task, event=None, prev=task, '
        'prev_version=manager.current_version, '
        'context=with_hold(self._codec.load(lease.call_context), claim))\n',
        RECOVERY,
    ),
    Mutant(
        'FAILED is not pushed',
        'recovery/recovery.py',
        'await self._push.send_outcome(lease.task_id, event)\n'
        "        await self._release(claim, 'It ended",
        "await self._release(claim, 'It ended",
        RECOVERY,
    ),
    Mutant(
        'what had settled is not pushed again',
        'recovery/recovery.py',
        'await self._push.send_outcome(lease.task_id, outcome_event(task))',
        'pass',
        RECOVERY,
    ),
    Mutant(
        'an exception of the agent is not pushed',
        'turns/running.py',
        'await self.push.send_outcome(task.id, outcome)',
        'pass',
        TURN,
    ),
    Mutant(
        'a deleted task is made again',
        'recovery/recovery.py',
        'if claim.lease.task_stored:\n            return False\n',
        'if False:\n            return False\n',
        RECOVERY,
    ),
    Mutant(
        'more are recovered at once than the limit says',
        'recovery/recovery.py',
        'limit=room,',
        'limit=1000,',
        RECOVERY,
    ),
    # The living are not declared dead
    Mutant(
        'others are judged without an own beat',
        'replica/heartbeat.py',
        'if beat is Beat.RENEWED:',
        'if True:',
        HEARTBEAT,
    ),
    Mutant(
        'time that nobody watched counts',
        'replica/watcher.py',
        'min(seen.gap, 2 * self._settings.sweep_interval)',
        'seen.gap',
        WATCHER,
    ),
    Mutant(
        'wall clocks are compared',
        'replica/watcher.py',
        'if seen.silence > max(self._settings.ttl, session.ttl):',
        'if session.expires_at.timestamp() < __import__("time").time():',
        WATCHER,
    ),
    Mutant(
        "another replica's longer time to live is not respected",
        'replica/watcher.py',
        'max(self._settings.ttl, session.ttl)',
        'self._settings.ttl',
        WATCHER,
    ),
    Mutant(
        'a session is fenced whatever its counter says',
        'stores/database.py',
        'self._sessions.c.beat == beat\n',
        'self._sessions.c.beat >= 0\n',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        'fencing queues behind a lock',
        'stores/dialect.py',
        "await connection.execute(text('PRAGMA busy_timeout = 50'))",
        "await connection.execute(text('PRAGMA busy_timeout = 60000'))",
        ('tests/stores/test_database.py',),
    ),
    Mutant(
        'a session that ended is renewed',
        'stores/database.py',
        '                sessions.c.id == session_id,\n'
        '                sessions.c.state == SessionState.OPEN.value,\n'
        '            )\n            .values(\n                beat=',
        '                sessions.c.id == session_id,\n'
        '            )\n            .values(\n                beat=',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        'one failed beat is taken for the loss of the session',
        'replica/heartbeat.py',
        'return Beat.UNKNOWN\n        if landed.renewal is None:',
        'landed = None\n        if landed is None:',
        HEARTBEAT,
    ),
    Mutant(
        'a beat without an answer is awaited for ever',
        'replica/line.py',
        'within = until - self._clock.monotonic()',
        'within = 3600',
        HEARTBEAT,
    ),
    Mutant(
        'a stream takes an old reading of the task for the newest',
        'turns/following.py',
        'self._last is not None or isinstance(event, Task)',
        'self._last is not None',
        ('tests/turns/test_following.py',),
    ),
    Mutant(
        'a beat keeps its row locked until its commit',
        'stores/database.py',
        'self._transaction(renew, engine=self._beating)',
        'self._transaction(renew)',
        STORES,
        only='whole_before',
    ),
    Mutant(
        'a fork takes a transaction along',
        'replica/heartbeat.py',
        'if heartbeat.in_round.acquire(timeout=_LONGEST_ROUND)',
        'if False',
        HEARTBEAT,
        only='fork and sqlite',
    ),
    # Saves outlast outages
    Mutant(
        'a save that landed is doubled',
        'turns/saving.py',
        'return stored.version.is_after(prev_version) and _content(',
        'return False and _content(',
        OUTAGES,
    ),
    Mutant(
        'a lost connection ends the turn',
        'turns/saving.py',
        'if not is_outage(error) or met == tries:\n                raise\n'
        '            logger.warning(',
        'if True:\n                raise\n            logger.warning(',
        OUTAGES,
    ),
    Mutant(
        "a driver's own error counts as one that stays",
        'outage.py',
        'if not kinds & _DRIVER_ERRORS:',
        'if not isinstance(error, DBAPIError):',
        OUTAGES,
        only='server_kills and mariadb',
    ),
    Mutant(
        "a server's general error counts as one that stays",
        'outage.py',
        'if isinstance(code, int):',
        "if isinstance(code, int) and not hasattr(original, 'sqlstate'):",
        OUTAGES,
        only='number_of_mysql',
    ),
    Mutant(
        'a session is closed in one try, or not',
        'replica/heartbeat.py',
        'timeout=self._settings.stop_timeout,\n                )\n',
        'timeout=0,\n                )\n',
        HEARTBEAT,
    ),
    Mutant(
        'a hand-over lands in one try, or not',
        'outage.py',
        'if loop.time() + pause >= until:',
        'if True:',
        HEARTBEAT,
    ),
    Mutant(
        'a lost connection ends a subscription',
        'turns/event_stream.py',
        'if not is_outage(error):',
        'if True:',
        OUTAGES,
    ),
    Mutant(
        "the flush of a user's answer ends a subscription",
        'turns/event_stream.py',
        'if known and _is_flush(event):',
        'if False:',
        ('tests/conversations',),
        only='pause and answered and JSONRPC',
    ),
    Mutant(
        'a beat on SQLite waits for the write lock as long as the server',
        'stores/database.py',
        "event.listen(engine.sync_engine, 'connect', _wait_briefly)",
        'pass',
        ('tests/stores/test_database.py',),
        only='gives_up_the_write_lock',
    ),
    Mutant(
        'a client waits for ever for a task that never was',
        'handler.py',
        'lost.cancel()\n            await stop({call})',
        'lost.cancel(); call.cancel(); await asyncio.wait({call})',
        FENCING,
        only='never_was and sqlite',
    ),
    # One turn at a time
    Mutant(
        'a running lease is acquired',
        'stores/database.py',
        'or_(leases.c.state.in_(_ACQUIRABLE), ~holder_lives),\n',
        '',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        'a message that waited too long is delivered',
        'turns/admission.py',
        '            if left <= 0:\n                break',
        '            if left <= 0:\n                return lease',
        ADMISSION,
    ),
    Mutant(
        'a message that names its task only gets a new context',
        'handler.py',
        'if not message.task_id or message.context_id:',
        'if True:',
        ADMISSION,
    ),
    # Attempts count crashes
    Mutant(
        'an orderly shutdown counts as a crash',
        'stores/database.py',
        'lease.state is LeaseState.RUNNING and not _is_closed(session)',
        'lease.state is LeaseState.RUNNING',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        "the claimer's own death counts as a crash",
        'stores/database.py',
        'leases.c.state == LeaseState.RUNNING.value,\n'
        '                leases.c.session_id.in_(crashed_in),',
        'leases.c.session_id.in_(crashed_in),',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    Mutant(
        'whoever held a freed lease takes it up again',
        'stores/database.py',
        'held = and_(held, self._leases.c.session_id.is_not(None))',
        'pass',
        STORES,
        only='DatabaseLeaseStore and sqlite',
    ),
    # Owners stay owners
    Mutant(
        "recovery acts without the owner's context",
        'recovery/recovery.py',
        'context = with_hold(self._codec.load(lease.call_context), claim)\n'
        '        manager',
        'context = with_hold(__import__("a2a.server.context").server.context'
        '.ServerCallContext(), claim)\n        manager',
        RECOVERY,
    ),
    Mutant(
        'an owner that does not survive is found out in a crash',
        'handler.py',
        'raise InternalError(message=str(error)) from error',
        "kept, owner = b'{}', ''",
        ADMISSION,
    ),
    # Cancels
    Mutant(
        'a cancel through another replica is not told',
        'handler.py',
        'if await self.lease_store.request_cancel(self.service, task.id):',
        'if False:',
        CANCEL,
    ),
    Mutant(
        'a cancel waits for an agent that ignores it',
        'handler.py',
        'await asyncio.wait({call}, timeout=self.settings.stop_timeout)\n'
        '        finally:\n            # It waits',
        'await asyncio.wait({call})\n        finally:\n            # It waits',
        CANCEL,
    ),
    # Shutdown
    Mutant(
        'beats stop when the draining begins',
        'handler.py',
        'self._admission.close()\n        if not self._replica.started:',
        'self._admission.close()\n'
        '        await self._replica.close(timeout=1)\n'
        '        if not self._replica.started:',
        ('tests/processes/test_shutdown.py',),
        only='in_time and sqlite',
    ),
    Mutant(
        'SIGTERM does not begin the draining',
        'shutdown.py',
        'self._loop.call_soon_threadsafe(self._begin)',
        'pass',
        ('tests/processes/test_shutdown.py',),
        only='within_a_sweep and sqlite',
    ),
    Mutant(
        'a replica that drains takes new messages',
        'handler.py',
        '    async def _drain(self, timeout: float | None) -> None:\n'
        '        self._admission.close()\n',
        '    async def _drain(self, timeout: float | None) -> None:\n',
        ('tests/turns/test_drain.py',),
    ),
    Mutant(
        'a free lease is handed over',
        'stores/database.py',
        "                {'session_id': session_id},\n"
        '                self._leases.c.session_id.is_not(None),\n',
        "                {'session_id': session_id},\n",
        STORES,
    ),
    Mutant(
        'a replica that starts gives up at once',
        'replica/heartbeat.py',
        'if not left or self._stopping:',
        'if True:',
        HEARTBEAT,
    ),
    Mutant(
        'a start whose answer was lost leaves a session behind',
        'replica/heartbeat.py',
        'self._opening or LiveSession(',
        'LiveSession(',
        HEARTBEAT,
    ),
    Mutant(
        'a turn that does not stop is handed over',
        'handler.py',
        '        if not stuck and saved:\n',
        '        if True:\n',
        ('tests/processes/test_shutdown.py',),
        only='does_not_stop and sqlite',
    ),
    # Running again
    Mutant(
        'a turn runs again without a save of its own before',
        'recovery/recovery.py',
        '            await manager.save_task_event(event)\n'
        '            claim.told = event\n'
        '        if not await self._store.move(',
        '            claim.told = event\n'
        '        if not await self._store.move(',
        AGAIN,
    ),
    Mutant(
        'the budget is one attempt larger',
        'recovery/policy.py',
        'if lease.attempt > self._max_attempts:',
        'if lease.attempt > self._max_attempts + 1:',
        AGAIN,
    ),
    Mutant(
        'a turn that died here costs no attempt',
        'stores/database.py',
        'attempt=self._leases.c.attempt + 1,',
        'attempt=self._leases.c.attempt,',
        (*STORES, *AGAIN),
    ),
    Mutant(
        'the agent sees the task as recovery left it',
        'turns/executor.py',
        'context.current_task = turn.again.as_it_began(task)',
        'pass',
        AGAIN,
    ),
    Mutant(
        'push credentials are stored with the request',
        'turns/record.py',
        "kept.configuration.ClearField('task_push_notification_config')",
        'pass',
        AGAIN,
    ),
    Mutant(
        'a request is stored though nothing runs again',
        'recovery/policy.py',
        'may_run_again = False',
        'may_run_again = True',
        AGAIN,
    ),
    Mutant(
        'a request of any size is stored',
        'turns/admission.py',
        'if record.size <= self._settings.request_limit:',
        'if True:',
        AGAIN,
    ),
    Mutant(
        'a zombie saves a checkpoint',
        'stores/database.py',
        '                self._with(service, task_id, token),\n'
        '                self._leases.c.session_id.is_not(None),\n'
        '            )\n'
        '            .values(checkpoint=',
        '                self._of(service, task_id),\n'
        '                self._leases.c.session_id.is_not(None),\n'
        '            )\n'
        '            .values(checkpoint=',
        STORES,
    ),
    Mutant(
        'a paused task keeps the request of its last turn',
        'stores/database.py',
        "values |= {'session_id': null(), **_NOTHING}",
        "values |= {'session_id': null()}",
        STORES,
    ),
    Mutant(
        'a task event is repeated',
        'turns/event_queue.py',
        'return _changes(event, known or Task(), record.message)',
        '        return [event]',
        AGAIN,
    ),
    Mutant(
        'a plain message does not end a task that runs again',
        'turns/event_queue.py',
        'if isinstance(event, Message) and first:',
        'if False:',
        AGAIN,
    ),
    Mutant(
        'a turn runs again beside its run before',
        'recovery/recovery.py',
        'if not await self._has_stopped(claim):',
        'if False:',
        AGAIN,
    ),
    Mutant(
        'a suspected turn runs beside others',
        'recovery/room.py',
        'self._is_empty if apart else self._has_place',
        'self._has_place',
        ('tests/recovery/test_room.py',),
    ),
    Mutant(
        'others begin beside a suspected turn',
        'recovery/room.py',
        '            and not self._apart\n',
        '',
        ('tests/recovery/test_room.py',),
    ),
    Mutant(
        'what was saved but not published is missing on a stream',
        'turns/following.py',
        'if is_taken_over(event):',
        'if False:',
        AGAIN,
    ),
    Mutant(
        'a turn that was handed over waits',
        'recovery/claim.py',
        'claim.waited = claimed.given_back',
        'claim.waited = False',
        AGAIN,
    ),
    Mutant(
        'the silence of an agent is not noticed',
        'turns/running.py',
        'return now - since > limit',
        'return False',
        AGAIN,
    ),
    Mutant(
        'a pause counts as silence',
        'turns/running.py',
        'or turn.state is not LeaseState.RUNNING\n            or turn',
        'or turn',
        AGAIN,
    ),
    Mutant(
        'a replica that drains keeps what waits to run again',
        'handler.py',
        'await self._recovery.give_back()',
        'pass',
        AGAIN,
    ),
    Mutant(
        'a stream ends with the error of the lost turn',
        'turns/following.py',
        'if self._is_of_its_turn():',
        'if True:',
        ('tests/turns/test_following.py',),
    ),
    Mutant(
        'a client that waits for a resumed turn gets the old pause',
        'handler.py',
        'if stored is None or not lease_settled(stored.task, turn.lease):',
        'if stored is None or not ends_stream(stored.task):',
        AGAIN,
    ),
    Mutant(
        'the first save of a turn that runs again asks',
        'turns/hold.py',
        'self.hold(lease, other.session)\n        self._own_version = version',
        'self.hold(lease, other.session)',
        AGAIN,
    ),
    Mutant(
        'a decision that is none leaves the task alone',
        'recovery/recovery.py',
        'elif isinstance(decision, Leave):',
        'elif True:',
        ('tests/turns/test_parts.py',),
    ),
    Mutant(
        'a second signal changes nothing',
        'shutdown.py',
        'self._hurried.set()',
        'pass',
        ('tests/processes/test_shutdown.py',),
        only='second and sqlite',
    ),
    # What lands late
    Mutant(
        'nobody looks back at a save that landed late',
        'turns/running.py',
        'if landed and not (turn.loss is None and turn.session.fresh()):',
        'if False:',
        LATE,
    ),
    Mutant(
        'a drain does not wait for a save under way',
        'handler.py',
        'saved = await self._turns.wait_until_saved(timeout=stop_timeout)',
        'saved = True',
        LATE,
    ),
    Mutant(
        'what an agent left running saves unasked',
        'turns/turn.py',
        'return self.idle or self.over',
        'return False',
        LATE,
    ),
    Mutant(
        'a slow push makes a turn that raised a dead one',
        'turns/running.py',
        '            or self.push.is_sending(task_id)\n',
        '',
        TURN,
    ),
    Mutant(
        'a slow database makes a turn that raised a dead one',
        'turns/running.py',
        '            or task_id in self._at_work\n',
        '',
        TURN,
    ),
    Mutant(
        'a checkpoint is stored before what it stands for',
        'turns/turn.py',
        'if not await self._emitted_is_saved() and not self.settled_for_good:',
        'if False:',
        TURN,
    ),
    Mutant(
        'the lease of a canceled task goes before its push',
        'turns/running.py',
        'await asyncio.gather(\n'
        '            self._tell_canceled(turn.lease.task_id, turn.context),\n'
        '            self._stop_agent(turn),\n'
        '        )\n',
        'self.spawn(\n'
        '            self._tell_canceled(turn.lease.task_id, turn.context)\n'
        '        )\n'
        '        await self._stop_agent(turn)\n',
        CANCEL,
    ),
    Mutant(
        'a client that polls keeps a dead turn alive',
        'turns/task_store.py',
        'if isinstance(hold, Turn)\n            else nullcontext()',
        'if True\n            else nullcontext()',
        RECOVERY,
    ),
    Mutant(
        'a stream misses a cancel that took the version of another save',
        'turns/following.py',
        'if stored is not None and is_terminal(stored.task):',
        'if False:',
        CANCEL,
    ),
    Mutant(
        'an idle turn that settles after all keeps its lease',
        'turns/running.py',
        'if turn.idle and not turn.over:',
        'if False:',
        LATE,
    ),
    Mutant(
        'an acquire that landed after all is kept',
        'turns/admission.py',
        '            if unknown is not None:\n                # It may',
        '            if False:\n                # It may',
        ADMISSION,
    ),
    Mutant(
        'a drain does not wait for an acquire under way',
        'handler.py',
        'await self._admission.wait_until_settled(timeout=stop_timeout)',
        'pass',
        ADMISSION,
    ),
    Mutant(
        'a cancel is forgotten as its turn pauses',
        'stores/database.py',
        'held = and_(held, self._leases.c.cancel_requested.is_(False))',
        'pass',
        (*STORES, *CANCEL),
    ),
    Mutant(
        'nobody pushes the cancel of an idle task',
        'stores/database.py',
        '                    self._leases.c.state != LeaseState.IDLE.value,\n'
        '                )\n'
        '                .values(cancel_requested=True)',
        '                )\n                .values(cancel_requested=True)',
        (*STORES, *CANCEL),
    ),
    Mutant(
        'a cancel that nobody told of is dropped with a parked lease',
        'stores/database.py',
        '                    leases.c.cancel_requested.is_(False),\n'
        '                )\n'
        '                .values(\n',
        '                )\n                .values(\n',
        STORES,
    ),
    Mutant(
        'a look at a task elsewhere gives up in an outage',
        'turns/following.py',
        'task_store, task_id, context, permit=always\n        )',
        'task_store, task_id, context, permit=always, tries=1\n        )',
        OUTAGES,
        only='subscription_elsewhere and postgresql',
    ),
    Mutant(
        'a zombie runs its own task again beside itself',
        'recovery/recovery.py',
        'if not await self._turns.wait_gone(',
        'if False and not await self._turns.wait_gone(',
        AGAIN,
    ),
    Mutant(
        'a session that is over still permits saves',
        'turns/hold.py',
        'or (may_be_acquired and stored.state is not LeaseState.IDLE)',
        '',
        HOLD,
    ),
    Mutant(
        'a message takes the place of a turn that is to run again',
        'turns/admission.py',
        'return may_be_acquired and not runs_again',
        'return may_be_acquired',
        CROSSING,
        only='sqlite and takes_not_the_place',
    ),
    Mutant(
        'a message that lost a race waits before the re-run',
        'turns/executor.py',
        '            turn.send_back()\n',
        '            await asyncio.sleep(60)\n',
        CROSSING,
        only='sqlite and lost_a_race',
    ),
    Mutant(
        'two messages pass at once for one task',
        'turns/running.py',
        'elif self._is_reserved(task_id):',
        'elif False:',
        CROSSING,
        only='sqlite and behind_another',
    ),
    Mutant(
        'a stream goes on after what was saved but not shown',
        'turns/following.py',
        'version = self._turn.shown.version_of(self._last)',
        'version = self._turn._own_version',
        CROSSING,
        only='sqlite and stuck',
    ),
    Mutant(
        'a stream waits for a turn that ended without a word',
        'turns/following.py',
        '        if await self._goes_on():\n            return False',
        '        if True:\n            return False',
        CROSSING,
        only='sqlite and without_an_event',
    ),
    Mutant(
        'a client of a task that is yet to be stored is told that it is gone',
        'turns/following.py',
        '        if await self._goes_on():\n            return False',
        '        if await self._goes_on() and stored is not None:\n'
        '            return False',
        AGAIN,
        only='sqlite and yet_to_be',
    ),
    Mutant(
        'a run that never begins is tried for ever',
        'recovery/recovery.py',
        '                await self._count_as_run(claim, turn, error)\n',
        '                raise error\n',
        CROSSING,
        only='sqlite and never_begins',
    ),
    Mutant(
        'a webhook holds up the turn that runs again',
        'recovery/recovery.py',
        "        self._log(claim, 'It runs again', warn=True)\n",
        "        self._log(claim, 'It runs again', warn=True)\n"
        '        await pushing\n',
        CROSSING,
        only='sqlite and webhook_does_not',
    ),
    Mutant(
        'webhooks are told out of order',
        'turns/push_sender.py',
        'async with self._order.setdefault(task_id, asyncio.Lock()):',
        'async with asyncio.Lock():',
        CROSSING,
        only='sqlite and webhook_does_not',
    ),
    Mutant(
        'a hand-over waits for the slowest agent',
        'handler.py',
        '{t.lease.task_id: t.lease.token for t in stopped}',
        '{t.lease.task_id: t.lease.token for t in stopped if False}',
        CROSSING,
        only='sqlite and stubborn_neighbour',
    ),
    Mutant(
        'what is about to run again is not handed over',
        'recovery/recovery.py',
        '            await asyncio.wait(left, timeout=timeout)\n        return',
        '            pass\n        return',
        CROSSING,
        only='sqlite and about_to_run',
    ),
    Mutant(
        'a delayed turn takes no place',
        'recovery/recovery.py',
        'self._room.left - self._pending',
        'self._room.left',
        CROSSING,
        only='sqlite and delayed',
    ),
    Mutant(
        'checkpoints overtake each other',
        'turns/turn.py',
        '        async with self._checkpointing:\n',
        '        async with asyncio.Lock():\n',
        CROSSING,
        only='last_checkpoint',
    ),
    Mutant(
        'a canceled read keeps an SQLite file locked',
        'turns/stopping.py',
        'traceback.clear_frames(raised.__traceback__)',
        'pass',
        ('tests/turns/test_stopping.py',),
        only='',
    ),
    Mutant(
        'a replica takes back what it hands over',
        'recovery/recovery.py',
        'if self._turns.handing_over:',
        'if False:',
        CROSSING,
        only='sqlite and takes_not_back',
    ),
    Mutant(
        'a subscription stays where its task has paused',
        'turns/running.py',
        '            gone.set()\n        self._signal(task_id)\n',
        '            gone.set()\n',
        ('tests/turns/test_following.py',),
        only='sqlite and pauses',
    ),
    Mutant(
        'a slow reader is left behind',
        'turns/following.py',
        '                    until = _after(_LINGER)\n                self._last',
        '                    pass\n                self._last',
        ('tests/turns/test_following.py',),
        only='still_come',
    ),
    Mutant(
        'a stream brings the next turn twice',
        'turns/following.py',
        'if version is None and (\n                        self._last',
        'if False and (\n                        self._last',
        ('tests/turns/test_following.py',),
        only='slow_reader',
    ),
    Mutant(
        'a cancel among the last words keeps the lease',
        'turns/executor.py',
        'canceled = True\n                turn.ending = Ending.CANCELED',
        'canceled = True\n                turn.ending = Ending.RETURNED',
        ('tests/turns/test_cancel.py',),
        only='sqlite and last_words',
    ),
    Mutant(
        'a paused task fails since it cannot be read',
        'turns/task_store.py',
        'isinstance(hold, Turn) and not hold.held and is_queued(context)',
        'False',
        OUTAGES,
        only='sqlite and cannot_be_read',
    ),
    Mutant(
        'a task that was canceled as a message acquired keeps its lease',
        'turns/running.py',
        '                await self._set(\n                    lease,\n'
        '                    context,\n'
        '                    LeaseState.FREE if paused else '
        'LeaseState.IDLE,\n                )\n',
        '                await self.store.move(\n'
        '                    self.service,\n'
        '                    lease.task_id,\n'
        '                    token=lease.token,\n'
        '                    state=LeaseState.FREE\n'
        '                )\n',
        ('tests/turns/test_admission.py',),
        only='sqlite and let_go',
    ),
    Mutant(
        'an exception just after a pause leaves its task as it was',
        'turns/running.py',
        'turn.ending is Ending.RETURNED and turn.is_deaf()',
        'turn.is_deaf()',
        TURN,
        only='slow_pause',
    ),
    Mutant(
        'a lease waits for what is never saved',
        'turns/running.py',
        'and not turn.over\n                and self._is_left',
        'and not turn.settled\n                and self._is_left',
        ('tests/turns/test_turn.py',),
        only='sqlite and never_saved',
    ),
    Mutant(
        'a lease goes while its turn waits to go on',
        'turns/task_store.py',
        '            with self._turns.at_work(task.id):\n'
        '                if goes_on:\n'
        '                    await self._turns.resume(hold)\n',
        '            if goes_on:\n'
        '                await self._turns.resume(hold)\n'
        '            with self._turns.at_work(task.id):\n',
        ('tests/simulation',),
        only='41484',
    ),
    Mutant(
        'that a turn runs again is told as often as an outage comes',
        'recovery/recovery.py',
        'elif claim.told is None:',
        'else:',
        CROSSING,
        only='sqlite and told_once',
    ),
    Mutant(
        'a cancel keeps to the turn that it met first',
        'turns/running.py',
        '            return met\n\n        latest()',
        '            return first\n\n        first = self.of(task_id)\n'
        '        latest()',
        ('tests/simulation',),
        only='2000168',
    ),
    Mutant(
        'a claim whose answer was lost is forgotten',
        'recovery/recovery.py',
        '        except Exception:\n'
        '            self._may_have_claimed = True\n'
        '            raise\n'
        '        for one',
        '        for one',
        RECOVERY,
        only='sqlite and without_an_answer',
    ),
    Mutant(
        'a task that is taken up is left when an answer is lost',
        'recovery/recovery.py',
        'found.acquire_id == acquire_id',
        'found.acquire_id == 0',
        RECOVERY,
        only='sqlite and taken_up',
    ),
    Mutant(
        'a recovery that died hides how the turn ended',
        'stores/database.py',
        'leases.c.previous_session_id.is_not(None),\n            )\n'
        '            closed',
        'leases.c.previous_session_id.is_(None),\n            )\n'
        '            closed',
        STORES,
        only='sqlite and in_between_hides',
    ),
    Mutant(
        'a lease is parked before its pause is pushed',
        'turns/running.py',
        'turn.parks = True',
        'self._move(turn, LeaseState.PARKED)',
        TURN,
        only='sqlite and once_the_pause_is_pushed',
    ),
    Mutant(
        'an agent begins on a replica that may be dead',
        'turns/executor.py',
        'while not turn.session.fresh():',
        'while False:',
        FENCING,
        only='sqlite and sure_to_live',
    ),
    Mutant(
        'that a task was canceled is forgotten in an outage',
        'outage.py',
        '            if not is_outage(error):\n                raise\n'
        "            logger.debug('A call",
        "            raise\n            logger.debug('A call",
        CANCEL,
        only='sqlite and through_an_outage',
    ),
    Mutant(
        'a stream breaks since a later message was refused',
        'turns/following.py',
        'return not self._over.is_set() or turn.ending is Ending.RAISED',
        'return True',
        ('tests/simulation',),
        only='5003065',
    ),
    Mutant(
        'a cancel finds a turn dead that has just raised',
        'turns/event_queue.py',
        'if turn.ending is None and not turn.settled_for_good',
        'if not turn.settled_for_good',
        ('tests/simulation',),
        only='5003966',
    ),
    Mutant(
        'a cancel whose save landed late is told by nobody',
        'turns/call_context.py',
        'except Exception:\n        if isinstance(state, _HoldingState)',
        'except BaseException:\n        if isinstance(state, _HoldingState)',
        ('tests/simulation',),
        only='6005306',
    ),
    Mutant(
        'a client that waits gets a task that has gone on',
        'handler.py',
        'if stored is None or not rests or ends_stream(stored.task):',
        'if True:',
        ('tests/simulation',),
        '11000095',
    ),
    Mutant(
        'a cancel of what is recovered leaves its lease',
        'recovery/claim.py',
        'def canceled(self)',
        'def is_canceled(self)',
        ('tests/simulation',),
        'found_stays_away',
    ),
    # A process that dies lets go of its lock
    Mutant(
        'a lock that is free for a moment is death',
        'replica/watcher.py',
        'if seen.let_go_for >= 1.9 * session.heartbeat_interval:',
        'if seen.let_go_for >= 0.0:',
        WATCHER,
    ),
    Mutant(
        'a gap between looks counts whole for a free lock',
        'replica/watcher.py',
        'min(seen.gap, session.heartbeat_interval)',
        'seen.gap',
        WATCHER,
    ),
    Mutant(
        'a lock is looked at though the beat is not due',
        'replica/watcher.py',
        'if seen.silence >= 0.9 * session.heartbeat_interval:',
        'if seen.silence >= 0.0:',
        WATCHER,
    ),
    Mutant(
        'a free lock is no death',
        'replica/heartbeat.py',
        'verdicts += await self._certified(look, now)',
        '',
        CERTIFICATE,
    ),
    Mutant(
        'a lock of another server is believed',
        'replica/heartbeat.py',
        'and session.lock.server == mine.server',
        '',
        CERTIFICATE,
    ),
    Mutant(
        'whose own connection broke believes a lock',
        'replica/heartbeat.py',
        'or now - self._line.broke_at < self._settings.ttl',
        '',
        CERTIFICATE,
    ),
    Mutant(
        'a store that was given up lets go before the next beat',
        'replica/line.py',
        'if self.lock is not None:\n            # Closing',
        'if False:\n            # Closing',
        CERTIFICATE,
    ),
    Mutant(
        'a lock goes while a beat that tells of it may land',
        'replica/line.py',
        'if all(beat.done() for beat in each.beats)',
        '',
        CERTIFICATE,
    ),
    Mutant(
        'a lock keeps its name on another connection',
        'stores/liveness.py',
        "named = f'a2a-lease {session_id} {number}'",
        "named = f'a2a-lease {session_id}'",
        LIVENESS,
        'another_one and not mariadb',
    ),
    Mutant(
        'a lock behind a pooler is believed',
        'stores/liveness.py',
        "return f'postgresql {started}' if told == pid else None",
        "return f'postgresql {started}'",
        LIVENESS,
        'pooler',
    ),
    Mutant(
        'a beat goes past the connection that has the lock',
        'stores/database.py',
        'if holder is not None:',
        'if False:',
        LIVENESS,
        'without_its_lock',
    ),
    Mutant(
        'a beat without an answer is not sent again',
        'replica/line.py',
        'landed = await self._landed(newest, within=self._soon)',
        'landed = await self._landed(newest, within=3600)',
        ('tests/replica/test_connections.py',),
        'half_open and postgresql',
    ),
    Mutant(
        'a lock of the process goes with a beat that fails',
        'replica/line.py',
        'return lock is not None and lock.of_connection',
        'return lock is not None',
        CERTIFICATE,
    ),
    Mutant(
        'a beat that waits is given up for good',
        'replica/line.py',
        '_PATIENCE = 3',
        '_PATIENCE = 1',
        CERTIFICATE,
    ),
    Mutant(
        'a beat waits for a look',
        'replica/heartbeat.py',
        'meanwhile=self._beat',
        'meanwhile=None',
        CERTIFICATE,
    ),
    Mutant(
        'a fork holds the lock of its parent',
        'stores/liveness.py',
        'locks.forget()',
        'pass',
        LIVENESS,
        'fork',
    ),
    Mutant(
        'a server that restarted is the same',
        'stores/liveness.py',
        "return f'postgresql {started}' if told == pid else None",
        "return 'postgresql' if told == pid else None",
        LIVENESS,
        'restarted',
    ),
    Mutant(
        'a session in an unknown state counts as ended',
        'stores/database.py',
        'sessions.c.id.is_(None),\n                        sessions.c.state.in_(_ENDED)',
        "sessions.c.id.is_(None),\n                        sessions.c.state != 'open'",
        STORES,
        only='sqlite and session_in_an_unknown',
    ),
    Mutant(
        'one row that cannot be read hides the others',
        'stores/database.py',
        "logger.warning('A row is left out: %s', error)",
        'raise',
        STORES,
        only='sqlite and unknown_state',
    ),
]
