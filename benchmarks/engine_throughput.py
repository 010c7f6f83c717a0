"""Tokens per second of the embedded engine against a peer, in one run.

The peer is transformers' `generate` in a static batch, in this process on equal prompts, without log-probs and without HTTP;
or real SGLang on this CPU, asked the same (`make test-sglang` installs it). The engine is a real process asked over HTTP
and returns log-probs. All use one thread and sample at temperature 1. Requests come from a process of their own
(closed_loop.py), as they would from another pod: `client` is how much of one core it used. Rounds alternate between the two
sides and the best of each counts, so that a busy machine disturbs both alike.

    OMP_NUM_THREADS=1 python benchmarks/engine_throughput.py --json engine_throughput.json
    OMP_NUM_THREADS=1 python benchmarks/engine_throughput.py --peer sglang --size medium --new-tokens 16 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from colchis.components.engine.sglang_cpu import launch_command
from colchis.workflows.local.ports import free_port
from colchis.workflows.local.services import Child

PROMPT_TOKENS = 12
TURNS = {1: 64, 16: 8, 64: 8}
"""How often each of so many requests at once is sent, one after the other: the turns that a rate is taken over."""
START_DEADLINE_S = 120.0
VOCABULARY = 100
"""Prompts use these ids."""
CLOSED_LOOP = Path(__file__).with_name("closed_loop.py")


Model = Qwen2ForCausalLM | LlamaForCausalLM


@dataclass(frozen=True)
class Result:
    """Tokens per second of one case. `form`: one request with all prompts, or as many requests at once as prompts."""

    mode: str
    form: str
    concurrent: int
    new_tokens: int
    engine: float
    peer: float
    client: float
    """CPU seconds of the load generator per second, in the engine's best round."""

    @property
    def ratio(self) -> float:
        return self.engine / self.peer


@dataclass(frozen=True)
class Measured:
    """What one order to the load generator took."""

    seconds: float
    cpu_s: float
    tokens: int


class Client:
    """The load generator's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLOSED_LOOP)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, port: int, bodies: list[dict[str, Any]], repeats: int) -> Measured:
        """All bodies at once, each `repeats` times one after the other."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"port": port, "bodies": bodies, "repeats": repeats}) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline() or "{}")
        if not reply:
            raise RuntimeError("the load generator ended, see its error above")
        tokens = 0
        for answer in reply["answers"]:
            tokens += sum(len(item["output_ids"]) for item in (answer if isinstance(answer, list) else [answer]))
        return Measured(reply["seconds"], reply["cpu_s"], tokens)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def make_model(folder: Path, size: str) -> Model:
    """Random weights. `small` has 0.43 million, `medium` the 135 million of SmolLM's shape."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    model: Model
    if size == "small":
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            **common,
        )
        model = Qwen2ForCausalLM(config)
    else:
        llama = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            **common,
        )
        model = LlamaForCausalLM(llama)
    model.eval().save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))  # SGLang does not start without
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def start_engine(folder: Path, *, deterministic: bool) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    command = [sys.executable, "-m", "colchis.components.engine", "--port", str(port), "--model-path", str(folder)]
    process = subprocess.Popen([*command, *(["--deterministic"] if deterministic else [])])
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return process, port
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the engine exited with {process.returncode}") from None
            time.sleep(0.1)
    raise TimeoutError(f"the engine did not listen within {START_DEADLINE_S} s")


def prompt(number: int) -> list[int]:
    return [2 + (7 * number + place) % 97 for place in range(PROMPT_TOKENS)]


class Case:
    """Equal prompts for both sides. Eight samples share a prompt, as in a group."""

    def __init__(self, client: Client, form: str, concurrent: int, new_tokens: int) -> None:
        self.client, self.form, self.concurrent, self.new_tokens = client, form, concurrent, new_tokens
        self.prompts = [prompt(number // 8) for number in range(concurrent)]

    def over_http(self, port: int) -> Measured:
        rest = {"sampling_params": {"max_new_tokens": self.new_tokens, "ignore_eos": True}, "return_logprob": True}
        batch = self.form == "batch"
        bodies = [{"input_ids": self.prompts, **rest}] if batch else [{"input_ids": p, **rest} for p in self.prompts]
        repeats = 1 if batch or self.new_tokens > 16 else TURNS[self.concurrent]
        measured = self.client.ask(port, bodies, repeats)
        return Measured(measured.seconds / repeats, measured.cpu_s / repeats, measured.tokens // repeats)

    def by_generate(self, model: Model) -> Measured:
        ids = torch.tensor(self.prompts)
        started = time.perf_counter()
        output: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        return Measured(time.perf_counter() - started, 0.0, int((output.shape[1] - PROMPT_TOKENS) * output.shape[0]))


def compare(case: Case, mode: str, engine_port: int, peer: Callable[[Case], Measured], rounds: int) -> Result:
    """The best round of each side, after one that is not counted."""
    tokens = case.concurrent * case.new_tokens
    best: dict[str, Measured] = {}
    for round_number in range(rounds + 1):
        for name, side in (("engine", lambda c: c.over_http(engine_port)), ("peer", peer)):
            measured: Measured = side(case)
            if measured.tokens != tokens:
                raise RuntimeError(f"{measured.tokens} tokens came back, expected {tokens}")
            if round_number and (name not in best or measured.seconds < best[name].seconds):
                best[name] = measured
    ours, theirs = best["engine"], best["peer"]
    rates = (tokens / ours.seconds, tokens / theirs.seconds, ours.cpu_s / ours.seconds)
    return Result(mode, case.form, case.concurrent, case.new_tokens, *rates)


@contextmanager
def started_peer(name: str, model: Model, folder: Path) -> Iterator[Callable[[Case], Measured]]:
    """What the engine is compared with."""
    if name == "generate":
        yield lambda case: case.by_generate(model)
        return
    port = free_port()
    child = Child("sglang", launch_command(model=folder, port=port), log=folder / "sglang.log", environment={})
    try:
        child.wait_for(f"http://127.0.0.1:{port}/ready", deadline_s=400)
        yield lambda case: case.over_http(port)
    finally:
        child.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["generate", "sglang"], default="generate")
    parser.add_argument("--size", choices=["small", "medium"], default="small", help="0.43 or 135 million parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", nargs="+", default=["plain", "deterministic"], help="which of these to measure")
    parser.add_argument("--form", nargs="+", default=["batch", "requests"])
    parser.add_argument("--new-tokens", nargs="+", type=int, default=[5, 64])
    parser.add_argument("--json", type=Path, help="write the results there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    cases = [(f, n, c) for f in arguments.form for n in arguments.new_tokens for c in TURNS]
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        model = make_model(folder, arguments.size)
        print(
            f"{'mode':14} {'form':9} {'concurrent':>10} {'new':>4} {'engine tok/s':>13} {arguments.peer:>9} {'ratio':>6} "
            f"{'client':>7}"
        )
        client = Client()
        with started_peer(arguments.peer, model, folder) as peer:
            for mode in arguments.mode:
                process, port = start_engine(folder, deterministic=mode == "deterministic")
                try:
                    for form, new_tokens, concurrent in cases:
                        case = Case(client, form, concurrent, new_tokens)
                        result = compare(case, mode, port, peer, arguments.rounds)
                        results.append(result)
                        print(
                            f"{mode:14} {form:9} {concurrent:10} {new_tokens:4} {result.engine:13.0f} "
                            f"{result.peer:9.0f} {result.ratio:6.2f} {result.client:7.2f}",
                            flush=True,
                        )
                finally:
                    process.terminate()
                    process.wait(20)
        client.close()
    if arguments.json is not None:
        rows = [{**asdict(result), "ratio": result.ratio} for result in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
