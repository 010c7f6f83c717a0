"""Where the two engines differ on purpose (docs/engines.md): each row of its table is one test here.

The embedded engine refuses with 400 and its reason; what SGLang 0.5.23 does instead is what the agent guards against.
A test that fails on SGLang after an upgrade says that a guard, or a difference, is no longer needed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from colchis.components.rollout import Engines, Wanted
from colchis.components.rollout.client import Completion, Fault, Refusal, generate
from colchis.components.rollout.engines import Balance
from colchis.components.rollout.engines import Engine as AskedEngine
from colchis.components.weights.checksums import predict
from colchis.components.weights.protocol import Probe
from tests.contract.conftest import EMBEDDED, Flight
from tests.contract.replica import Replica
from tests.contract.test_weights import checksums, differences
from tests.engine.processes import VOCAB, EngineProcess
from tests.engine.test_logprobs import reference
from tests.engine.test_refusals import Tensors, missing, nan, wrong_shape
from tests.waiting import eventually


def survives(engine: EngineProcess, order: Callable[[], httpx.Response]) -> httpx.Response | None:
    """The answer to an order; None when the server is gone afterwards."""
    reply: httpx.Response | None = None
    with suppress(httpx.TransportError):
        reply = order()
    if reply is not None and reply.status_code == 400:
        try:
            engine.sample([1, 2], tokens=1)
        except (httpx.TransportError, AssertionError):
            reply = None
        else:
            return reply
    eventually(lambda: gone(engine), "it has ended")
    return None


def gone(engine: EngineProcess) -> bool:
    try:
        engine.client.get("/model_info", timeout=5)
    except httpx.TransportError:
        return True
    return False


def truncated(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


@pytest.mark.parametrize("fault", ["truncated", "wrong shape", "load format", "token id"])
def test_what_ends_sglang_is_refused(
    kind: str, mortal: EngineProcess, models: dict[str, Path], broken: Callable[..., Path], fault: str
) -> None:
    """A truncated file, a wrong shape, an unknown load format, a token outside the vocabulary."""
    before = mortal.checksum()
    orders: dict[str, Callable[[], httpx.Response]] = {
        "truncated": lambda: mortal.update(truncated(broken()), weight_version="9"),
        "wrong shape": lambda: mortal.update(broken(wrong_shape), weight_version="9"),
        "load format": lambda: mortal.update(models["qwen2_b"], weight_version="9", load_format="nonsense"),
        "token id": lambda: mortal.client.post(
            "/generate", json={"input_ids": [2, 200], "sampling_params": {"max_new_tokens": 1}}
        ),
    }
    reply = survives(mortal, orders[fault])
    if kind == EMBEDDED:
        assert reply is not None
        assert (mortal.checksum(), mortal.info("weight_version")) == (before, "0")
    else:
        assert reply is None


def test_a_token_in_the_padding(kind: str, engine: EngineProcess) -> None:
    """On a CPU SGLang pads the vocabulary of 100 to 128 and reads zeros for the tokens between: no error, and an answer to
    another prompt."""
    reply = engine.client.post("/generate", json={"input_ids": [2, 100], "sampling_params": {"max_new_tokens": 1}})
    assert reply.status_code == (400 if kind == EMBEDDED else 200)


def test_a_missing_tensor(
    kind: str, engine: EngineProcess, models: dict[str, Path], broken: Callable[..., Path]
) -> None:
    """SGLang answers 200 and serves a mix of old and new; its checksums tell."""
    reply = engine.update(broken(missing), weight_version="9")
    if kind == EMBEDDED:
        assert reply.status_code == 400
        assert differences(engine, models["qwen2_a"]) == []
        return
    assert reply.status_code == 200
    assert engine.info("weight_version") == "9"
    assert differences(engine, models["qwen2_b"]) == ["model.layers.1.mlp.gate_up_proj.weight"]


def test_a_tensor_that_is_not_finite(kind: str, engine: EngineProcess, broken: Callable[..., Path]) -> None:
    """SGLang answers 200 and serves it: only the files can be looked at before. Its answers are refused by the rollout."""
    reply = engine.update(broken(nan), weight_version="9")
    assert reply.status_code == (400 if kind == EMBEDDED else 200)
    assert engine.info("weight_version") == ("0" if kind == EMBEDDED else "9")

    async def ask() -> list[Completion | Refusal]:
        async with httpx.AsyncClient() as client:
            parameters = [{"max_new_tokens": 8, "ignore_eos": True}]
            asked = AskedEngine("e", engine.url)
            wanted = Wanted.at_least(0)
            engines = Engines.at([engine.url])
            prove, headers = Balance(engines, client, wanted).proven, engines.engine_headers
            return await generate(
                client, asked, [[5, 3]], parameters, wanted=wanted, prove=prove, headers=headers, timeout_s=30
            )

    (answer,) = asyncio.run(ask())
    if kind == EMBEDDED:
        assert isinstance(answer, Completion)
    else:
        assert isinstance(answer, Refusal)
        assert answer.fault is Fault.MALFORMED


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_another_model(kind: str, engine: EngineProcess, models: dict[str, Path], name: str) -> None:
    """SGLang takes the tensors whose names it knows: of a cousin nearly all, of a stranger none, and answers 200."""
    reply = engine.update(models[name], weight_version="9")
    assert reply.status_code == (400 if kind == EMBEDDED else 200)
    if kind == EMBEDDED:
        assert differences(engine, models["qwen2_a"]) == []
        return
    assert engine.info("weight_version") == "9"
    kept = differences(engine, models["qwen2_a"]) == []
    assert kept == (name == "gpt2"), "none of its tensors was loaded, and success was reported"


def test_a_tensor_too_many(kind: str, engine: EngineProcess, broken: Callable[..., Path]) -> None:
    """SGLang takes the rest of the file."""

    def more(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.surplus.weight"] = torch.zeros(4, 4)

    reply = engine.update(broken(more), weight_version="9")
    assert reply.status_code == (400 if kind == EMBEDDED else 200)


def test_frozen_in_place_with_a_flush(
    kind: str, engine: EngineProcess, models: dict[str, Path], fly: Callable[..., Flight]
) -> None:
    """SGLang's two truths: 400, the weights are new, the label is old, and answers carry the new one."""
    flight = fly(400)
    assert engine.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    reply = engine.update(models["qwen2_b"], weight_version="1", flush_cache=True)
    assert reply.status_code == 400
    assert engine.info("weight_version") == "0"
    if kind == EMBEDDED:
        assert differences(engine, models["qwen2_a"]) == []
    else:
        assert "cache was not flushed" in reply.json()["message"]
        assert differences(engine, models["qwen2_b"]) == []
    engine.client.post("/continue_generation", json={})
    versions = [span["version"] for span in flight.answer()["meta_info"]["weight_versions"]]
    assert versions == (["0"] if kind == EMBEDDED else ["0", "1"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "retrun_logprob": True}),
        ("/update_weight_version", {"new_version": "0", "abort_all_requets": False}),
    ],
)
def test_a_misspelled_field(kind: str, engine: EngineProcess, path: str, body: dict[str, Any]) -> None:
    """SGLang ignores it, and the caller gets the default."""
    assert engine.client.post(path, json=body).status_code == (400 if kind == EMBEDDED else 200)


def test_a_sampling_seed(kind: str, engine: EngineProcess) -> None:
    """SGLang heeds it only in its deterministic mode, which its CPU back end does not offer."""
    first, second = (engine.sample([5, 9, 2], seed=11, tokens=60)["output_ids"] for _ in range(2))
    assert (first == second) == (kind == EMBEDDED)


def test_what_the_server_info_says_of_the_version(kind: str, engine: EngineProcess, models: dict[str, Path]) -> None:
    """At its top level SGLang keeps what it was started with; the live state is in internal_states."""
    assert engine.update(models["qwen2_b"], weight_version="1").status_code == 200
    info = engine.client.get("/server_info").json()
    assert info["internal_states"][0]["weight_version"] == "1"
    assert info["weight_version"] == "0"


def test_padding(kind: str, engine: EngineProcess, models: dict[str, Path]) -> None:
    """On a CPU SGLang pads the vocabulary with zeros, so a right checkpoint hashes otherwise; both forms are predicted."""
    from safetensors.torch import load_file

    table = load_file(models["qwen2_a"] / "model.safetensors")["model.embed_tokens.weight"]
    plain = hashlib.sha256(table.numpy().tobytes()).hexdigest()[:16]
    prediction = predict(models["qwen2_a"])
    assert prediction is not None
    assert (checksums(engine)["model.embed_tokens.weight"] == plain) == (kind == EMBEDDED)
    assert prediction.differences(checksums(engine)) == []


def test_the_last_token_of_the_vocabulary(kind: str, engine: EngineProcess, models: dict[str, Path]) -> None:
    """SGLang answers with another name for it; what it computes is right, also of the token after it."""
    ids = [5, VOCAB - 1, 7, VOCAB - 1]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    rows = engine.generate(**body)["meta_info"]["input_token_logprobs"]
    last = VOCAB - 1 if kind == EMBEDDED else 0
    assert [row[1] for row in rows] == [5, last, 7, last]
    expected = reference(models["qwen2_a"], ids)
    for place, token in enumerate(ids[1:]):
        assert rows[place + 1][0] == pytest.approx(float(expected[place, token]), abs=5e-5)


def test_a_probe_with_the_last_token_of_the_vocabulary(replica: Replica) -> None:
    """Fault: a reload that fails whenever a sample of the batch happens to have it."""
    ids = [5, VOCAB - 1, 7]
    (logprobs,) = replica.agent.ask(lambda a: a.probe(Probe(token_ids=[ids]))).logprobs
    expected = reference(replica.versions.folders[0], ids)
    assert logprobs == pytest.approx([float(expected[k, ids[k + 1]]) for k in range(2)], abs=5e-5)
