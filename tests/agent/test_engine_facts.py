"""What an agent reads in an engine's /server_info: whether it serves adapters, and how many ranks a sender would meet.

The engine here is a small HTTP server that answers as SGLang 0.5.23 does, for sizes that no test machine has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from colchis.components.agent.engine import Engine, EngineChecksums, EngineFacts
from colchis.components.weights.checksums import predict
from tests.weights.models import config_of, write_model

SGLANG = {
    "random_seed": 7,
    "dtype": "bfloat16",
    "device": "cuda",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "enable_lora": True,
    "max_lora_rank": 16,
    "lora_target_modules": ["q_proj", "v_proj"],
}
"""A server that was started with `--enable-lora --max-lora-rank 16 --lora-target-modules q_proj v_proj`."""

Ask = Callable[[dict[str, Any]], EngineFacts]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """The facts about an engine that gives this answer to /server_info."""
    info: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/server_info": info, "/model_info": {"weight_version": "3"}}
            body = json.dumps(answers.get(self.path, {})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    engine = Engine(f"http://127.0.0.1:{server.server_address[1]}")

    def facts(answer: dict[str, Any]) -> EngineFacts:
        info.clear()
        info.update(answer)
        return engine.facts()

    yield facts
    engine.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("sizes", "receivers", "adapter_rank"),
    [
        ({}, 1, 16),
        ({"tp_size": 4}, 4, 16),
        ({"tp_size": 8, "ep_size": 8}, 8, 16),
        ({"pp_size": 2}, 0, 16),
        ({"tp_size": 2, "pp_size": 2}, 0, 16),
        ({"dp_size": 2}, 0, 0),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 0, 0),
        ({"tp_size": 4, "pp_size": 2, "dp_size": 2}, 0, 0),
    ],
)
def test_sizes_decide_what_an_engine_can_be_sent(
    ask: Ask, sizes: dict[str, Any], receivers: int, adapter_rank: int
) -> None:
    """Catches a sender that waits for more ranks than meet it, or for fewer; one whose ranks two stages of a pipeline claim; and
    a transfer, or an adapter, that an engine with replicas of its own refuses by an assertion in the middle of a reload."""
    facts = ask(SGLANG | sizes)
    assert (facts.receivers, facts.adapter_rank) == (receivers, adapter_rank)
    assert facts.shards == sizes.get("tp_size", 1) * sizes.get("pp_size", 1)


@pytest.mark.parametrize(
    ("lora", "rank", "targets"),
    [
        ({}, 16, {"q_proj", "v_proj"}),
        ({"lora_target_modules": ["all"]}, 16, None),
        ({"lora_target_modules": None}, 16, None),
        ({"enable_lora": False}, 0, {"q_proj", "v_proj"}),
        ({"enable_lora": None, "lora_target_modules": None}, 0, None),
        ({"max_lora_rank": None}, 0, {"q_proj", "v_proj"}),
    ],
)
def test_what_an_engine_takes_as_an_adapter(
    ask: Ask, lora: dict[str, Any], rank: int, targets: set[str] | None
) -> None:
    """Catches an adapter that is prepared for an engine which serves none, or none of its rank or layers, instead of the merged
    version."""
    facts = ask(SGLANG | lora)
    assert facts.adapter_rank == rank
    assert facts.adapter_targets == targets


@pytest.mark.parametrize(("receives", "receivers"), [(True, 1), (False, 0)])
def test_an_embedded_engine_says_itself_whether_it_receives(ask: Ask, receives: bool, receivers: int) -> None:
    """Catches a sender that waits for an embedded engine without a model, which has nothing to receive into."""
    info = {"engine": "colchis-embedded", "start_id": "x", "dtype": "float32", "receives_weights": receives}
    facts = ask(info)
    assert (facts.receivers, facts.adapter_rank, facts.shards) == (receivers, 0, 1)


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_every_replica_of_an_engine_is_held_against_the_prediction(tmp_path: Path, wrong: int | None) -> None:
    """Catches a replica (`--dp-size`) that kept its old weights, or loaded others, beside one that is right."""
    prediction, other = (predict(write_model(tmp_path / f"{seed}", config_of(), seed)) for seed in (0, 1))
    assert prediction is not None
    assert other is not None
    ranks = tuple((other if rank == wrong else prediction).checksums for rank in range(2))
    differing = EngineChecksums(ranks).differences(prediction)
    assert differing == ([] if wrong is None else sorted(prediction.checksums))
