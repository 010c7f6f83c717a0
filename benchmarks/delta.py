"""What a delta saves and costs: its size, and the time to make and apply it, against reading the whole version.

A generated model in bfloat16, of which a share of the elements moved by one unit in the last place. The bound is what every
transfer pays anyway: sha256 over the version's bytes, on one core; encode and apply use all cores there are.

    python benchmarks/delta.py --elements 100000000
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from colchis.components.weights.delta import apply, encode

SHARES = (0.001, 0.01, 0.1, 1.0)
LAYERS = 16
BASE, RESULT = "a" * 64, "b" * 64


def write_versions(folder: Path, elements: int, share: float) -> tuple[list[Path], list[Path]]:
    """Two versions of a model of LAYERS equal tensors."""
    size = elements // LAYERS
    header = {
        f"layers.{i}": {"dtype": "BF16", "shape": [size], "data_offsets": [2 * size * i, 2 * size * (i + 1)]}
        for i in range(LAYERS)
    }
    text = json.dumps(header).encode()
    noise = np.random.default_rng(0)
    paths = [folder / name / "model.safetensors" for name in ("base", "new")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    for _ in range(LAYERS):
        old = (noise.standard_normal(size, np.float32).view("<u4") >> 16).astype("<u2")
        moved = (noise.random(size, np.float32) < share).astype("<u2")
        for path, bits in zip(paths, (old, old + moved), strict=True):
            with path.open("ab") as file:
                file.write(bits.tobytes())
    return paths[:1], paths[1:]


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """The best of some rounds."""
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def measure(folder: Path, elements: int, share: float, rounds: int) -> dict[str, float | None]:
    base, new = write_versions(folder, elements, share)
    delta, out = folder / "delta", folder / "out"
    out.mkdir(exist_ok=True)
    words: dict[str, Any] = {"base_version": 0, "version": 1, "base_digest": BASE, "digest": RESULT}
    encoded = encode(base, new, delta, **words)
    bound_s = seconds(lambda: hashlib.sha256(new[0].read_bytes()), rounds)
    encode_s = seconds(lambda: encode(base, new, delta, **words), rounds)
    if encoded is None:
        return {"changed": share, "size": None, "encode": encode_s / bound_s, "apply": None}
    apply_s = seconds(lambda: apply(delta, base, out, base_digest=BASE), rounds)
    assert (out / "model.safetensors").read_bytes() == new[0].read_bytes()
    return {
        "changed": share,
        "size": encoded.bytes / encoded.full_bytes,
        "encode": encode_s / bound_s,
        "apply": apply_s / bound_s,
    }


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(1000), default=50_000_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(elements: int, rounds: int, as_json: bool) -> None:
    rows = []
    for share in SHARES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), elements, share, rounds))
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo(f"{'changed':>8} {'size/full':>10} {'encode/sha256':>14} {'apply/sha256':>13}")
    for row in rows:
        cells = [row["size"], row["encode"], row["apply"]]
        texts = ["full" if cell is None else f"{cell:.3f}" for cell in cells]
        click.echo(f"{row['changed']:>8} {texts[0]:>10} {texts[1]:>14} {texts[2]:>13}")


if __name__ == "__main__":
    main()
