"""Answers that an update met: their tokens count if the agent proves the load, and it is not asked more than it need be."""

from __future__ import annotations

import time

from colchis.components.rollout import Engines, Wanted
from tests.rollout.fault_server import FaultServer

PROOF_S = 1.0


def test_many_answers_share_the_wait_for_one_proof(generate):
    """Fault: a thousand samples that each ask the agent twenty times a second, while it proves a large model."""
    with FaultServer(always="mark") as server:
        server.proven_at = time.monotonic() + PROOF_S
        began = time.monotonic()
        arrived, stats = generate(Engines([server.url]), groups=8, concurrency=32)
        waited_s = time.monotonic() - began
        assert len(server.requests) == stats.requests == 8
        assert stats.faults == {}
        assert [[v.version for v in t.versions] for group in arrived for t in group] == [[3]] * 32
        assert server.statuses <= 5 + waited_s / 0.05


def test_a_load_that_is_not_proven_is_refused(generate):
    """Fault: a label that says what it will become, believed before it is; nothing was proven, and nothing is under way."""
    with FaultServer(script=("mark",)) as server:
        arrived, stats = generate(Engines([server.url]), groups=1)
        assert stats.faults == {"wrong_version": 1}
        assert [[v.version for v in t.versions] for t in arrived[0]] == [[3]] * 4


def test_a_proof_that_does_not_come_in_time_is_none(generate):
    """Fault: samples that wait for ever for an agent that is stuck."""
    with FaultServer(script=("mark",)) as server:
        server.proven_at = time.monotonic() + 60
        began = time.monotonic()
        _, stats = generate(Engines([server.url]), groups=1, request_timeout_s=0.5)
        assert stats.faults == {"wrong_version": 1}
        assert 0.5 <= time.monotonic() - began < 30


def test_a_version_that_is_not_wanted_needs_no_proof(generate):
    """Fault: questions about loads that cannot matter, and engines without an agent, which nobody can be asked about."""
    with FaultServer(version=4, script=("mark",)) as server:
        server.proven_at = time.monotonic() + 60
        _, stats = generate(Engines([server.url]), groups=1, wanted=Wanted.exactly(4))
        assert stats.faults == {"wrong_version": 1}
        assert server.statuses <= 3
    with FaultServer(script=("mark",)) as server:
        _, stats = generate(Engines.at([server.url]), groups=1)
        assert stats.faults == {"wrong_version": 1}
