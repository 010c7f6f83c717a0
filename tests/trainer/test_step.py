"""Catches: a loss that depends on packing, a trained prompt or tool token, a step made on counts nobody agreed on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from colchis.components.batch import build_batch
from colchis.components.config import RunConfig
from colchis.components.errors import BadData
from colchis.components.records.batch import Batch, StepDenominator, TrainingSample
from colchis.components.records.trajectories import SegmentKind
from colchis.components.trainer.losses import aggregate, policy_loss
from colchis.components.trainer.micro_batches import MicroBatch, forward, idle, micro_batches_of, pack
from colchis.components.trainer.model import load_model, local, shard
from colchis.components.trainer.optimiser import Optimiser, global_norm
from colchis.components.trainer.step import optimiser_step
from tests.batch.cases import RUN, make_config, make_trajectory, make_verdict
from tests.trainer.cases import VOCABULARY, change_weights, make_batch

pytestmark = pytest.mark.usefixtures("alone")


def loss_and_gradients(config: RunConfig, batch: Batch, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the batch's only step, at a ratio that is not 1 everywhere, so that the clip takes part."""
    model = load_model(folder)
    total = 0.0
    algorithm, denominator = config.algorithm, batch.denominators.steps[0]
    for mb in micro_batches_of(batch, step=0, rank=0, vocabulary=VOCABULARY):
        logprobs, _ = forward(model, mb, temperature=config.rollout.temperature)
        terms = policy_loss(
            logprobs, mb.behaviour, mb.advantages, clip_low=0.2, clip_high=0.2, dual_clip=algorithm.dual_clip
        )
        share = aggregate(
            terms.losses, mb.sequence_tokens, aggregation=algorithm.aggregation, divisor=denominator.divisor
        )
        share.backward()
        total += share.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def naive_loss_and_gradients(
    config: RunConfig, samples: Sequence[TrainingSample], folder: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    """The formulas once more, one document at a time, token by token, with transformers' own attention and loader."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    per_sequence = []
    for s in samples:
        logits = model(torch.tensor([s.token_ids])).logits[0] / config.rollout.temperature
        token_losses = []
        for t in range(1, len(s.token_ids)):
            if not s.loss_mask[t]:
                continue
            logprob = logits[t - 1].log_softmax(-1)[s.token_ids[t]]
            r = (logprob - s.logprobs[t]).exp()
            surrogate = torch.minimum(r * s.advantage, r.clamp(0.8, 1.2) * s.advantage)
            if s.advantage < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(3.0 * s.advantage))
            token_losses.append(-surrogate)
        per_sequence.append(torch.stack(token_losses))
    loss = {
        "token-mean": lambda: torch.cat(per_sequence).mean(),
        "sequence-mean": lambda: torch.stack([x.mean() for x in per_sequence]).mean(),
        "constant": lambda: torch.cat(per_sequence).sum() / (len(samples) * config.rollout.max_new_tokens),
    }[config.algorithm.aggregation]()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=1e-4, atol=1e-6, msg=name)


def near_policy(batch: Batch, folder: Path) -> Batch:
    """Behaviour log-probabilities around the policy's own, some of them beyond the clip."""
    model = load_model(folder)
    samples = []
    for s in batch.samples:
        with torch.no_grad():
            said, _ = forward(model, pack([s], vocabulary=VOCABULARY), temperature=1.0)
        shifted = iter((said + torch.linspace(-1.5, 0.6, len(said))).tolist())
        samples.append(replace(s, logprobs=[next(shifted) if m else math.nan for m in s.loss_mask]))
    return Batch(batch.denominators, tuple(samples))


def two_turns() -> Batch:
    turns = ((SegmentKind.MODEL, (4, 5)), (SegmentKind.TOOL, (6, 7, 8)), (SegmentKind.MODEL, (9, 1)))
    members = [
        make_trajectory(sample=0, turns=turns),
        make_trajectory(sample=1, turns=(*turns, (SegmentKind.ENVIRONMENT, (2, 2)))),
        make_trajectory(sample=2),
    ]
    verdicts = [make_verdict(t, score) for t, score in zip(members, (1.0, 0.0, 0.5), strict=True)]
    return build_batch(make_config(), run=RUN, iteration=0, trajectories=members, verdicts=verdicts)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_packed_gradients_equal_one_document_at_a_time(base: Path, aggregation: str) -> None:
    config = make_config(
        algorithm={"aggregation": aggregation}, trainer={"micro_batch_tokens": 32}, rollout={"temperature": 0.7}
    )
    batch = near_policy(make_batch(config), base)
    assert batch.denominators.steps[0].micro_batches > 2
    assert_close(loss_and_gradients(config, batch, base), naive_loss_and_gradients(config, batch.samples, base))


def test_two_turns_train_only_what_the_model_said(base: Path) -> None:
    config = make_config()
    batch = near_policy(two_turns(), base)
    (mb,) = micro_batches_of(batch, step=0, rank=0, vocabulary=VOCABULARY)
    by_sample = {mb.ids[k]: mb.targets[mb.sample == k].tolist() for k in range(3)}
    assert by_sample == {"run/0/100/0": [4, 5, 9, 1], "run/0/100/1": [4, 5, 9, 1], "run/0/100/2": [4, 5]}
    assert_close(loss_and_gradients(config, batch, base), naive_loss_and_gradients(config, batch.samples, base))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(16, 200), seed=st.integers(0, 100), aggregation=st.sampled_from(["token-mean", "sequence-mean"])
)
def test_the_token_budget_changes_neither_loss_nor_gradient(
    base: Path, budget: int, seed: int, aggregation: str
) -> None:
    results = []
    for tokens in (budget, 8192):
        config = make_config(algorithm={"aggregation": aggregation}, trainer={"micro_batch_tokens": tokens})
        results.append(loss_and_gradients(config, make_batch(config, seed=seed), base))
    assert_close(*results)


def test_what_stands_at_masked_places_has_no_path_to_the_loss(base: Path) -> None:
    """Masked log-probabilities (NaN, -inf, anything) and tokens after the last trained one."""
    config = make_config()
    batch = near_policy(two_turns(), base)
    outcome = loss_and_gradients(config, batch, base)
    for rubbish in (-math.inf, 1e9):
        samples = tuple(
            replace(
                s,
                logprobs=[p if m else rubbish for p, m in zip(s.logprobs, s.loss_mask, strict=True)],
                token_ids=[*s.token_ids[:-2], 30, 31] if not any(s.loss_mask[-2:]) else s.token_ids,
            )
            for s in batch.samples
        )
        changed = Batch(batch.denominators, samples)
        assert changed.samples != batch.samples
        again = loss_and_gradients(config, changed, base)
        assert again[0] == outcome[0]
        assert_close(again, outcome)


def ready(folder: Path, config: RunConfig) -> tuple[torch.nn.Module, Optimiser]:
    model = load_model(folder)
    shard(model, dtype=torch.float32)
    return model, Optimiser(model, config.trainer)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(p).detach().clone() for name, p in model.named_parameters()}


def first_step(batch: Batch) -> tuple[list[MicroBatch], StepDenominator]:
    return micro_batches_of(batch, step=0, rank=0, vocabulary=VOCABULARY), batch.denominators.steps[0]


def refused(
    folder: Path,
    micro_batches: Sequence[MicroBatch],
    denominator: StepDenominator,
    message: str,
    **config: dict[str, object],
) -> None:
    """The step is refused with `message`, and no parameter moved."""
    run = make_config(**config)
    model, optimiser = ready(folder, run)
    before = parameters(model)
    with pytest.raises(BadData, match=message):
        optimiser_step(model, optimiser, micro_batches, denominator, run, rate=1e-3)
    assert optimiser.steps == 0
    assert all(torch.equal(p, before[name]) for name, p in parameters(model).items() if p.isfinite().all())


def test_a_step_moves_towards_rewarded_tokens_and_reports_itself(base: Path) -> None:
    """Catches a flipped sign: the mean log-probability of rewarded samples rises, of the others it falls."""
    config = make_config(trainer={"micro_batch_tokens": 32})
    batch = make_batch(config, model=base)
    micro_batches, denominator = first_step(batch)
    model, optimiser = ready(base, config)

    def means() -> tuple[float, float]:
        with torch.no_grad():
            said = torch.cat([forward(model, mb, temperature=1.0)[0] for mb in micro_batches])
        advantages = torch.cat([mb.advantages for mb in micro_batches])
        return float(said[advantages > 0].mean()), float(said[advantages < 0].mean())

    up, down = means()
    metrics, votes = optimiser_step(model, optimiser, micro_batches, denominator, config, rate=1e-3)
    assert means()[0] > up
    assert means()[1] < down
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.clip_fraction) == (1.0, 1.0, 0.0)
    assert metrics.gap_max < 1e-5
    assert metrics.grad_norm > 0
    assert (metrics.tokens, metrics.sequences) == (denominator.tokens, denominator.sequences)
    assert [(v.rank, v.tokens, v.sequences) for v in votes] == [(0, denominator.tokens, denominator.sequences)]


def test_the_distance_to_the_reference_is_added_to_the_loss(base: Path) -> None:
    """By the formula of k3, with its weight and the step's denominator; it changes the gradient too."""
    batch = make_batch(make_config())
    (mb,), denominator = first_step(batch)
    with torch.no_grad():
        said, _ = forward(load_model(base), mb, temperature=1.0)
    difference = torch.linspace(-1.0, 1.0, len(said))
    expected = float((difference.exp() - difference - 1).mean())
    outcomes = []
    for coefficient, reference in ((0.0, None), (0.25, said + difference)):
        config = make_config(algorithm={"kl_coefficient": coefficient})
        model, optimiser = ready(base, config)
        passes = [replace(mb, reference=reference)]
        outcomes.append(optimiser_step(model, optimiser, passes, denominator, config, rate=1e-3)[0])
    without, with_reference = outcomes
    assert without.kl is None
    assert with_reference.kl == pytest.approx(expected, rel=1e-4)
    assert with_reference.loss == pytest.approx(without.loss + 0.25 * expected, rel=1e-4)
    assert with_reference.grad_norm != pytest.approx(without.grad_norm, rel=1e-3)


def test_gradients_are_clipped_to_the_global_norm(base: Path) -> None:
    """AdamW hides the gradient's scale, so its first moment is looked at: (1 - beta1) * clipped gradient."""
    config = make_config(trainer={"max_grad_norm": 0.01, "betas": (0.9, 0.95)})
    batch = make_batch(config)
    model, optimiser = ready(base, config)
    metrics, _ = optimiser_step(model, optimiser, *first_step(batch), config, rate=1e-3)
    assert metrics.grad_norm > 0.1
    moments = {name: m for name, m in optimiser.moments().items() if name.startswith("exp_avg/")}
    assert global_norm(moments) == pytest.approx(0.01 * 0.1, rel=1e-3)


def corrupt(denominator: StepDenominator, **counts: int) -> StepDenominator:
    share = denominator.ranks[0].model_copy(update={k: v for k, v in counts.items() if k != "divisor"})
    return denominator.model_copy(update={"ranks": [share], **counts})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 1}, r"rank 0 counts \d+ trained tokens in \d+ sequences, denominators\.json says 1 in"),
        ({"sequences": 3}, r"rank 0 counts \d+ trained tokens in \d+ sequences, denominators\.json says \d+ in 3"),
        ({"divisor": 1.0}, r"denominators\.json divides by 1\.0, the counts of all ranks give \d+"),
        ({"divisor": math.inf}, "divides by inf"),
        ({"divisor": math.nan}, "divides by nan"),
    ],
)
def test_a_recount_that_differs_is_refused_before_the_step(base: Path, change: dict[str, int], message: str) -> None:
    micro_batches, denominator = first_step(make_batch(make_config()))
    refused(base, micro_batches, corrupt(denominator, **change), message)


def test_totals_that_are_not_the_sum_of_the_ranks_are_refused(base: Path) -> None:
    micro_batches, denominator = first_step(make_batch(make_config()))
    total = denominator.model_copy(update={"tokens": denominator.tokens + 1})
    refused(base, micro_batches, total, "all ranks together count")


def test_a_rank_that_does_not_vote_is_named(base: Path) -> None:
    micro_batches, denominator = first_step(make_batch(make_config()))
    absent = denominator.ranks[0].model_copy(update={"rank": 1})
    planned = denominator.model_copy(update={"ranks": [*denominator.ranks, absent]})
    refused(base, micro_batches, planned, r"rank 1 did not vote: the batch was planned for ranks \[0, 1\]")


def test_a_step_without_tokens_is_refused(base: Path) -> None:
    _, denominator = first_step(make_batch(make_config()))
    refused(base, [idle()], corrupt(denominator, tokens=0, sequences=0), "nothing to train")


def test_a_lost_sample_is_noticed(base: Path) -> None:
    batch = make_batch(make_config())
    micro_batches, denominator = first_step(Batch(batch.denominators, batch.samples[1:]))
    refused(base, micro_batches, denominator, "rank 0 counts")


def spoil(micro_batch: MicroBatch, field: str, value: float, index: int) -> MicroBatch:
    values = getattr(micro_batch, field)
    values = micro_batch.behaviour.clone() if values is None else values.clone()
    values[index] = value
    return replace(micro_batch, **{field: values})


@pytest.mark.parametrize(
    ("field", "value", "term"),
    [
        ("advantages", math.nan, "advantage is nan"),
        ("advantages", -math.inf, "advantage is -inf"),
        ("old", -math.inf, "log-probability before the first step is -inf"),
        ("reference", math.nan, "log-probability under the reference is nan"),
        ("behaviour", math.inf, "behaviour log-probability is inf"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_term_and_token(
    base: Path, field: str, value: float, term: str
) -> None:
    batch = make_batch(make_config())
    (mb,), denominator = first_step(batch)
    sample = batch.samples[int(mb.sample[4])]
    offset = 4 - int((mb.sample < mb.sample[4]).sum())
    token = [t for t, m in enumerate(sample.loss_mask) if m][offset]
    message = f"step 0, rank 0: {term} at sample '{sample.id}', token {token}; no step was made"
    refused(base, [spoil(mb, field, value, 4)], denominator, message)


def _break_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan


def test_a_broken_weight_is_named(base: Path, tmp_path: Path) -> None:
    folder = change_weights(base, tmp_path / "m", _break_one)
    refused(
        folder,
        *first_step(make_batch(make_config())),
        r"log-probability under the policy is nan at sample 'run/0/\d+/\d', token \d+; "
        r"weight 'model\.layers\.1\.mlp\.down_proj\.weight' is not finite",
    )


@pytest.mark.parametrize(
    ("advantage", "message"),
    [(3e38, "the loss of a micro-batch is -?inf: its sum over"), (5e36, "gradient")],
)
def test_an_overflow_is_named_where_it_happens(base: Path, advantage: float, message: str) -> None:
    """3e38: the sum of finite losses overflows; 5e36: the loss is finite, its gradient or the norm is not."""
    (mb,), denominator = first_step(make_batch(make_config()))
    refused(base, [replace(mb, advantages=torch.full_like(mb.advantages, advantage))], denominator, message)


def test_an_idle_pass_changes_nothing(base: Path) -> None:
    config = make_config()
    micro_batches, denominator = first_step(make_batch(config))
    outcomes = []
    for passes in (micro_batches, [*micro_batches, idle()], [idle(), *micro_batches]):
        model, optimiser = ready(base, config)
        optimiser_step(model, optimiser, passes, denominator, config, rate=1e-3)
        outcomes.append(parameters(model))
    for other in outcomes[1:]:
        for name, p in outcomes[0].items():
            torch.testing.assert_close(other[name], p, rtol=0, atol=1e-5)


def test_a_packed_micro_batch_by_hand() -> None:
    """Positions restart with each document (relative rotary embeddings would hide it if they did not)."""
    samples = sorted(two_turns().samples, key=lambda s: s.id)[1:]  # 12 and 5 tokens
    mb = pack(samples, vocabulary=VOCABULARY)
    assert mb.doc_ends == (12, 17)
    assert mb.position_ids.tolist() == [[*range(12), *range(5)]]
    assert mb.rows.tolist() == [2, 3, 7, 8, 14, 15]  # one before the trained token
    assert mb.targets.tolist() == [4, 5, 9, 1, 4, 5]
    assert mb.sequence_tokens.tolist() == [4, 4, 4, 4, 2, 2]
    assert mb.place_of(4) == "sample 'run/0/100/2', token 3"


def test_a_token_outside_the_vocabulary_is_refused_by_name() -> None:
    sample = next(s for s in two_turns().samples if s.id == "run/0/100/0")
    with pytest.raises(BadData, match=r"'run/0/100/0' holds token 9, the model has 8"):
        pack([sample], vocabulary=8)
