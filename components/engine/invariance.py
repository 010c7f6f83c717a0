"""Deterministic mode: finds the row padding under which a row's bits don't depend on the rows beside it.

A CPU matrix product picks its kernel by the number of rows; within one kernel each row is summed in the same order.
So it is enough to pad row counts until one kernel serves all: which multiple that takes depends on the CPU, the BLAS
and the shapes, and is measured here on the weights that will serve.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from colchis.components.engine.architecture import Architecture
from colchis.components.engine.decoder import BLOCK_TOKENS, WINDOWS
from colchis.components.engine.weights import StaticWeights
from colchis.components.errors import BadConfig

QUANTA = (16, 32, 64, 128)
MULTIPLES = (1, 2, 3, 4, 6, 8)


def _invariant(weight: torch.Tensor, quantum: int) -> bool:
    """Whether one row times `weight` [out, in] gives the same bits at several places of several row counts."""
    generator = torch.Generator().manual_seed(quantum)
    row = torch.randn(weight.shape[1], generator=generator).to(weight.dtype)
    reference: torch.Tensor | None = None
    for multiple in MULTIPLES:
        count = quantum * multiple
        for place in (0, count // 2 + 1, count - 1):
            rows = torch.randn(count, weight.shape[1], generator=generator).to(weight.dtype)
            rows[place] = row
            plain = F.linear(rows, weight)[place]
            # The products that add a residual use another entry point of the BLAS.
            added = torch.addmm(torch.zeros(count, weight.shape[0], dtype=weight.dtype), rows, weight.t())[place]
            both = torch.stack((plain, added))
            if reference is None:
                reference = both
            elif not torch.equal(reference, both):
                return False
    return True


def find_windows(architecture: Architecture, dtype: torch.dtype) -> tuple[int, ...]:
    """The short attention windows that give the same bits as a whole block, for rows of any length that they hold."""
    a = architecture
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1, 2 * a.kv_heads, BLOCK_TOKENS, a.head_dim, generator=generator).to(dtype)
    q = torch.randn(1, a.kv_heads, a.heads // a.kv_heads, a.head_dim, generator=generator).to(dtype)

    def attend(length: int, window: int) -> torch.Tensor:
        mask = torch.zeros(1, 1, 1, window, dtype=dtype)
        mask[..., length:] = -torch.inf
        keys, values = block[:, : a.kv_heads, :window], block[:, a.kv_heads :, :window]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def agrees(window: int) -> bool:
        lengths = {1, window // 3 + 1, window // 2, window - 1, window}
        return all(torch.equal(attend(length, window), attend(length, BLOCK_TOKENS)) for length in lengths)

    with torch.inference_mode():
        return tuple(window for window in WINDOWS if agrees(window))


def find_quantum(weights: StaticWeights) -> int:
    """The smallest padding that makes every product of the model row-invariant on this machine.

    Raises BadConfig when none does: then deterministic mode cannot keep its promise here.
    """
    layer = weights.layers[0]
    products = [layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight, weights.head]
    with torch.inference_mode():
        for quantum in QUANTA:
            if all(_invariant(weight, quantum) for weight in products):
                return quantum
    dtype = str(weights.embed.dtype).removeprefix("torch.")
    raise BadConfig(
        f"--deterministic: on this CPU no row padding up to {QUANTA[-1]} makes {dtype} products independent of batch companions",
        hint="start without --deterministic or with --max-running-requests 1, or set the run's model.dtype to float32",
    )
