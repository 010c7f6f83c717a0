"""Catches: a base that moves, a merge that is not what was trained, adapters lost between processes or in a tie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from colchis.components.config import RunConfig
from colchis.components.errors import BadConfig, BadData
from colchis.components.trainer import logprobs_of, train_iteration
from colchis.components.trainer.adapters import attach, merged, without_adapters
from colchis.components.trainer.losses import aggregate, policy_loss
from colchis.components.trainer.micro_batches import forward, micro_batches_of
from colchis.components.trainer.model import load_model, whole_weights
from colchis.components.trainer.optimiser import learning_rate
from colchis.components.trainer.probe import sequence_logprobs
from tests.batch.cases import make_config
from tests.trainer.cases import (
    SCORES,
    VOCABULARY,
    as_model,
    equal_weights,
    in_processes,
    make_batch,
    make_model,
    train_as_rank,
    train_chain,
    weights_of,
)

TARGETS = ("q_proj", "v_proj", "down_proj")


def lora(rank: int = 4, **trainer: object) -> RunConfig:
    more = {"lora_rank": rank, "lora_alpha": 8.0, "lora_targets": TARGETS, "learning_rate": 0.02, "weight_decay": 0.1}
    return make_config(trainer=more | trainer)


def adapter_of(version: Path) -> dict[str, torch.Tensor]:
    return load_file(version / "state" / "adapter" / "adapter_model.safetensors")


def by_hand(base: Path, version: Path, scale: float) -> dict[str, torch.Tensor]:
    """The base with B @ A added, from the adapter's file alone."""
    weights, adapter = weights_of(base), adapter_of(version)
    for key in adapter:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
            weights[name] = weights[name] + scale * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
    return weights


def test_engines_get_the_base_with_the_adapter_in_it(base: Path, tmp_path: Path) -> None:
    """Catches a base that was trained, a target that was not, and a merge of other numbers than the state has."""
    result = train_chain(lora(), base, tmp_path, range(2))
    old, new = weights_of(base), weights_of(tmp_path / "v2" / "weights")
    assert new.keys() == old.keys()
    for name, tensor in new.items():
        target = name.endswith(tuple(f"{layer}.weight" for layer in TARGETS))
        assert torch.equal(tensor, old[name]) != target, name
    for name, tensor in by_hand(base, tmp_path / "v2", scale=2.0).items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert (result.kind, result.optimiser_steps) == ("full", 2)
    adapter = {key.removeprefix("base_model.model.").removesuffix(".weight") for key in adapter_of(tmp_path / "v2")}
    moments = load_file(tmp_path / "v2" / "state" / "moments.safetensors")
    assert {name.removeprefix("exp_avg/") for name in moments if name.startswith("exp_avg/")} == adapter
    said = json.loads((tmp_path / "v2" / "state" / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, sorted(TARGETS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_tells_what_the_merged_weights_say(base: Path, tmp_path: Path, dtype: str) -> None:
    """The trainer adds the low-rank product to a layer's output, the engines have it in the weights: one policy in
    float32. In bfloat16 the merge rounds, and the gap is what the run's `gap_alert` watches."""
    config = lora().model_copy(update={"model": make_config(model={"dtype": dtype}).model})
    result = train_chain(config, base, tmp_path, [0])
    said = logprobs_of(tmp_path / "v1" / "model", result.probe.token_ids)
    for ours, theirs in zip(result.probe.logprobs, said, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5 if dtype == "float32" else 0.15)
    assert said[0] != pytest.approx(logprobs_of(base, result.probe.token_ids)[0], abs=1e-3)


def test_it_is_the_gradient_of_the_merged_model(base: Path, tmp_path: Path) -> None:
    """The oracle has no adapter layer: it merges with torch's own functions, and autograd does the rest."""
    config = lora(steps=2, micro_batch_tokens=48)
    train_chain(config, base, tmp_path, range(3))
    model = load_model(base)
    start = load_model(base)
    attach(start, config.trainer, seed=config.loop.seed)
    learned = {n: p.detach().clone().requires_grad_() for n, p in start.named_parameters() if p.requires_grad}
    adamw = torch.optim.AdamW(
        learned.values(), betas=config.trainer.betas, eps=config.trainer.epsilon, weight_decay=0.1, fused=True
    )
    frozen = {name: p.detach() for name, p in model.named_parameters()}

    class Merged:
        def __call__(self, **inputs: object) -> object:
            weights = dict(frozen)
            for name in learned:
                if name.endswith(".lora_A"):
                    target = name.removesuffix("lora_A") + "weight"
                    weights[target] = frozen[target] + 2.0 * learned[name.replace("lora_A", "lora_B")] @ learned[name]
            return functional_call(model, weights, kwargs=inputs)

    for i in range(3):
        batch = make_batch(config, iteration=i)
        steps = [micro_batches_of(batch, step=s, rank=0, vocabulary=VOCABULARY) for s in range(2)]
        with torch.no_grad():
            old = {id(mb): forward(Merged(), mb, temperature=1.0)[0] for part in steps for mb in part}  # type: ignore[arg-type]
        for denominator, part in zip(batch.denominators.steps, steps, strict=True):
            for mb in part:
                logprobs, _ = forward(Merged(), mb, temperature=1.0)  # type: ignore[arg-type]
                terms = policy_loss(logprobs, old[id(mb)], mb.advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
                divisor = denominator.divisor
                aggregate(terms.losses, mb.sequence_tokens, aggregation="token-mean", divisor=divisor).backward()
            norm = torch.stack([p.grad.norm() for p in learned.values() if p.grad is not None]).double().norm()
            for p in learned.values():
                if p.grad is not None and norm > 1.0:
                    p.grad *= 1.0 / (float(norm) + 1e-6)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(config.trainer, i)
            adamw.step()
            adamw.zero_grad()
    ours = adapter_of(tmp_path / "v3")
    for name, p in learned.items():
        # Adam's first steps divide by a small second moment, which magnifies the rounding of two ways to multiply
        torch.testing.assert_close(ours[f"base_model.model.{name}.weight"], p.detach(), rtol=0, atol=2e-4, msg=name)


def test_resuming_in_another_process_is_bitwise(base: Path, tmp_path: Path) -> None:
    config = lora(steps=2, micro_batch_tokens=48)
    train_chain(config, base, tmp_path / "straight", range(4))
    in_processes(train_chain, [(config, base, tmp_path / "parts", range(2))])
    in_processes(train_chain, [(config, base, tmp_path / "parts", range(2, 4))])
    for name in ("weights/model", "state/moments", "state/adapter/adapter_model"):
        one, other = (tmp_path / run / "v4" / f"{name}.safetensors" for run in ("straight", "parts"))
        assert one.read_bytes() == other.read_bytes(), name


def test_an_empty_batch_passes_everything_on(base: Path, tmp_path: Path) -> None:
    """Also at the start, where the adapters are zero and the merged model is the base, bit by bit."""
    config = lora()
    first = train_iteration(
        config,
        iteration=0,
        batch=make_batch(config, scores=[[0, 0]]),
        model_folder=base,
        state_folder=None,
        base_folder=base,
        output=tmp_path / "v1",
    )
    assert (first.kind, first.optimiser_steps) == ("same", 0)
    assert equal_weights(weights_of(base), weights_of(tmp_path / "v1" / "weights"))
    as_model(base, tmp_path / "v1")
    train_chain(config, base, tmp_path, [1])
    last = train_iteration(
        config,
        iteration=2,
        batch=make_batch(config, iteration=2, scores=[[1, 1]]),
        model_folder=tmp_path / "v2" / "model",
        state_folder=tmp_path / "v2" / "state",
        base_folder=base,
        output=tmp_path / "v3",
    )
    assert (last.kind, last.optimiser_steps) == ("same", 1)
    for name in ("weights/model", "state/moments", "state/adapter/adapter_model"):
        assert (tmp_path / "v2" / f"{name}.safetensors").read_bytes() == (
            tmp_path / "v3" / f"{name}.safetensors"
        ).read_bytes(), name


def test_the_reference_is_the_model_without_its_adapters(base: Path, tmp_path: Path) -> None:
    config = make_config(algorithm={"kl_coefficient": 0.5}, trainer=dict(lora().trainer.model_dump()))
    first, second = (train_chain(config, base, tmp_path, [i]).metrics["kl"] for i in range(2))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-3
    model = load_model(base)
    attach(model, config.trainer, seed=1)
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(p)
    tokens = [[3, 4, 5, 6]]
    with without_adapters(model):
        assert sequence_logprobs(model, tokens) == logprobs_of(base, tokens)
    assert sequence_logprobs(model, tokens) != logprobs_of(base, tokens)


def test_two_ranks_train_what_one_trains(base: Path, tmp_path: Path) -> None:
    one = lora()
    two = one.model_copy(update={"trainer": one.trainer.model_copy(update={"ranks": 2})})
    train_chain(one, base, tmp_path / "one", [0])
    in_processes(train_as_rank, [(r, 2, tmp_path / "meet", two, base, tmp_path / "two", SCORES) for r in range(2)])
    ours = adapter_of(tmp_path / "two")
    for name, tensor in adapter_of(tmp_path / "one" / "v1").items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=5e-4, msg=name)


def test_targets_are_checked(base: Path) -> None:
    """Catches a misspelled layer that is silently not trained, and a head whose tie would swallow its adapter."""
    with pytest.raises(BadConfig, match=r"no linear layer 'qproj'") as caught:
        attach(load_model(base), lora(lora_targets=("qproj",)).trainer, seed=0)
    assert "q_proj" in str(caught.value)
    with pytest.raises(BadConfig, match="shares its weights"):
        attach(load_model(base), lora(lora_targets=("lm_head",)).trainer, seed=0)


def test_an_untied_head_can_have_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "untied", tie_word_embeddings=False)
    model = load_model(folder)
    attach(model, lora(lora_targets=("lm_head",)).trainer, seed=0)
    head = model.get_submodule("lm_head")
    torch.nn.init.normal_(head.lora_B)  # type: ignore[arg-type]
    expected = merged(weights_of(folder)["lm_head.weight"], head.lora_A, head.lora_B, 2.0)  # type: ignore[arg-type]
    assert torch.equal(whole_weights(model, dtype=torch.float32)["lm_head.weight"], expected)


def test_an_adapter_that_is_another_is_refused(base: Path, tmp_path: Path) -> None:
    """Catches a changed rank or target list, a lost tensor, and the state of a run without adapters."""
    train_chain(lora(), base, tmp_path, [0])

    def again(config: RunConfig) -> None:
        train_iteration(
            config,
            iteration=1,
            batch=make_batch(config, iteration=1),
            model_folder=tmp_path / "v1" / "model",
            state_folder=tmp_path / "v1" / "state",
            base_folder=base,
            output=tmp_path / "again",
        )

    with pytest.raises(BadData, match="expected"):
        again(lora(rank=8))
    with pytest.raises(BadData, match="missing or unknown"):
        again(lora(lora_targets=("q_proj",)))
    with pytest.raises(BadData, match="missing or unknown"):
        again(lora(rank=0))
    file = tmp_path / "v1" / "state" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file(tensors, file)
    with pytest.raises(BadData, match="missing or unknown"):
        again(lora())
    assert not (tmp_path / "again").exists()
