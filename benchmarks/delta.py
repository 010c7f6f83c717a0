"""What a delta saves and costs: its size, and the time to make and apply it, against reading the whole version.

A generated model in bfloat16, of which a share of the elements moved by one unit in the last place. The bound is what every
transfer pays anyway: sha256 over the version's bytes, on one core; encode and apply use all cores there are.

    python -m benchmarks.delta --elements 100000000
    python -m benchmarks.delta --step 1e-6

`--step` takes a model of SmolLM's shape (135 million parameters, weights drawn with its deviation of 0.04) and one step of
AdamW on float32 masters at that learning rate instead, by the gradient of the likelihood of random tokens. From its second
step on Adam moves an element by less than the whole rate, so later steps change fewer. Of such a step two more things are
measured: the CPU seconds of encoding it, of all threads; and boundary 3 of an agent that has the version before, from a real
SeaweedFS to a verified copy on the disk, by the delta and by the whole files, in turns: on loopback, and over a link of `--mbit`.

    python -m benchmarks.delta --step 1e-6 --mbit 1000
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np

from benchmarks.link import Link
from colchis.components.agent.staging import Staging
from colchis.components.store import Store, StoreSettings, upload_input
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.delta import apply, encode
from colchis.workflows.local.weed import Weed
from tests.weights.models import publish_version

SHARES = (0.001, 0.01, 0.1, 1.0)
LAYERS = 16
DEADLINE_S = 3600.0
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
model.config.save_pretrained(folder / "base")
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
    used_s = time.process_time()
    encode_s = seconds(lambda: encode(base, new, delta, **words), rounds)
    encode_cpu_s = (time.process_time() - used_s) / rounds
    row: dict[str, float | None] = {"changed": share, "size": None, "encode": encode_s / bound_s, "apply": None}
    row |= {"encode_s": encode_s, "encode_cpu_s": encode_cpu_s, "encode_cpu": encode_cpu_s / bound_s}
    if encoded is None:
        return row
    apply_s = seconds(lambda: apply(delta, base, out, base_digest=BASE), rounds)
    assert (out / "model.safetensors").read_bytes() == new[0].read_bytes()
    return {**row, "size": encoded.bytes / encoded.full_bytes, "apply": apply_s / bound_s}


def measure_fetch(folder: Path, rounds: int, mbit: float | None) -> dict[str, float]:
    """Best seconds of boundary 3 by whole files and by the delta, of versions that `write_step` wrote."""
    base, new = folder / "base", folder / "new"
    with ExitStack() as stack:
        weed = stack.enter_context(Weed(folder / "weed"))
        store = Store(weed.settings)
        model = upload_input(store, base)
        for run, delta_from in (("full", None), ("delta", base)):
            publish_version(store, base, model=model, version=0, run=run)
            publish_version(store, new, model=model, version=1, run=run, base=delta_from)
        settings = weed.settings
        if mbit is not None:
            parts = urlsplit(settings.endpoint)
            assert parts.hostname
            assert parts.port
            link = stack.enter_context(Link((parts.hostname, parts.port), mbit))
            settings = replace(settings, endpoint=link.url)
        found: dict[str, list[float]] = {"full": [], "delta": []}
        for _ in range(rounds):
            for run, times in found.items():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    times.append(fetch(Path(scratch), weed.settings, settings, run))
    best = {run: min(times) for run, times in found.items()}
    return {
        "mbit": mbit or 0.0,
        "full_s": best["full"],
        "delta_s": best["delta"],
        "ratio": best["full"] / best["delta"],
    }


def fetch(folder: Path, near: StoreSettings, settings: StoreSettings, run: str) -> float:
    """Seconds of v1 into a buffer that has v0."""
    staging = Staging(folder)
    try:
        staging.fill(Store(near), run, 0, set(), Deadline(DEADLINE_S))
        store = Store(settings)
        started = time.perf_counter()
        staging.fill(store, run, 1, {(run, 0)}, Deadline(DEADLINE_S))
        return time.perf_counter() - started
    finally:
        staging.close()


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(1000), default=50_000_000, show_default=True)
@click.option("--step", "rate", type=float, help="Learning rate of one real step.")
@click.option("--mbit", type=click.FloatRange(1), multiple=True, help="With --step: a link of so many Mbit/s as well.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def main(elements: int, rate: float | None, mbit: tuple[float, ...], rounds: int, as_json: bool) -> None:
    rows, fetches = [], []
    for wanted in SHARES if rate is None else (rate,):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if rate is None:
                (base, new), share = write_versions(folder, elements, wanted), wanted
            else:
                base, new, share = write_step(folder, rate)
            rows.append(measure(folder, base, new, share, rounds))
            if rate is not None:
                fetches = [measure_fetch(folder, rounds, link) for link in (None, *mbit)]
    if as_json:
        click.echo(json.dumps({"deltas": rows, "fetches": fetches}))
        return
    click.echo(f"{'changed':>8} {'size/full':>10} {'encode/sha256':>14} {'the same by CPU':>16} {'apply/sha256':>13}")
    for row in rows:
        cells = [row["size"], row["encode"], row["encode_cpu"], row["apply"]]
        texts = ["full" if cell is None else f"{cell:.3f}" for cell in cells]
        click.echo(f"{row['changed']:>8.4f} {texts[0]:>10} {texts[1]:>14} {texts[2]:>16} {texts[3]:>13}")
    for row in fetches:
        link = f"{row['mbit']:g} Mbit/s" if row["mbit"] else "loopback"
        click.echo(
            f"boundary 3 over {link}: {row['full_s']:.2f} s whole, {row['delta_s']:.2f} s by the delta, {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
