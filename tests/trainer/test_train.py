"""Catches: state lost between processes, a version mix-up, rounding that swallows updates, ranks that disagree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from colchis.components.config import RunConfig
from colchis.components.errors import BadConfig, BadData, Bug
from colchis.components.records.batch import Batch
from colchis.components.trainer import TrainResult, logprobs_of, train_iteration
from colchis.components.trainer.losses import aggregate, policy_loss
from colchis.components.trainer.micro_batches import forward, micro_batches_of
from colchis.components.trainer.model import load_model, published
from colchis.components.trainer.optimiser import learning_rate
from colchis.components.trainer.state import fingerprint
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


def train(config: RunConfig, base: Path, output: Path, *, batch: Batch | None = None) -> TrainResult:
    """Iteration 0."""
    return train_iteration(
        config,
        iteration=0,
        batch=batch or make_batch(config, model=base),
        model_folder=base,
        state_folder=None,
        base_folder=base,
        output=output,
    )


def test_an_iteration_writes_what_the_next_one_and_the_engines_need(base: Path, tmp_path: Path) -> None:
    config = make_config()
    result = train(config, base, tmp_path)
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["metrics.json", "state/moments.safetensors", "state/state.json", "weights/model.safetensors"]
    new, old = weights_of(tmp_path / "weights"), weights_of(base)
    assert {n: (t.dtype, t.shape) for n, t in new.items()} == {n: (t.dtype, t.shape) for n, t in old.items()}
    assert not equal_weights(new, old)
    assert (result.version, result.kind, result.steps, result.optimiser_steps) == (1, "full", 1, 1)
    assert result.extraction.before == result.extraction.after == fingerprint(new)
    assert result.metrics["gap_max"] < 1e-5
    assert result.metrics["tokens"] == make_batch(config).denominators.trained_tokens
    assert TrainResult.from_bytes((tmp_path / "metrics.json").read_bytes(), "metrics.json") == result


def test_the_probe_tells_what_the_published_weights_say(base: Path, tmp_path: Path) -> None:
    probe = train(make_config(), base, tmp_path).probe
    said = logprobs_of(as_model(base, tmp_path), probe.token_ids)
    assert [len(row) for row in said] == [len(tokens) - 1 for tokens in probe.token_ids]
    for ours, theirs in zip(probe.logprobs, said, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    before = logprobs_of(base, probe.token_ids)
    assert before[0] != pytest.approx(said[0], abs=1e-4)


def chain_config(**trainer: object) -> RunConfig:
    return make_config(
        trainer={
            "steps": 2,
            "micro_batch_tokens": 48,
            "schedule": "cosine",
            "schedule_iterations": 6,
            "weight_decay": 0.1,
        }
        | {"warmup_iterations": 1}
        | trainer
    )


def test_resuming_in_another_process_is_bitwise(base: Path, tmp_path: Path) -> None:
    config = chain_config()
    train_chain(config, base, tmp_path / "straight", range(4))
    in_processes(train_chain, [(config, base, tmp_path / "parts", range(2))])
    in_processes(train_chain, [(config, base, tmp_path / "parts", range(2, 4))])
    for name in ("weights/model.safetensors", "state/moments.safetensors", "state/state.json"):
        one, other = (tmp_path / run / "v4" / name for run in ("straight", "parts"))
        assert one.read_bytes() == other.read_bytes(), name


def test_the_files_lose_nothing_that_memory_holds(base: Path, tmp_path: Path) -> None:
    """The oracle never writes a file and uses plain torch: one model and one AdamW through all iterations."""
    config = chain_config()
    train_chain(config, base, tmp_path, range(4))
    model = load_model(base)
    adamw = torch.optim.AdamW(
        model.parameters(), betas=config.trainer.betas, eps=config.trainer.epsilon, weight_decay=0.1, fused=True
    )
    for i in range(4):
        batch = make_batch(config, iteration=i)
        steps = [micro_batches_of(batch, step=s, rank=0, vocabulary=VOCABULARY) for s in range(2)]
        with torch.no_grad():
            old = {id(mb): forward(model, mb, temperature=1.0)[0] for part in steps for mb in part}
        for denominator, part in zip(batch.denominators.steps, steps, strict=True):
            for mb in part:
                logprobs, _ = forward(model, mb, temperature=1.0)
                terms = policy_loss(logprobs, old[id(mb)], mb.advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
                aggregate(
                    terms.losses, mb.sequence_tokens, aggregation="token-mean", divisor=denominator.divisor
                ).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).double().norm()
            for p in model.parameters():
                if p.grad is not None and norm > 1.0:
                    p.grad *= 1.0 / (float(norm) + 1e-6)
            for group in adamw.param_groups:
                group["lr"] = learning_rate(config.trainer, i)
            adamw.step()
            adamw.zero_grad()
    for name, p in published(model).items():
        torch.testing.assert_close(weights_of(tmp_path / "v4" / "weights")[name], p, rtol=0, atol=1e-6, msg=name)


def test_later_steps_of_an_iteration_are_off_policy(base: Path, tmp_path: Path) -> None:
    config = make_config(trainer={"steps": 3, "learning_rate": 0.02})
    result = train(config, base, tmp_path)
    first, *later = result.step_metrics
    assert [m.step for m in result.step_metrics] == [0, 1, 2]
    assert first.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert all(m.ratio_max > 1.01 for m in later)
    assert max(m.clip_fraction for m in later) > 0
    assert all(m.gap_max < 1e-5 for m in result.step_metrics)  # against the version that sampled, in every step
    assert result.optimiser_steps == 3


def test_the_reference_stays_where_the_run_began(base: Path, tmp_path: Path) -> None:
    config = make_config(algorithm={"kl_coefficient": 0.5}, trainer={"learning_rate": 0.02})
    first, second = (train_chain(config, base, tmp_path, [i]).metrics["kl"] for i in range(2))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-3
    assert "kl" not in train(make_config(), base, tmp_path / "free").metrics


def test_a_rate_of_zero_moves_nothing_and_says_so(base: Path, tmp_path: Path) -> None:
    config = make_config(trainer={"schedule": "linear", "schedule_iterations": 1, "weight_decay": 0.1})
    train_chain(config, base, tmp_path, [0])
    result = train_chain(config, base, tmp_path, [1])
    assert (result.steps, result.kind, result.metrics["learning_rate"]) == (1, "same", 0.0)
    assert equal_weights(weights_of(tmp_path / "v1" / "weights"), weights_of(tmp_path / "v2" / "weights"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_batch_passes_weights_and_state_on(base: Path, tmp_path: Path, dtype: str) -> None:
    """Every byte, bfloat16's fp32 masters included: rounding them once per iteration would lose small steps."""
    config = make_config(model={"dtype": dtype})
    train_chain(config, base, tmp_path, [0])
    empty = make_batch(config, iteration=1, scores=[[1, 1, 1, 1]])
    assert empty.decision == "empty"
    result = train_iteration(
        config,
        iteration=1,
        batch=empty,
        model_folder=tmp_path / "v1" / "model",
        state_folder=tmp_path / "v1" / "state",
        base_folder=None,
        output=tmp_path / "v2",
    )
    assert (result.version, result.kind, result.steps, result.optimiser_steps) == (2, "same", 0, 1)
    files = [
        p.relative_to(tmp_path / "v1") for p in (tmp_path / "v1").glob("*/*.safetensors") if p.parent.name != "model"
    ]
    assert len(files) == (2 if dtype == "float32" else 3)
    for name in files:
        assert (tmp_path / "v1" / name).read_bytes() == (tmp_path / "v2" / name).read_bytes(), name
    assert len(result.probe.logprobs[0]) > 0
    as_model(base, tmp_path / "v2")
    assert train_chain(config, base, tmp_path, [2]).optimiser_steps == 2


def test_an_empty_first_batch_gives_the_base_again(base: Path, tmp_path: Path) -> None:
    config = make_config()
    result = train(config, base, tmp_path / "v1", batch=make_batch(config, scores=[[0, 0]]))
    assert (result.kind, result.optimiser_steps) == ("same", 0)
    assert equal_weights(weights_of(base), weights_of(tmp_path / "v1" / "weights"))
    as_model(base, tmp_path / "v1")
    assert train_chain(config, base, tmp_path, [1]).optimiser_steps == 1


def test_bfloat16_is_published_from_masters_that_keep_small_steps(tmp_path: Path) -> None:
    """A step of 1e-5 is lost in most bfloat16 weights of about 0.2; the masters add them up, through files too."""
    base = make_model(tmp_path / "base", dtype=torch.bfloat16)
    config = make_config(model={"dtype": "bfloat16"}, trainer={"learning_rate": 1e-5})
    result = train_chain(config, base, tmp_path, range(3))
    new, old = weights_of(tmp_path / "v3" / "weights"), weights_of(base)
    assert {t.dtype for t in new.values()} == {torch.bfloat16}
    masters = load_file(tmp_path / "v3" / "state" / "masters.safetensors")
    assert {t.dtype for t in masters.values()} == {torch.float32}
    name = "model.layers.0.mlp.down_proj.weight"
    assert all(torch.equal(masters[n].bfloat16(), new[n]) for n in new)
    moved = (masters[name] - old[name].float()).abs()
    assert moved.max() > 2.5e-5  # three steps of about 1e-5
    assert (new[name] != old[name]).float().mean() < 0.5
    served = logprobs_of(tmp_path / "v3" / "model", result.probe.token_ids)
    assert result.probe.logprobs[0] == pytest.approx(served[0], abs=1e-6)  # trained with what engines compute with


@pytest.mark.parametrize(("ranks", "scores"), [(2, SCORES), (3, [[1, 0]])])
def test_ranks_make_the_step_of_one(base: Path, tmp_path: Path, ranks: int, scores: list[list[float]]) -> None:
    """Three ranks for two sequences: one has nothing to do and still takes part. (The parser refuses more than one
    rank until there are pods for them; the trainer does not.)"""
    one = make_config(trainer={"micro_batch_tokens": 48, "steps": 2}, algorithm={"kl_coefficient": 0.1})
    many = one.model_copy(update={"trainer": one.trainer.model_copy(update={"ranks": ranks})})
    train(one, base, tmp_path / "one", batch=make_batch(one, scores=scores))
    rendezvous, output = tmp_path / "rendezvous", tmp_path / "many"
    in_processes(train_as_rank, [(rank, ranks, rendezvous, many, base, output, scores) for rank in range(ranks)])
    result = TrainResult.from_bytes((output / "metrics.json").read_bytes(), "metrics.json")
    single = TrainResult.from_bytes((tmp_path / "one" / "metrics.json").read_bytes(), "metrics.json")
    assert [(v.step, v.rank) for v in result.votes] == [(s, r) for s in range(single.steps) for r in range(ranks)]
    for ours, theirs in zip(result.step_metrics, single.step_metrics, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert (ours.tokens, ours.sequences) == (theirs.tokens, theirs.sequences)
    new = weights_of(output / "weights")
    for name, tensor in weights_of(tmp_path / "one" / "weights").items():
        if not name.endswith("k_proj.bias"):  # its true gradient is 0, and Adam magnifies the rounding
            torch.testing.assert_close(new[name], tensor, rtol=0, atol=5e-5, msg=name)


def test_state_of_many_ranks_is_state_of_one(base: Path, tmp_path: Path) -> None:
    """Moments gathered from two ranks, continued by one: the same as one rank all along, up to summation order."""
    config = make_config()
    two = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})})
    output = tmp_path / "two" / "v1"
    in_processes(train_as_rank, [(r, 2, tmp_path / "meet", two, base, output, SCORES) for r in range(2)])
    as_model(base, output)
    train_chain(config, base, tmp_path / "two", [1])
    train_chain(config, base, tmp_path / "one", range(2))
    new = weights_of(tmp_path / "two" / "v2" / "weights")
    for name, tensor in weights_of(tmp_path / "one" / "v2" / "weights").items():
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(new[name], tensor, rtol=0, atol=5e-5, msg=name)


class Trained:
    """One trained iteration that the refusals below start from."""

    def __init__(self, base: Path, root: Path) -> None:
        self.config, self.base, self.root = make_config(), base, root
        train_chain(self.config, base, root, [0])

    def next(self, **changes: object) -> TrainResult:
        arguments: dict[str, object] = {
            "iteration": 1,
            "batch": make_batch(self.config, iteration=1),
            "model_folder": self.root / "v1" / "model",
            "state_folder": self.root / "v1" / "state",
            "base_folder": None,
            "output": self.root / "v2",
        }
        return train_iteration(self.config, **(arguments | changes))  # type: ignore[arg-type]


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> Trained:
    return Trained(base, tmp_path)


def test_inputs_of_different_versions_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="iteration 1 needs the trainer state of v1"):
        trained.next(state_folder=None)
    with pytest.raises(BadData, match="the batch is of iteration 0, iteration 1 trains"):
        trained.next(batch=make_batch(trained.config))
    with pytest.raises(BadData, match=r"the state belongs to weights .* those of v1 are"):
        trained.next(model_folder=trained.base)
    with pytest.raises(BadData, match="the state is of v1, expected v2"):
        trained.next(iteration=2, batch=make_batch(trained.config, iteration=2))
    with pytest.raises(BadData, match="starts from the base model"):
        trained.next(iteration=0, batch=make_batch(trained.config))
    assert not (tmp_path / "v2").exists()


def test_a_state_with_a_lost_file_is_refused(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "v1" / "state", tmp_path / "lost")
    (tmp_path / "lost" / "moments.safetensors").unlink()
    with pytest.raises(BadData, match=r"moments\.safetensors"):
        trained.next(state_folder=tmp_path / "lost")
    (tmp_path / "lost" / "state.json").write_text("{}")
    with pytest.raises(BadData, match=r"the content has sha256 .*state\.json"):
        trained.next(state_folder=tmp_path / "lost")
    (tmp_path / "lost" / "state.json").unlink()
    with pytest.raises(BadData, match=r"no readable trainer state \(No such file.*state\.json"):
        trained.next(state_folder=tmp_path / "lost")


def test_a_refused_step_leaves_no_file(trained: Trained, tmp_path: Path) -> None:
    batch = make_batch(trained.config, iteration=1)
    with pytest.raises(BadData, match="rank 0 counts"):
        trained.next(batch=Batch(batch.denominators, batch.samples[1:]))
    assert not (tmp_path / "v2").exists()
    assert trained.next().version == 2


def test_a_reference_is_asked_for_when_the_loss_needs_it(base: Path, tmp_path: Path) -> None:
    config = make_config(algorithm={"kl_coefficient": 0.1})
    with pytest.raises(BadConfig, match=r"algorithm\.kl_coefficient is above 0"):
        train_iteration(
            config,
            iteration=0,
            batch=make_batch(config),
            model_folder=base,
            state_folder=None,
            base_folder=None,
            output=tmp_path,
        )


def test_parameters_that_change_while_they_are_written_are_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write-protected section: a writer that meets a running step must not publish a mixture."""
    from colchis.components.trainer import state

    save = state.save_file

    def save_beside_a_step(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save(tensors, path, metadata=metadata)
        next(iter(tensors.values())).data.add_(1e-3)

    monkeypatch.setattr(state, "save_file", save_beside_a_step)
    with pytest.raises(Bug, match="changed while they were written"):
        train(make_config(), base, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.8535534, 0.5, 0.1464466, 0.0, 0.0]),
    ],
)
def test_schedules_against_a_table_made_by_hand(schedule: str, expected: list[float]) -> None:
    trainer = {"learning_rate": 0.5, "warmup_iterations": 2, "schedule": schedule, "schedule_iterations": 6}
    config = make_config(trainer=trainer).trainer
    assert [learning_rate(config, i) / 0.5 for i in range(8)] == pytest.approx(expected, abs=1e-6)
