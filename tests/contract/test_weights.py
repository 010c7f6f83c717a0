"""Loading from a folder, and the checksums by which a load is proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from colchis.components.agent.engine import Engine
from colchis.components.weights.checksums import predict
from tests.contract.conftest import EMBEDDED
from tests.engine.processes import EngineProcess
from tests.engine.test_logprobs import reference


def checksums(engine: EngineProcess) -> dict[str, str]:
    answer = engine.client.post("/weights_checker", json={"action": "checksum"}).json()
    return dict(answer["ranks"][0]["checksums"])


def differences(engine: EngineProcess, folder: Path) -> list[str]:
    prediction = predict(folder)
    assert prediction is not None
    return prediction.differences(checksums(engine))


def test_checksums_are_those_predicted_from_the_folder(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a proof of something else than what serves: both ways, and against the weights that were there."""
    for name, other in (("qwen2_b", "qwen2_a"), ("qwen2_a", "qwen2_b")):
        assert engine.update(models[name], weight_version="1").status_code == 200
        assert differences(engine, models[name]) == []
        assert differences(engine, models[other]) != []


def test_checksums_can_be_asked_in_a_pause_and_agree_between_loads(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    """Catches a digest that depends on when it was taken: equality between replicas and loads is the proof."""
    before = engine.checksum()
    engine.client.post("/pause_generation", json={"mode": "retract"})
    assert engine.checksum() == before
    assert engine.update(models["qwen2_b"], weight_version="1").status_code == 200
    assert engine.checksum() != before
    assert engine.update(models["qwen2_a"], weight_version="2").status_code == 200
    assert engine.checksum() == before
    engine.client.post("/continue_generation", json={})


def test_the_new_weights_draw_the_tokens(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches a load that changes what is hashed and not what computes."""
    assert engine.update(models["qwen2_b"], weight_version="1").status_code == 200
    answer = engine.sample([5, 9, 2], tokens=20)
    expected = reference(models["qwen2_b"], [5, 9, 2, *answer["output_ids"]])
    for place, (logprob, token, *_) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(float(expected[2 + place, token]), abs=2e-5)


def test_one_path_can_be_loaded_again_and_again(engine: EngineProcess, models: dict[str, Path], tmp_path: Path) -> None:
    """Catches an engine that remembers a path: the agent swaps versions under a stable one."""
    live = tmp_path / "live"
    for turn in range(10):
        name = ("qwen2_a", "qwen2_b")[turn % 2]
        live.unlink(missing_ok=True)
        live.symlink_to(models[name])
        assert engine.update(live, weight_version=str(turn)).status_code == 200
        assert differences(engine, models[name]) == []
        assert engine.info("model_path") == str(live)


def test_what_is_no_checkpoint_is_refused_and_the_old_weights_serve(engine: EngineProcess, tmp_path: Path) -> None:
    """Catches a refusal that has half happened: label, tensors and answers are those from before."""
    before, answer = engine.checksum(), engine.sample([3, 2, 1], temperature=0.0)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        reply = engine.update(folder, weight_version="9")
        assert reply.status_code == 400
        assert reply.json()["success"] is False
        assert reply.json()["message"]
    assert (engine.checksum(), engine.info("weight_version")) == (before, "0")
    assert engine.sample([3, 2, 1], temperature=0.0)["output_ids"] == answer["output_ids"]


@pytest.mark.parametrize("where", ["load_format", "s3"])
def test_a_store_is_no_folder(engine: EngineProcess, models: dict[str, Path], where: str) -> None:
    """Catches an engine that fetches by itself, past every check of the agent; and a refusal that has half happened."""
    before = engine.checksum()
    if where == "s3":
        reply = engine.client.post(
            "/update_weights_from_disk", json={"model_path": "s3://bucket/weights", "weight_version": "9"}
        )
    else:
        reply = engine.update(models["qwen2_b"], weight_version="9", load_format="remote")
    assert reply.status_code == 400, reply.text
    assert (engine.checksum(), engine.info("weight_version")) == (before, "0")
    engine.sample([1, 2])


def test_links_to_files_are_followed(engine: EngineProcess, models: dict[str, Path], tmp_path: Path) -> None:
    """Catches an engine that cannot load what a cache of models keeps as links."""
    for file in models["qwen2_b"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert engine.update(tmp_path, weight_version="1").status_code == 200
    assert differences(engine, models["qwen2_b"]) == []


def test_an_update_empties_the_cache(engine: EngineProcess, models: dict[str, Path]) -> None:
    """Catches keys and values of the old weights that a prompt finds again under the new ones."""
    prompt = list(range(2, 34))

    def ask() -> tuple[int, list[float]]:
        answer = engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 2, "ignore_eos": True}, return_logprob=True
        )
        ids, meta = answer["output_ids"], answer["meta_info"]
        expected = reference(models["qwen2_b"], [*prompt, *ids])
        gaps = [
            abs(row[0] - float(expected[len(prompt) - 1 + place, ids[place]]))
            for place, row in enumerate(meta["output_token_logprobs"])
        ]
        return int(meta["cached_tokens"]), gaps

    ask()
    assert ask()[0] >= len(prompt) - 1
    assert engine.update(models["qwen2_b"], weight_version="1").status_code == 200
    cached, gaps = ask()
    assert cached == 0
    assert max(gaps) < 2e-5


def test_a_folder_without_a_config_is_the_served_model(engine: EngineProcess, broken: Callable[..., Path]) -> None:
    folder = broken()
    (folder / "config.json").unlink()
    assert engine.update(folder, weight_version="3").status_code == 200


def test_bfloat16_files_are_cast_to_the_served_type(engine: EngineProcess, broken: Callable[..., Path]) -> None:
    """Catches a cast that rounds twice: the trainer may publish bfloat16 to an engine that serves float32."""

    def cast(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    folder = broken(cast)
    assert engine.update(folder, weight_version="1").status_code == 200
    answer = engine.sample([5, 9, 2], tokens=10)
    expected = reference(folder, [5, 9, 2, *answer["output_ids"]])
    for place, (logprob, token, *_) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        assert logprob == pytest.approx(float(expected[2 + place, token]), abs=2e-5)


def test_two_starts_can_be_told_apart(engine: EngineProcess, mortal: EngineProcess) -> None:
    """Catches a restart that goes unnoticed: the label may be the same, what the server says of its start is not."""
    first, second = Engine(engine.url).facts(10), Engine(mortal.url).facts(10)
    assert first.start
    assert first.start != second.start
    assert first.start == Engine(engine.url).facts(10).start
    assert (first.dtype, first.device, first.shards) == (second.dtype, "cpu", 1)


def test_an_engine_says_how_it_is_cut(kind: str, engine: EngineProcess) -> None:
    """Catches a size that SGLang calls something else by now: one that is not found counts as 1, and its adapters as none."""
    info = engine.client.get("/server_info").json()
    if kind != EMBEDDED:
        assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (1, 1, 1)
        assert (info["enable_lora"], info["max_lora_rank"], info["lora_target_modules"]) == (None, None, None)
    facts = Engine(engine.url).facts(10)
    assert (facts.receivers, facts.shards, facts.adapter_rank) == (1, 1, 0)
