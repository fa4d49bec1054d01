"""Clients that want something done, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from a2a.client import Client, ClientConfig, create_client
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)

from a2a_lease.demo.local_http import local_client
from a2a_lease.turns.marks import INTERRUPTED, TERMINAL
from chaos.soak.fleet import TTL, Fleet, Life
from support.cluster import Heard, listen, make_request


_PATIENT = 3 * TTL
"""Seconds without an event after which a client looks whether to go on."""
_LINGERS = 20.0
"""Seconds in which streams end once their task has."""
_NOBODY_GOES_ON = 15.0
"""Seconds after which a login that nobody goes on from stays one."""
SCRIPTS = {
    'count': (8, ['task; working; tick {n} {s}; complete']),
    'once': (3, ['note once; task; working; tick {n} {s}; complete']),
    'ask': (
        4,
        ['task; working; tick 2 {s}; input', 'working; tick {n} {s}; complete'],
    ),
    'login': (
        2,
        ['task; working; auth; sleep {s}; working; tick {n} {s}; complete'],
    ),
    'message': (1, ['message hello']),
    'raise': (1, ['task; working; tick 2 {s}; raise']),
    'block': (
        1,
        ['task; working; tick 2 {s}; block {b}; tick {n} 0; complete'],
    ),
    'hog': (1, ['task; working; tick 2 {s}; hog 2; tick {n} {s}; complete']),
    'poison': (0.3, ['task; working; tick 1 {s}; oom']),
}
"""What is asked for, how often, and in how many messages."""


@dataclass(eq=False)
class Request:
    """One of them."""

    life: Life
    kind: str
    heard: Heard
    hung_up: bool = False

    @property
    def error(self) -> Exception | None:
        """What it ended with."""
        return self.heard.error


@dataclass(eq=False)
class Errand:
    """What one client wants."""

    kind: str
    user: str
    count: int
    webhook: bool
    requests: list[Request] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """The ids of its messages that are in the task."""
    task_id: str = ''
    context_id: str = ''
    canceled: bool = False
    cancels: list[Life] = field(default_factory=list)


class Customers:
    """Several clients, one errand of each at a time."""

    def __init__(
        self,
        fleet: Fleet,
        webhook: str,
        chance: random.Random,
        take: Callable[[Errand], None],
    ) -> None:
        """Takes whom to ask, and who looks at what came of it."""
        self._fleet = fleet
        self._webhook = webhook
        self._chance = chance
        self._take = take
        self.counts: Counter[str] = Counter()
        self.under_way: set[Errand] = set()
        self.closing = False
        self._http: dict[str, Any] = {}
        self._clients: dict[tuple[int, str, bool], Client] = {}

    async def close(self) -> None:
        """Closes all connections."""
        for http in self._http.values():
            await http.aclose()

    async def serve(self) -> None:
        """Runs errands until it is closing."""
        while not self.closing:
            errand, scripts = self._new()
            self.under_way.add(errand)
            try:
                await self._run(errand, scripts)
            finally:
                self.under_way.discard(errand)
            self._take(errand)

    def _new(self) -> tuple[Errand, list[str]]:
        weights = [weight for weight, _ in SCRIPTS.values()]
        [kind] = self._chance.choices(list(SCRIPTS), weights)
        count = self._chance.randint(3, 12)
        values = {
            'n': count,
            's': round(self._chance.uniform(0.02, 0.6), 2),
            'b': round(self._chance.uniform(0.5, 1.5 * TTL), 1),
        }
        self.counts[f'errands: {kind}'] += 1
        return (
            Errand(
                kind,
                user=f'user{self._chance.randrange(5)}',
                count=count,
                webhook=self._chance.random() < 0.5,
            ),
            [script.format(**values) for script in SCRIPTS[kind][1]],
        )

    async def _run(self, errand: Errand, scripts: list[str]) -> None:
        beside: list[asyncio.Task[None]] = []
        if self._chance.random() < 0.3:
            beside.append(asyncio.create_task(self._listen_too(errand)))
        if self._chance.random() < 0.1:
            beside.append(asyncio.create_task(self._cancel(errand)))
        try:
            for script in scripts:
                await self._say(errand, script)
                if not errand.task_id:
                    return
                task = await self._until_it_rests(errand)
                if task.status.state in TERMINAL:
                    return
        finally:
            if errand.task_id:
                await asyncio.wait(beside, timeout=_LINGERS) if beside else None
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    # Who answers.

    async def _somebody(self) -> Life:
        while not (serving := self._fleet.serving()):
            await asyncio.sleep(0.1)
        return self._chance.choice(serving)

    async def client(
        self, life: Life, user: str, *, streaming: bool = True
    ) -> Client:
        """Returns a client of a replica."""
        key = life.number, user, streaming
        if key not in self._clients:
            if user not in self._http:
                self._http[user] = local_client(
                    timeout=60.0, headers={'x-user': user}
                )
            self._clients[key] = await create_client(
                self._fleet.url(life),
                ClientConfig(
                    streaming=streaming, httpx_client=self._http[user]
                ),
            )
        return self._clients[key]

    async def _ask(
        self,
        errand: Errand,
        kind: str,
        make: Callable[[Client], AsyncIterator[StreamResponse]],
        *,
        streaming: bool = True,
    ) -> Request | None:
        """Makes a request and waits for its end, or gives it up."""
        life = await self._somebody()
        try:
            client = await self.client(life, errand.user, streaming=streaming)
        except Exception:
            self.counts['requests: nobody there'] += 1
            await asyncio.sleep(0.2)
            return None
        request = Request(life, kind, listen(make(client)))
        errand.requests.append(request)
        await self._until_done(errand, request)
        self.counts[f'requests: {kind}'] += 1
        return request

    async def _until_done(self, errand: Errand, request: Request) -> None:
        done = request.heard.done
        assert done is not None
        heard = 0
        quiet_since = time.time()
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=0.5)
                if len(request.heard.events) != heard:
                    heard = len(request.heard.events)
                    quiet_since = time.time()
                errand.task_id = errand.task_id or request.heard.task_id
                if request.life.ended is not None or (
                    time.time() - quiet_since > _PATIENT
                    and request.life.was_silent(TTL / 2)
                ):
                    break
                if (
                    request.kind == 'listen'
                    and time.time() - quiet_since > _NOBODY_GOES_ON
                    and set(request.heard.states[-1:]) <= INTERRUPTED
                ):
                    break
        finally:
            if not done.done():
                request.hung_up = True
                done.cancel()
                await asyncio.gather(done, return_exceptions=True)
        errand.task_id = errand.task_id or request.heard.task_id

    # What is asked.

    async def _say(self, errand: Errand, script: str) -> None:
        message = make_request(
            script,
            task_id=errand.task_id,
            context_id=errand.context_id,
            webhook=self._webhook if errand.webhook else '',
        )
        streaming = self._chance.random() < 0.7
        while True:
            sent = SendMessageRequest()
            sent.CopyFrom(message)
            request = await self._ask(
                errand,
                'send' if streaming else 'ask',
                lambda client, sent=sent: client.send_message(sent),
                streaming=streaming,
            )
            if request is None:
                continue
            if any(event.HasField('message') for event in request.heard.events):
                return
            if errand.task_id and await self._has(errand, message.message):
                errand.said.append(message.message.message_id)
                return
            if request.error is not None and errand.kind in ('raise', 'poison'):
                # Whoever did not stream was told of no task; to say it again
                # would only do the same to another one.
                return
            self.counts['requests: said again'] += 1
            message.message.task_id = errand.task_id
            await asyncio.sleep(0.3)

    async def _has(self, errand: Errand, message: Message) -> bool:
        """Whether a message is in the task, or the task is over."""
        task = await self._look(errand)
        return task.status.state in TERMINAL or any(
            said.message_id == message.message_id for said in task.history
        )

    async def _look(self, errand: Errand) -> Task:
        while True:
            life = await self._somebody()
            try:
                client = await self.client(life, errand.user)
                async with asyncio.timeout(_PATIENT):
                    task = await client.get_task(
                        GetTaskRequest(id=errand.task_id)
                    )
            except Exception:
                self.counts['requests: looked again'] += 1
                await asyncio.sleep(0.3)
                continue
            errand.context_id = task.context_id
            return task

    async def _until_it_rests(self, errand: Errand) -> Task:
        paused_since: float | None = None
        while True:
            task = await self._look(errand)
            state = task.status.state
            if state in TERMINAL:
                return task
            if state == TaskState.TASK_STATE_INPUT_REQUIRED:
                return task
            if state in INTERRUPTED:
                paused_since = paused_since or time.time()
                if time.time() - paused_since > _NOBODY_GOES_ON:
                    return task
                await asyncio.sleep(0.3)
                continue
            paused_since = None
            await self._listen(errand)

    async def _listen_too(self, errand: Errand) -> None:
        await self._until_known(errand)
        await asyncio.sleep(self._chance.uniform(0, 2))
        await self._listen(errand)

    async def _listen(self, errand: Errand) -> None:
        await self._ask(
            errand,
            'listen',
            lambda client: client.subscribe(
                SubscribeToTaskRequest(id=errand.task_id)
            ),
        )

    async def _cancel(self, errand: Errand) -> None:
        await self._until_known(errand)
        await asyncio.sleep(self._chance.expovariate(1))
        life = await self._somebody()
        errand.canceled = True
        errand.cancels.append(life)
        self.counts['requests: cancel'] += 1
        try:
            client = await self.client(life, errand.user, streaming=False)
            async with asyncio.timeout(_LINGERS):
                await client.cancel_task(CancelTaskRequest(id=errand.task_id))
        except Exception as error:
            self.counts[f'cancels: {type(error).__name__}'] += 1

    @staticmethod
    async def _until_known(errand: Errand) -> None:
        while not errand.task_id:
            await asyncio.sleep(0.1)
