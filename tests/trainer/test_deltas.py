"""Deltas of what a torch module holds, from its parameters to the files of the next version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from colchis.components.records.weights import weights_digest
from colchis.components.trainer.model import published
from colchis.components.trainer.state import write_weights
from colchis.components.weights import delta
from colchis.components.weights.delta import apply, encode
from colchis.components.weights.manifest import describe

SHAPES = [(1, 1), (1, 7), (5, 1), (4, 6), (16, 16), (33, 17)]


def plain(data: Tensor) -> Tensor:
    return data


def transposed(data: Tensor) -> Tensor:
    """Columns follow each other in memory."""
    return data.t().contiguous().t()


def strided(data: Tensor) -> Tensor:
    """Every other element of a wider storage, which begins before it."""
    rows, columns = data.shape
    wide = torch.full((rows + 1, 2 * columns), 9.0)
    wide[1:, ::2] = data
    return wide[1:, ::2]


def expanded(data: Tensor) -> Tensor:
    """One row in memory for all rows."""
    return data[:1].expand(data.shape)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [plain, transposed, strided, expanded]


class Module(nn.Module):
    """Parameters of given layouts, the first of them under a second name; two that are halves of one storage; a buffer."""

    def __init__(
        self, layouts: list[tuple[Callable[[Tensor], Tensor], tuple[int, int]]], generator: torch.Generator
    ) -> None:
        super().__init__()
        for number, (layout, shape) in enumerate(layouts):
            data = torch.randn(shape, generator=generator)
            self.register_parameter(f"w{number}", nn.Parameter(layout(data)))
        self.register_parameter("a_tied_name", self.w0)
        both = torch.randn(6, 5, generator=generator)
        self.upper, self.lower = nn.Parameter(both[:3]), nn.Parameter(both[3:])
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def step(self, share: float, generator: torch.Generator) -> None:
        """In place, as an optimiser does, so that layouts stay what they are."""
        self.steps += 1
        for parameter in self.parameters():
            data = parameter.data
            stored = data[:1] if data.stride(0) == 0 else data
            moves = torch.rand(stored.shape, generator=generator) < share
            stored += moves * torch.randn(stored.shape, generator=generator)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    layouts=st.lists(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(SHAPES)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=3),
    file_bytes=st.sampled_from([64, 4 << 30]),
    seed=st.integers(0, 2**31),
)
def test_a_delta_of_tied_and_strided_parameters_is_the_full_version(
    layouts: Any,
    dtype: torch.dtype,
    shares: list[float],
    file_bytes: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    alone: None,
) -> None:
    """Catches a view that is written in the order of its storage, with elements that are not its own, or at the place of its
    neighbour; and a tied parameter that is written twice, or under a name that changes from one version to the next."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 256)
    monkeypatch.setattr(delta, "LARGEST_SHARE", 1e9)  # also where the full files would be taken
    folder, generator = tmp_path_factory.mktemp("delta"), torch.Generator().manual_seed(seed)
    module = Module(layouts, generator)
    write_weights(module, folder / "v0", dtype=dtype, file_bytes=file_bytes)
    held = sorted((folder / "v0").iterdir())  # by the engine's side, which gets nothing but deltas from now on
    for version, share in enumerate(shares, start=1):
        module.step(share, generator)
        write_weights(module, folder / f"v{version}", dtype=dtype, file_bytes=file_bytes)
        full = sorted((folder / f"v{version}").iterdir())
        base_digest, digest = weights_digest(describe(held)), weights_digest(describe(full))
        assert encode(
            held,
            full,
            folder / "delta",
            base_version=version - 1,
            version=version,
            base_digest=base_digest,
            digest=digest,
        )
        (folder / f"held{version}").mkdir()
        held = sorted(apply(folder / "delta", held, folder / f"held{version}", base_digest=base_digest))
        assert [p.read_bytes() for p in held] == [p.read_bytes() for p in full]

    found = {name: tensor for path in held for name, tensor in load_file(path).items()}
    expected = {name: t.clone() for name, t in module.state_dict().items() if name != "a_tied_name"}
    assert found.keys() == expected.keys() == published(module).keys()
    for name, tensor in expected.items():
        written = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == written.dtype
        assert torch.equal(found[name], written), name
