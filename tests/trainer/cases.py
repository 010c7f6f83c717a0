"""Tiny models, batches with the right behaviour log-probabilities, and iterations run in processes of their own."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from colchis.components.batch import build_batch
from colchis.components.config import RunConfig
from colchis.components.records.batch import Batch
from colchis.components.trainer import TrainResult, logprobs_of, train_iteration
from tests.batch.cases import RUN, make_iteration

VOCABULARY = 32
SCORES = [[1, 0, 0, 1], [0, 1, None, 1], [0, 0, 1, 0], [1, 1, 1, 1]]
"""Three groups to train, one of them with an unscored member, and one without signal."""


def make_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random Qwen2 of 2 layers, written by transformers itself."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    Qwen2ForCausalLM(Qwen2Config(**(shape | options))).to(dtype).save_pretrained(folder)
    return folder


def make_batch(
    config: RunConfig,
    *,
    iteration: int = 0,
    model: Path | None = None,
    scores: Sequence[Sequence[float | None]] = SCORES,
    seed: int = 0,
) -> Batch:
    """A batch of random tokens; with `model`, behaviour log-probabilities are what it says (temperature 1)."""
    trajectories, verdicts = make_iteration(scores, iteration=iteration, seed=seed, vocabulary=VOCABULARY)
    if model is not None:
        said = logprobs_of(model, [t.token_ids for t in trajectories])
        trajectories = [
            replace(t, logprobs=[p if m else 0.0 for p, m in zip([0.0, *row], t.loss_mask, strict=True)])
            for t, row in zip(trajectories, said, strict=True)
        ]
    return build_batch(config, run=RUN, iteration=iteration, trajectories=trajectories, verdicts=verdicts)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def change_weights(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model folder with `change` applied to its tensors."""
    shutil.copytree(folder, target)
    tensors = weights_of(folder)
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Same names, types and bits."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def train_chain(config: RunConfig, base: Path, root: Path, iterations: Sequence[int]) -> TrainResult:
    """Consecutive iterations; each starts from the files of the one before, in `root`/v0000N."""
    result = None
    for i in iterations:
        model = base if i == 0 else root / f"v{i}" / "model"
        output = root / f"v{i + 1}"
        result = train_iteration(
            config,
            iteration=i,
            batch=make_batch(config, iteration=i),
            model_folder=model,
            state_folder=root / f"v{i}" / "state" if i else None,
            base_folder=base if config.algorithm.kl_coefficient or config.trainer.lora_rank else None,
            output=output,
        )
        as_model(base, output)
    assert result is not None
    return result


def as_model(base: Path, output: Path) -> Path:
    """The published weights of `output` as a model folder: what the stage puts together."""
    folder = output / "model"
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    shutil.copy(output / "weights" / "model.safetensors", folder)
    return folder


def in_processes(
    function: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, timeout_s: float = 120
) -> None:
    """Run `function` once per tuple, all at the same time, each in a process forked from a clean, warmed parent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["colchis.components.trainer", "transformers.models.qwen2.modeling_qwen2"])
    processes = [context.Process(target=function, args=a) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def train_as_rank(
    rank: int,
    world: int,
    rendezvous: Path,
    config: RunConfig,
    base: Path,
    output: Path,
    scores: Sequence[Sequence[float | None]],
) -> None:
    """Iteration 0 in one of `world` training processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(rendezvous), world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    train_iteration(
        config,
        iteration=0,
        batch=make_batch(config, scores=scores),
        model_folder=base,
        state_folder=None,
        base_folder=base,
        output=output,
    )
    dist.destroy_process_group()


def plain_loss_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
