"""Pause of an activation through the agent against a bare load of the same weights by an idle engine, in one run.

Two engines of one kind: the first is activated by its agent, version after version, while somebody asks it for tokens; the
second is idle and only told to load the same weights. Turns alternate, medians count.

`bare`: seconds of /update_weights_from_disk. `agent`: the pause as the boundary record reports it. `observer`: the longest
answer that a client of the first engine, one token a request, got while it was activated, less its usual answer. The pause
begins when the step under way has ended, and holds more than the load: the flush and a label. The client also waits for parts
of the proof, which is made when the engine serves again; `proof` is how long that takes.
`direct`: the pause when a sender broadcasts the same weights into the engine (`reload.transfer: gloo`), here over loopback.

Examples: python benchmarks/activation.py --repeats 7 --json activation.json
          python benchmarks/activation.py --engine sglang --size small
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
from rich.console import Console
from rich.table import Table

from colchis.components.direct.sender import Sender
from colchis.components.store import Store, keys, upload_input
from colchis.components.weights import Agents, activate_all, build, prepare_all, publish, read_manifest
from colchis.workflows.local.services import Pool, start_pool
from colchis.workflows.local.weed import Weed

RUN = "benchmark"
DEADLINE_S = 600.0
FACTOR, SLACK_S = 1.1, 0.05
"""The target: at most the bare load times FACTOR plus SLACK_S."""

MAKE_MODELS = """
import sys, torch
from pathlib import Path
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
folder, fields = Path(sys.argv[1]), __import__("json").loads(sys.argv[2])
for version in (0, 1):
    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.save_pretrained(folder / f"v{version}")
    words = {f"w{number}": number for number in range(100)}  # SGLang does not start without a tokenizer
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / f"v{version}")
print(sum(p.numel() for p in model.parameters()))
"""
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "qwen2",
        "vocab_size": 100,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "medium": {  # the shape of SmolLM-135M
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "large": {  # the shape of Qwen2.5-0.5B
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}


@dataclass(frozen=True)
class Result:
    """Medians of one size."""

    size: str
    parameters: int
    bare_s: float
    agent_s: float
    observer_s: float
    load_s: float
    """The agent's own load, inside its pause."""
    direct_s: float
    proof_s: float

    @property
    def target_s(self) -> float:
        return FACTOR * self.bare_s + SLACK_S


class Observer:
    """A client that asks for one token after the other and remembers how long each answer took."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self._address = urlsplit(url).netloc
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(DEADLINE_S)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=DEADLINE_S)
        body = json.dumps({"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}})
        while not self._end.is_set():
            started = time.perf_counter()
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
            if reply.status != 200:
                raise RuntimeError(f"/generate answered {reply.status}: {content[:200]!r}")
            self.seconds.append(time.perf_counter() - started)
        connection.close()

    def pause_s(self) -> float:
        return max(self.seconds) - statistics.median(self.seconds)


def publish_versions(store: Store, folder: Path) -> None:
    """Four versions in the store, as a run would have them: v2 and v3 are v0 and v1 once more, which nobody fetches."""
    model = upload_input(store, folder / "v0")
    for version in range(4):
        path = folder / f"v{version % 2}" / "model.safetensors"
        payload = store.upload(keys.iteration_prefix(RUN, version) + "benchmark/model.safetensors", path)
        manifest = build(
            run=RUN,
            version=version,
            base_version=version - 1 if version else None,
            kind="full",
            files=[(payload, path)],
            model=model,
            step=version,
        )
        publish(store, manifest)


def forget(folder: Path) -> None:
    """Let the page cache drop the files in `folder`: a store is elsewhere, and takes no memory of an engine's node."""
    os.sync()
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def activate(pool: Pool, store: Store, version: int, sent_from: Path | None = None) -> dict[str, Any]:
    """Boundaries 3 and 4 of the first engine; what the record of the fourth proves. `sent_from`: the folder of a sender."""
    manifest = read_manifest(store, RUN, version)
    sender = None if sent_from is None else Sender(manifest, sent_from, backend="gloo")
    async with Agents([pool.engines[0].agent_url], pool.token) as agents:
        await prepare_all(agents, manifest, direct=sender is not None, deadline_s=DEADLINE_S)
        proof = (await activate_all(agents, manifest, sender=sender, deadline_s=DEADLINE_S))[0].proof
    assert proof["direct"] == (sender is not None)
    return proof


def bare_load(client: httpx.Client, path: Path) -> float:
    """Seconds that an idle engine needs to load a folder."""
    started = time.perf_counter()
    client.post("/update_weights_from_disk", json={"model_path": str(path)}).raise_for_status()
    return time.perf_counter() - started


def measure(kind: str, size: str, store: Store, folder: Path, repeats: int) -> Result:
    fields = json.dumps({**SIZES[size], **COMMON})
    made = subprocess.run(
        [sys.executable, "-c", MAKE_MODELS, str(folder / "models"), fields], check=True, stdout=subprocess.PIPE
    )
    publish_versions(store, folder / "models")
    environment = store.settings.to_environment()
    bare, paused, observed, loads, direct, proofs = (list[float]() for _ in range(6))
    with (
        start_pool(
            "bench",
            replicas=2,
            kind=kind,
            folder=folder / "pool",
            store_environment=environment,
            model=folder / "models" / "v0",
        ) as pool,
        httpx.Client(base_url=pool.engines[1].engine_url, timeout=DEADLINE_S) as idle,
    ):
        for version in (0, 1):  # both versions loaded once: no first time is measured
            bare_load(idle, folder / "models" / f"v{version}")
            asyncio.run(activate(pool, store, version))
        asyncio.run(activate(pool, store, 2, folder / "models" / "v0"))
        forget(folder / "weed")
        for turn in range(repeats):
            version = turn % 2
            bare.append(bare_load(idle, folder / "models" / f"v{version}"))
            with Observer(pool.engines[0].engine_url) as observer:
                proof = asyncio.run(activate(pool, store, version))
            paused.append(proof["pause_s"])
            loads.append(proof["load_s"])
            proofs.append(proof["proof_s"])
            observed.append(observer.pause_s())
            other = 1 - version
            sent = asyncio.run(activate(pool, store, 2 + other, folder / "models" / f"v{other}"))
            direct.append(sent["pause_s"])
    medians = [statistics.median(values) for values in (bare, paused, observed, loads, direct, proofs)]
    return Result(size, int(made.stdout.split()[-1]), *medians)


@click.command(help=__doc__)
@click.option("--engine", "kind", type=click.Choice(["embedded", "sglang"]), default="embedded", show_default=True)
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SIZES)), help="[default: all]")
@click.option("--repeats", default=7, show_default=True, help="Activations and bare loads of each size.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers to this file as well.")
def main(kind: str, sizes: tuple[str, ...], repeats: int, json_path: Path | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    for size in sizes or tuple(SIZES):
        with tempfile.TemporaryDirectory() as name, Weed(Path(name) / "weed") as weed:
            results.append(measure(kind, size, Store(weed.settings), Path(name), repeats))
    table = Table(title=f"{kind} engine, medians of {repeats}, {os.cpu_count()} cores")
    for column in (
        "size",
        "parameters",
        "bare load s",
        "pause s",
        "observer s",
        "load s",
        "direct s",
        "proof s",
        "target s",
        "met",
    ):
        table.add_column(column, justify="left" if column == "size" else "right")
    for r in results:
        seconds = (r.bare_s, r.agent_s, r.observer_s, r.load_s, r.direct_s, r.proof_s, r.target_s)
        met = "yes" if r.agent_s <= r.target_s else "no"
        table.add_row(r.size, f"{r.parameters / 1e6:.2f} M", *(f"{s:.3f}" for s in seconds), met)
    Console().print(table)
    if json_path is not None:
        rows = [{**asdict(r), "target_s": r.target_s} for r in results]
        json_path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
