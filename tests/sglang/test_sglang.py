"""The contract of the agent against real SGLang: what the embedded engine promises is what the real one does."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from colchis.components.agent.activation import unproven
from colchis.components.agent.engine import Engine
from colchis.components.weights.checksums import predict
from colchis.components.weights.protocol import EngineState, Probe
from tests.sglang.conftest import Sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TOKENS = [3, 7, 11, 42, 5, 9]


def reference_logprobs(folder: Path, token_ids: list[int]) -> list[float]:
    """Of all tokens but the first, by transformers, float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    chosen = torch.tensor(token_ids[1:])[:, None]
    return [float(x) for x in torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]]


def gap(sglang: Sglang, version: int) -> float:
    probed = sglang.agent.ask(lambda a: a.probe(Probe(token_ids=[TOKENS])))
    assert (probed.version, probed.weight_version) == (version, str(version))
    expected = reference_logprobs(sglang.versions.folders[version], TOKENS)
    return max(abs(a - b) for a, b in zip(probed.logprobs[0], expected, strict=True))


def in_flight(sglang: Sglang, tokens: int) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """A request that runs while the test goes on; returns once it generates."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(sglang.generate([3, 4, 5], tokens, return_logprob=True)))
    thread.start()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        text = httpx.get(sglang.url + "/metrics", timeout=60).text
        running = [line for line in text.splitlines() if line.startswith("sglang:num_running_reqs")]
        if any(float(line.rsplit(" ", 1)[1]) > 0 for line in running):
            break
        time.sleep(0.05)
    return thread, answers


def test_starts_as_no_version(sglang: Sglang) -> None:
    """Catches base weights that take traffic: the label is none, whatever the server has loaded."""
    if sglang.agent.status().version is None:
        status = sglang.agent.status()
        assert (status.state, status.ready) == (EngineState.EMPTY, False)
        assert "'none'" in str(status.reason)
    assert Engine(sglang.url).facts().start != ""


def test_v0_is_proven_and_agrees_with_transformers(sglang: Sglang) -> None:
    """Catches a prediction that holds for our own engine only, and log-probabilities that are not the policy's."""
    proof = sglang.agent.bring(0)
    assert (proof.predicted, proof.checksums_equal, proof.flush, proof.version_reported) == (True, True, True, "0")
    prediction = predict(sglang.versions.folders[0])
    assert prediction is not None
    assert prediction.differences(sglang.checksums()) == []
    assert gap(sglang, 0) < 1e-5
    answer = sglang.generate(TOKENS, 4)
    assert answer["meta_info"]["weight_version"] == "0"
    assert sglang.agent.ready().status_code == 200


def test_a_request_in_flight_survives_by_retraction(sglang: Sglang) -> None:
    """Catches lost requests, and tokens under a name that is not proven: the spans name v0 and v1, nothing else."""
    sglang.agent.bring(0)
    sglang.agent.prepare(1)
    thread, answers = in_flight(sglang, 400)
    proof = sglang.agent.activate(1)
    thread.join(120)
    meta = answers[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == 400
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 400)
    assert (proof.checksums_equal, proof.changed, proof.previous) == (True, True, 0)
    assert proof.cached_tokens_before
    assert proof.cached_tokens_after == 0
    assert predict(sglang.versions.folders[1]).differences(sglang.checksums()) == []  # type: ignore[union-attr]
    assert gap(sglang, 1) < 1e-5


def test_kind_same_is_a_new_version_of_equal_tensors(sglang: Sglang) -> None:
    sglang.agent.bring(1)
    before = sglang.checksums()
    proof = sglang.agent.bring(2, "same")
    assert (proof.changed, proof.version_reported) == (False, "2")
    assert sglang.checksums() == before


def test_new_weights_over_an_old_cache_are_cleaned_up(sglang: Sglang) -> None:
    """SGLang's two truths: frozen in place by somebody else, it loads the weights and refuses the flush with 400."""
    sglang.agent.bring(0)
    sglang.agent.prepare(1)
    thread, answers = in_flight(sglang, 400)
    assert sglang.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    proof = sglang.agent.activate(1)
    thread.join(120)
    assert (proof.flush, proof.checksums_equal, proof.version_reported) == (True, True, "1")
    assert proof.cached_tokens_after in (0, None)
    assert answers[0]["meta_info"]["completion_tokens"] == 400
    assert unproven(1) not in {span["version"] for span in answers[0]["meta_info"]["weight_versions"]}
    assert gap(sglang, 1) < 1e-5


def test_abort_ends_what_runs_and_loads(sglang: Sglang) -> None:
    from colchis.components.weights.protocol import Activate

    sglang.agent.bring(0)
    sglang.agent.prepare(1)
    thread, answers = in_flight(sglang, 400)
    request = Activate(run=sglang.agent.run, version=1, kind="full", pause="abort", deadline_s=60)
    proof = sglang.agent.ask(lambda a: a.activate(request))
    thread.join(120)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (proof.checksums_equal, proof.version_reported) == (True, "1")
    assert sglang.generate(TOKENS, 4)["meta_info"]["weight_version"] == "1"


def test_agent_killed_in_a_pause(sglang: Sglang) -> None:
    """The lease on a pause against the real server: /ready is 503 while paused, and 200 again without the agent."""
    sglang.agent.bring(1)
    sglang.agent.kill()
    (sglang.agent.staging / "pause.json").write_text("{}")
    assert sglang.post("/pause_generation", {"mode": "retract"}).status_code == 200
    assert httpx.get(sglang.url + "/ready", timeout=30).status_code == 503
    sglang.agent.start()
    status = sglang.agent.status()
    assert httpx.get(sglang.url + "/ready", timeout=30).status_code == 200
    assert (status.version, status.ready) == (1, True)
    assert len(sglang.generate(TOKENS, 4)["output_ids"]) == 4
