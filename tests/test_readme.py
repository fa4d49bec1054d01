"""The examples of the README do what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from a2a.types.a2a_pb2 import Task
from sqlalchemy.pool import NullPool

from a2a_lease import ContextCodec, Fail, RecoveryPolicy, RunAgain
from support.databases import POOLED
from support.inprocess import call


README = Path(__file__).parent.parent / 'README.md'


def _example(name: str) -> dict[str, Any]:
    blocks = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)
    [block] = [b for b in blocks if f'class {name}' in b]
    # What an example is passed to is another example.
    code = block.partition('\nhandler = ')[0]
    found: dict[str, Any] = {}
    exec(compile(code, str(README), 'exec'), found)
    return found


class _Lease:
    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


def test_the_policy_runs_only_safe_skills_again():
    policy = _example('SafeSkillsAgain')['SafeSkillsAgain']()
    assert isinstance(policy, RecoveryPolicy)
    safe, unsafe = Task(metadata={'skill': 'translate'}), Task()
    for attempt in (1, 2, 3):
        assert isinstance(policy.decide(_Lease(attempt), safe), RunAgain)
    assert isinstance(policy.decide(_Lease(4), safe), Fail)
    assert isinstance(policy.decide(_Lease(2), unsafe), Fail)
    assert isinstance(policy.decide(_Lease(2), None), Fail)


def test_the_codec_keeps_the_account_and_no_more():
    codec = _example('AccountCodec')['AccountCodec']()
    assert isinstance(codec, ContextCodec)
    data = codec.dump(call(account='acme', headers={'authorization': 'x'}))
    assert codec.load(data).state == {'account': 'acme'}
    assert codec.load(codec.dump(call())).state == {'account': None}


def test_the_engine_behind_a_pooler_is_the_one_that_is_tested():
    blocks = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)
    [block] = [b for b in blocks if 'prepared_statement_name_func' in b]
    made: list[Any] = []

    def create_async_engine(url: str, **options: Any) -> None:
        made.append((url, options))

    exec(
        compile(block, str(README), 'exec'),
        {
            'create_async_engine': create_async_engine,
            'NullPool': NullPool,
            'url': 'the url',
        },
    )
    assert made == [('the url', POOLED)]
