"""AdamW over this rank's shards of the fp32 masters, its schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colchis.components.config import TrainerConfig
from colchis.components.errors import BadData
from colchis.components.trainer.model import local, part_of, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: TrainerConfig, iteration: int) -> float:
    """Of all optimiser steps of `iteration`, from 0.

    Warm-up of w iterations: peak * (i + 1) / (w + 1), so that no iteration is spent on a rate of zero. After it the
    schedule falls from the peak at iteration w to zero at `schedule_iterations`, and stays there.
    """
    w = config.warmup_iterations
    if iteration < w:
        return config.learning_rate * (iteration + 1) / (w + 1)
    if config.schedule == "constant" or config.schedule_iterations is None:
        return config.learning_rate
    progress = min(1.0, (iteration - w) / (config.schedule_iterations - w))
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2


class Optimiser:
    """torch's AdamW on plain local tensors that share memory with the sharded model.

    AdamW is element-wise, so a shard is stepped like the whole; plain tensors spare DTensor's dispatch, which costs
    more than the step itself on small models. Weight decay applies to all parameters that are trained: all of the model, or
    its adapters.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: nn.Parameter(local(p.detach())) for name, p in self.parameters.items()}
        self.max_grad_norm = config.max_grad_norm
        self.adamw = torch.optim.AdamW(
            self.masters.values(),
            lr=0.0,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps = 0

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shards; zero for a parameter that the loss does not reach, so that all are stepped equally."""
        return {
            name: local(p.grad) if p.grad is not None else torch.zeros_like(self.masters[name])
            for name, p in self.parameters.items()
        }

    def step(self, gradients: Mapping[str, Tensor], *, norm: float, rate: float) -> None:
        """One step of AdamW with gradients scaled down to `max_grad_norm` when their `norm` exceeds it."""
        scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
        for name, master in self.masters.items():
            master.grad = gradients[name] * scale if scale < 1.0 else gradients[name]
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.steps += 1
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def moments(self) -> dict[str, Tensor]:
        """Full tensors `exp_avg/NAME` and `exp_avg_sq/NAME`; none before the first step. A collective."""
        return {
            f"{kind}/{name}": whole(self.adamw.state[master][kind], self.parameters[name])
            for name, master in self.masters.items()
            for kind in MOMENTS
            if self.steps
        }

    def restore(self, moments: Mapping[str, Tensor], *, steps: int) -> None:
        """Inverse of `moments`. BadData names a tensor that is missing, unknown or of another shape."""
        expected = {f"{kind}/{name}" for name in self.masters for kind in MOMENTS} if steps else set()
        if expected != set(moments):
            raise BadData(f"optimiser state: tensor '{min(expected ^ set(moments))}' is missing or unknown")
        self.steps = steps
        if not steps:
            return
        for name, master in self.masters.items():
            state: dict[str, Tensor] = {"step": torch.tensor(float(steps))}
            for kind in MOMENTS:
                full = moments[f"{kind}/{name}"]
                if full.shape != self.parameters[name].shape or full.dtype != torch.float32:
                    raise BadData(
                        f"optimiser state: '{kind}/{name}' is {full.dtype} {list(full.shape)}, "
                        f"the model has {list(self.parameters[name].shape)}"
                    )
                state[kind] = part_of(full, self.parameters[name]).clone()
            self.adamw.state[master] = state


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all shards of all ranks, summed in float64. A collective."""
    norms = [torch.linalg.vector_norm(g.float()) for g in gradients.values()]
    squares = torch.stack(norms).double().square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())
