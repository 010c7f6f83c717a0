"""What a delta saves and costs: its size, and the time to make and apply it, against reading the whole version.

A generated model in bfloat16, of which a share of the elements moved by one unit in the last place. The bound is what every
transfer pays anyway: sha256 over the version's bytes, on one core; encode and apply use all cores there are.

    python benchmarks/delta.py --elements 100000000
    python benchmarks/delta.py --step 1e-6

`--step` takes a model of SmolLM's shape (135 million parameters, weights drawn with its deviation of 0.04) and one step of
AdamW on float32 masters at that learning rate instead, by the gradient of the likelihood of random tokens. From its second
step on Adam moves an element by less than the whole rate, so later steps change fewer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
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


STEP = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
folder, rate = Path(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, initializer_range=0.041666666666666664))
def save(name):
    copy = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
    from safetensors.torch import save_file
    (folder / name).mkdir(exist_ok=True)
    save_file(copy, folder / name / "model.safetensors")
    return copy
for p in model.parameters():
    p.data = p.data.bfloat16().float()
old = save("base")
tokens = torch.randint(0, 49152, (4, 64))
model(input_ids=tokens, labels=tokens).loss.backward()
torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0).step()
new = save("new")
print(sum(int((old[n] != new[n]).sum()) for n in old) / sum(t.numel() for t in old.values()))
"""


def write_step(folder: Path, rate: float) -> tuple[list[Path], list[Path], float]:
    """A version before and after one optimiser step, and the share of elements that it changed."""
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(folder), str(rate)], check=True, stdout=subprocess.PIPE, text=True
    )
    paths = [folder / name / "model.safetensors" for name in ("base", "new")]
    return paths[:1], paths[1:], float(done.stdout)


def measure(folder: Path, base: list[Path], new: list[Path], share: float, rounds: int) -> dict[str, float | None]:
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
@click.option("--step", "rate", type=float, help="Learning rate of one real step.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(elements: int, rate: float | None, rounds: int, as_json: bool) -> None:
    rows = []
    for wanted in SHARES if rate is None else (rate,):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if rate is None:
                (base, new), share = write_versions(folder, elements, wanted), wanted
            else:
                base, new, share = write_step(folder, rate)
            rows.append(measure(folder, base, new, share, rounds))
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo(f"{'changed':>8} {'size/full':>10} {'encode/sha256':>14} {'apply/sha256':>13}")
    for row in rows:
        cells = [row["size"], row["encode"], row["apply"]]
        texts = ["full" if cell is None else f"{cell:.3f}" for cell in cells]
        click.echo(f"{row['changed']:>8.4f} {texts[0]:>10} {texts[1]:>14} {texts[2]:>13}")


if __name__ == "__main__":
    main()
