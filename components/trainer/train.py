"""The training frame: one iteration from v_i to v_(i+1), top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from colchis.components.config import RunConfig
from colchis.components.errors import BadConfig, BadData
from colchis.components.records.batch import Batch
from colchis.components.store import Record
from colchis.components.trainer.adapters import attach, without_adapters, write_config
from colchis.components.trainer.micro_batches import MicroBatch, micro_batches_of, with_old, with_reference
from colchis.components.trainer.model import DTYPES, file_dtype, load_model, shard, whole_weights
from colchis.components.trainer.optimiser import Optimiser, learning_rate
from colchis.components.trainer.probe import Probe, probe_tokens, sequence_logprobs
from colchis.components.trainer.ranks import Vote, process_group
from colchis.components.trainer.state import Extraction, fingerprint, read_state, write_state, write_weights
from colchis.components.trainer.step import StepMetrics, optimiser_step


class TrainResult(Record):
    """What an iteration's training did; also `metrics.json`."""

    format: Literal[1] = 1
    version: int
    """That was produced: iteration + 1."""
    kind: Literal["full", "same"]
    """`same`: every published byte equals that of the version before (no step, or steps too small to show)."""
    steps: int
    """Optimiser steps of this iteration."""
    optimiser_steps: int
    """Of the run so far."""
    metrics: dict[str, float]
    """Of the iteration: means over steps weighted by tokens, `*_max` and grad_norm the largest."""
    step_metrics: list[StepMetrics]
    votes: list[Vote]
    """Of every rank before every step."""
    extraction: Extraction
    probe: Probe
    """Under the new weights."""
    seconds: dict[str, float]
    """Wall time of load, forward (old and reference log-probabilities), steps, write and probe."""


def train_iteration(
    config: RunConfig,
    *,
    iteration: int,
    batch: Batch,
    model_folder: Path,
    state_folder: Path | None,
    base_folder: Path | None,
    output: Path,
) -> TrainResult:
    """Train v_iteration on `batch` and write v_(iteration+1) into `output`: `weights/model.safetensors`, `state/*`,
    `metrics.json`.

    `model_folder`: config.json and the weights of v_iteration. `state_folder`: the `state/` of the train commit that
    made them; None at iteration 0 only. `base_folder`: v0, which is the frozen reference and what adapters are trained
    beside; needed when `algorithm.kl_coefficient` or `trainer.lora_rank` is above 0. An empty batch makes no step and the
    same weights again.

    BadData, without any file written, when a vote, a number or an input is wrong: its message names rank, sample or
    tensor. Every rank of the process group calls this; rank 0 writes.
    """
    _check_inputs(config, iteration, batch, state_folder, base_folder)
    clock = Clock()
    dtype = DTYPES[config.model.dtype]
    with process_group():
        with clock.measure("load"):
            model, before = _policy(config, model_folder, base_folder)
            vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
            shard(model, dtype=dtype)
            optimiser = Optimiser(model, config.trainer)
            if state_folder is None:
                torch.manual_seed(config.loop.seed)
            else:
                read_state(model, optimiser, state_folder, version=iteration, weights=before, dtype=dtype)

        with clock.measure("forward"):
            plan = _micro_batches(batch, vocabulary)
            temperature = config.rollout.temperature
            if len(plan) > 1:
                plan = [with_old(model, part, temperature=temperature) for part in plan]
            if base_folder is not None and config.algorithm.kl_coefficient > 0:
                with _reference(config, model, base_folder, dtype) as reference:
                    plan = [with_reference(reference, part, temperature=temperature) for part in plan]

        with clock.measure("steps"):
            rate = learning_rate(config.trainer, iteration)
            step_metrics: list[StepMetrics] = []
            votes: list[Vote] = []
            for denominator, part in zip(batch.denominators.steps, plan, strict=True):
                metrics, step_votes = optimiser_step(model, optimiser, part, denominator, config, rate=rate)
                step_metrics.append(metrics)
                votes += step_votes

        with clock.measure("write"):
            extraction = write_weights(model, output / "weights", dtype=dtype)
            write_state(
                model, optimiser, output / "state", version=iteration + 1, weights=extraction.before, dtype=dtype
            )
            if config.trainer.lora_rank and dist.get_rank() == 0:
                write_config(output / "state" / "adapter", config.trainer)
        with clock.measure("probe"):
            tokens = probe_tokens(batch, vocabulary=vocabulary)
            probe = Probe(token_ids=tokens, logprobs=sequence_logprobs(model, tokens))

        result = TrainResult(
            version=iteration + 1,
            kind="same" if extraction.after == before else "full",
            steps=len(step_metrics),
            optimiser_steps=optimiser.steps,
            metrics=_summary(step_metrics, batch, clock.seconds),
            step_metrics=step_metrics,
            votes=votes,
            extraction=extraction,
            probe=probe,
            seconds=clock.seconds,
        )
        if dist.get_rank() == 0:
            (output / "metrics.json").write_bytes(result.to_bytes())
    return result


def _check_inputs(
    config: RunConfig, iteration: int, batch: Batch, state_folder: Path | None, base_folder: Path | None
) -> None:
    d = batch.denominators
    if d.iteration != iteration:
        raise BadData(f"the batch is of iteration {d.iteration}, iteration {iteration} trains")
    if d.aggregation != config.algorithm.aggregation:
        raise BadData(
            f"denominators.json is for aggregation '{d.aggregation}', the run uses '{config.algorithm.aggregation}'"
        )
    if (iteration > 0) != (state_folder is not None):
        raise BadData(
            f"iteration {iteration} needs the trainer state of v{iteration}"
            if iteration
            else "iteration 0 starts from the base model, but a trainer state was given"
        )
    if config.algorithm.kl_coefficient > 0 and base_folder is None:
        raise BadConfig("algorithm.kl_coefficient is above 0, but no reference model was given")
    if config.trainer.lora_rank > 0 and base_folder is None:
        raise BadConfig("trainer.lora_rank is above 0, but the model below the adapters was not given")
    if [step.step for step in d.steps] != sorted({sample.step for sample in batch.samples}):
        raise BadData(
            f"denominators.json lists the steps {[step.step for step in d.steps]}, "
            f"the samples are planned for {sorted({sample.step for sample in batch.samples})}"
        )


def _micro_batches(batch: Batch, vocabulary: int) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each step."""
    rank = dist.get_rank()
    return [
        micro_batches_of(batch, step=step.step, rank=rank, vocabulary=vocabulary) for step in batch.denominators.steps
    ]


def _policy(config: RunConfig, model_folder: Path, base_folder: Path | None) -> tuple[nn.Module, str]:
    """The model that is trained, and the fingerprint of the published weights that it stands for. Adapters get theirs
    from the state."""
    if not config.trainer.lora_rank or base_folder is None:
        model = load_model(model_folder)
        return model, fingerprint(whole_weights(model, dtype=file_dtype(model_folder)))
    before = fingerprint(whole_weights(load_model(model_folder), dtype=file_dtype(model_folder)))
    model = load_model(base_folder)
    attach(model, config.trainer, seed=config.loop.seed)
    return model, before


@contextmanager
def _reference(config: RunConfig, model: nn.Module, base_folder: Path, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The frozen reference: v0, which a model with adapters is without them."""
    if config.trainer.lora_rank:
        with without_adapters(model):
            yield model
        return
    reference = load_model(base_folder).requires_grad_(False)
    shard(reference, dtype=dtype)
    yield reference


def _summary(steps: Sequence[StepMetrics], batch: Batch, seconds: dict[str, float]) -> dict[str, float]:
    """The iteration's numbers for dashboards and the summary; empty without a step."""
    if not steps:
        return {}
    tokens = sum(s.tokens for s in steps)
    means = ("loss", "ratio_mean", "clip_fraction", "entropy", "gap_mean")
    largest = ("grad_norm", "ratio_max", "gap_max", "learning_rate")
    processed = sum(len(s.token_ids) for s in batch.samples)
    summary = {name: sum(getattr(s, name) * s.tokens for s in steps) / tokens for name in means}
    summary |= {name: max(getattr(s, name) for s in steps) for name in largest}
    kls = [s.kl * s.tokens for s in steps if s.kl is not None]
    if kls:
        summary["kl"] = sum(kls) / tokens
    summary["tokens"] = tokens
    summary["sequences"] = sum(s.sequences for s in steps)
    summary["tokens_per_s"] = processed / max(seconds["forward"] + seconds["steps"], 1e-9)
    return summary


class Clock:
    """Wall seconds of named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 4)
