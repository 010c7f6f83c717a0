"""What engines do wrong, and that no token of a wrong answer is kept."""

from __future__ import annotations

import time

import pytest

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.records.trajectories import SegmentKind, from_parquet, to_parquet
from colchis.components.rollout import Engines, Sampling, sampling_seed
from tests.rollout.fault_server import EOS, FaultServer


def by_id(arrived):
    return {t.id: (t.token_ids, t.logprobs, t.seed) for group in arrived for t in group}


@pytest.fixture
def reference(generate):
    with FaultServer() as server:
        return by_id(generate(Engines.at([server.url]))[0])


def test_groups_arrive_whole_with_ids_seeds_and_spans(generate):
    with FaultServer() as server:
        arrived, stats = generate(Engines.at([server.url]))
    assert sorted(len(g) for g in arrived) == [4, 4, 4]
    for group in arrived:
        assert {t.group for t in group} == {group[0].group}
        for t in group:
            assert t.id == f"team/r1/3/{t.prompt_index}/{t.sample}"
            assert t.prompt_index == t.group + 1
            assert t.seed == sampling_seed(11, 3, t.prompt_index, t.sample)
            assert t.token_ids[-1] == EOS
            assert t.loss_mask == [i >= t.prompt_tokens for i in range(len(t.token_ids))]
            assert [(v.version, v.start, v.end) for v in t.versions] == [(3, t.prompt_tokens, len(t.token_ids))]
            assert [s.kind for s in t.segments] == [SegmentKind.MODEL]
            assert t.engine == server.url
        assert from_parquet(to_parquet(group)) == group
    assert (stats.groups, stats.samples, stats.requests, stats.faults) == (3, 12, 3, {})
    assert stats.tokens == sum(t.trained_tokens for g in arrived for t in g)


def test_one_request_per_group_carries_a_seed_per_sample(generate):
    """The form that SGLang reads as a batch: one sampling_params per input."""
    with FaultServer() as server:
        generate(Engines.at([server.url]), groups=1, stop=["\n"], temperature=0.7)
    (request,) = server.requests
    assert len(request["input_ids"]) == len(request["sampling_params"]) == 4
    assert len({p["sampling_seed"] for p in request["sampling_params"]}) == 4
    assert request["return_logprob"] is True
    assert all(p["temperature"] == 0.7 and p["stop"] == ["\n"] for p in request["sampling_params"])


def test_greedy_sampling_asks_once_per_prompt_at_temperature_zero(generate):
    with FaultServer() as server:
        config_sampling = Sampling(1, 6, 0.0, 1.0, -1, ())
        arrived, _ = generate(Engines.at([server.url]), groups=1, sampling=config_sampling)
    assert len(arrived[0]) == 1
    assert server.requests[0]["sampling_params"][0]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("fault", "counted", "samples"),
    [
        ("500", "http", 4),
        ("503", "http", 4),
        ("reset", "connection", 4),
        ("not json", "malformed", 4),
        ("short", "malformed", 4),
        ("abort", "aborted", 1),
        ("wrong version", "wrong_version", 1),
        ("changed version", "wrong_version", 1),
        ("two truths", "wrong_version", 1),
        ("half span", "malformed", 1),
        ("nan", "malformed", 1),
        ("minus infinity", "malformed", 1),
        ("positive", "malformed", 1),
        ("other token", "malformed", 1),
        ("no logprobs", "malformed", 1),
        ("empty", "malformed", 1),
        ("too long", "malformed", 1),
    ],
)
def test_a_wrong_answer_is_counted_and_asked_for_again(generate, reference, fault, counted, samples):
    """Keeping one would train on tokens of another policy, of no policy, or with another token's probability."""
    with FaultServer(script=(fault,)) as server:
        arrived, stats = generate(Engines.at([server.url]))
    assert by_id(arrived) == reference, "a retried sample must be what it would have been"
    assert stats.faults == {counted: samples}
    again = [len(r["input_ids"]) for r in server.requests]
    assert sorted(again) == sorted([4, 4, 4, samples]), "only what is missing is asked for again"


@pytest.mark.parametrize("fault", ["hang", "dribble"])
def test_a_hung_engine_is_left_for_another(generate, reference, fault):
    with FaultServer(always=fault) as bad, FaultServer() as good:
        arrived, stats = generate(Engines.at([bad.url, good.url]), request_timeout_s=0.5)
    assert by_id(arrived) == reference
    assert stats.faults["timeout"] >= 4
    assert all(t.engine == good.url for g in arrived for t in g)


def test_an_engine_that_is_gone_is_left_for_another(generate, reference):
    with FaultServer() as gone:
        pass
    with FaultServer() as good:
        arrived, stats = generate(Engines.at([gone.url, good.url]))
    assert by_id(arrived) == reference
    assert stats.engines == {good.url: 3}


def test_engines_of_another_version_are_not_asked(generate):
    with FaultServer(version=2) as stale, FaultServer(version="none") as empty, FaultServer(version=3) as good:
        arrived, _ = generate(Engines.at([stale.url, empty.url, good.url]))
    assert not stale.requests
    assert not empty.requests
    assert len(arrived) == 3


def test_an_engine_that_lies_about_its_version_is_found_out_by_its_answers(generate, reference):
    with FaultServer(version=3, always="wrong version") as liar, FaultServer(version=3) as good:
        arrived, stats = generate(Engines.at([liar.url, good.url]), groups=3)
    assert by_id(arrived) == reference
    assert stats.faults["wrong_version"] >= 1


def test_groups_spread_over_engines_and_each_stays_on_one(generate):
    with FaultServer(always="slow") as a, FaultServer(always="slow") as b:
        arrived, stats = generate(Engines.at([a.url, b.url]), groups=8, concurrency=8)
    assert set(stats.engines) == {a.url, b.url}
    assert stats.engines == {a.url: 4, b.url: 4}, "the least-loaded engine was not chosen"
    assert all(len({t.engine for t in g}) == 1 for g in arrived)


def test_concurrency_is_bounded(generate):
    with FaultServer(always="slow") as server:
        generate(Engines.at([server.url]), groups=6, concurrency=2)
    assert server.most_running == 2


def test_a_request_that_the_engine_calls_bad_is_not_repeated(generate):
    with FaultServer(always="400") as server, pytest.raises(BadData, match=r"refuses a request .*scripted 400.*http"):
        generate(Engines.at([server.url]), groups=1)
    assert len(server.requests) == 1
    with FaultServer(always="401") as server, pytest.raises(BadConfig, match="wants a key"):
        generate(Engines.at([server.url]), groups=1)


def test_no_engine_of_the_version_ends_at_the_deadline_and_names_what_there_is(generate):
    began = time.monotonic()
    with FaultServer(version=2) as stale, pytest.raises(PeerUnavailable) as error:
        generate(Engines.at([stale.url, "http://127.0.0.1:9"]), deadline_s=1.0)
    assert time.monotonic() - began < 20
    text = str(error.value)
    assert "version 3: 0 of 3 groups within 1 s" in text
    assert f"{stale.url}: version 2, ready" in text
    assert "http://127.0.0.1:9: ConnectError" in text


def test_a_request_that_always_fails_ends_before_the_deadline(generate):
    with FaultServer(always="nan") as server, pytest.raises(PeerUnavailable, match=r"10 requests .*not finite"):
        generate(Engines.at([server.url]), groups=1)
    assert len(server.requests) == 10


def test_groups_that_finished_before_an_error_were_handed_over(generate):
    arrived = []
    with FaultServer(script=("slow", "slow", "400")) as server, pytest.raises(BadData):
        generate(Engines.at([server.url]), groups=3, concurrency=1, on_group=arrived.append)
    assert [len(g) for g in arrived] == [4, 4]


def test_an_error_in_the_callback_ends_the_rollout(generate):
    def full(group):
        raise BadData("the store is full")

    with FaultServer() as server, pytest.raises(BadData, match="the store is full"):
        generate(Engines.at([server.url]), on_group=full)


def test_agents_say_which_engines_are_ready(generate):
    with FaultServer() as busy, FaultServer() as good:
        busy.ready = False
        good.token = busy.token = "secret"
        arrived, _ = generate(Engines([busy.url, f"dns://localhost:{good.url.rsplit(':', 1)[1]}"], token="secret"))
        assert not busy.requests
        assert arrived[0][0].engine == f"engine-{good.url[-5:]}"
        with pytest.raises(BadConfig, match="refuses our token"):
            generate(Engines([good.url], token="wrong"))


def test_engine_addresses_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("COLCHIS_ENGINES", raising=False)
    with pytest.raises(BadConfig, match="COLCHIS_ENGINES is not set"):
        Engines.from_environment()
    monkeypatch.setenv("COLCHIS_ENGINES", "http://127.0.0.1:9001/, dns://pool-agents:9000")
    assert Engines.from_environment().agents == ["http://127.0.0.1:9001", "dns://pool-agents:9000"]
    for bad in ("pool:9000", "dns://pool", "http://:1", "http://a:b"):
        with pytest.raises(BadConfig, match="engine address"):
            Engines([bad])


def test_an_agent_that_knows_its_engine_by_loopback_is_translated():
    """An agent shares its pod's loopback with the engine; a rollout pod does not."""
    from colchis.components.rollout.engines import _reachable

    assert _reachable("http://127.0.0.1:30000", "http://10.0.0.7:9000") == "http://10.0.0.7:30000"
    assert _reachable("http://127.0.0.1:30000/", "http://127.0.0.1:9000") == "http://127.0.0.1:30000"
    assert _reachable("http://engine-0:30000", "http://10.0.0.7:9000") == "http://engine-0:30000"


def test_seeds_differ_by_every_part_of_the_name_and_never_change():
    assert sampling_seed(11, 3, 1, 0) == 1051091064
    names = [(11, 3, 1, 0), (12, 3, 1, 0), (11, 4, 1, 0), (11, 3, 2, 0), (11, 3, 1, 1), (11, 3, 1, 0, 1)]
    assert len({sampling_seed(*n) for n in names}) == len(names)
