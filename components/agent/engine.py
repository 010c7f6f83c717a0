"""The engine as its agent sees it: SGLang's control routes, each with a deadline and with its answer read in full."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from colchis.components.errors import BadConfig, BadData, PeerUnavailable
from colchis.components.weights.buckets import TORCH_NAMES, Bucket
from colchis.components.weights.checksums import Prediction
from colchis.components.weights.protocol import Offer

PROBE_TIMEOUT_S = 3.0
"""For questions that an idle engine answers in milliseconds."""
DIRTY = "cache was not flushed"
"""SGLang's 400 that means: the weights are the new ones, and keys and values of the old ones are still there."""

EMBEDDED = "colchis-embedded"
AS_WRITTEN, UNKNOWN = "as written", "unknown"

PauseMode = Literal["retract", "abort"]


@dataclass(frozen=True)
class EngineFacts:
    """What the engine says about itself."""

    start: str
    """Differs between two starts of the engine; empty where an engine offers nothing to tell them apart."""
    label: str
    """Its weight_version: a free text that anybody may have set."""
    dtype: str
    """Of its weights: `float32`, ...; AS_WRITTEN where the first that it loads decide; UNKNOWN where it does not say."""
    device: str
    shards: int
    """Ranks that share one copy of the model: tensor times pipeline parallelism."""
    adapter_rank: int
    """Largest rank of an adapter that it serves beside its weights; 0: it serves none."""
    adapter_targets: frozenset[str] | None
    """Layers that adapters may change; None: any."""
    receivers: int
    """Ranks that can receive a version from a sender; 0: it can only load one."""
    paused: bool
    """It is well and takes no request; also an embedded engine that has no weights yet."""

    def serves(self, dtype: str) -> bool:
        """Whether weights of that type stay as they are in it, as far as it says."""
        return self.dtype in (dtype, UNKNOWN) or (self.dtype == AS_WRITTEN and dtype in ("float32", "bfloat16"))


@dataclass(frozen=True)
class EngineChecksums:
    """What /weights_checker reported: per rank, tensor name -> hash."""

    ranks: tuple[Mapping[str, str], ...]

    @property
    def tensors(self) -> Mapping[str, str]:
        """Of the first rank."""
        return self.ranks[0]

    def differences(self, prediction: Prediction) -> list[str]:
        """Names of tensors that are not the predicted ones, sorted. Each rank is a replica then, with all of the model: an engine
        that is cut otherwise is not predicted."""
        return sorted({name for tensors in self.ranks for name in prediction.differences(tensors)})

    @property
    def whole(self) -> str:
        """Over all tensors of all ranks, as SGLang itself computes it (`per_engine_checksum`)."""
        digest = hashlib.sha256()
        for tensors in self.ranks:
            rank = hashlib.sha256()
            for name in sorted(tensors):
                rank.update(f"{name}{tensors[name]}".encode())
            digest.update(rank.hexdigest().encode())
        return digest.hexdigest()

    def with_more(self, other: EngineChecksums) -> EngineChecksums:
        """Those of further tensors added. BadData when they are of other ranks."""
        if len(other.ranks) != len(self.ranks):
            raise BadData(
                f"the engine reports {len(other.ranks)} ranks after {len(self.ranks)}", where="/weights_checker"
            )
        return EngineChecksums(tuple({**a, **b} for a, b in zip(self.ranks, other.ranks, strict=True)))


@dataclass(frozen=True)
class Answer:
    """One generated answer, as far as a probe needs it."""

    prompt_logprobs: list[float | None]
    """Of every prompt token; the first has none."""
    prompt_token_ids: list[int]
    cached_tokens: int
    weight_version: str

    def of(self, token_ids: Sequence[int], *, vocabulary: int) -> list[float]:
        """Log-probabilities of `token_ids[1:]`. BadData when the engine answered for other tokens.

        SGLang names the vocabulary's last token 0 in what it answers; its numbers are those of the token that was asked.
        """
        found = [value for value in self.prompt_logprobs[1:] if value is not None]
        named = zip(self.prompt_token_ids, token_ids, strict=False)
        same = all(name == asked or (name, asked) == (0, vocabulary - 1) for name, asked in named)
        if not same or len(self.prompt_token_ids) != len(token_ids) or len(found) != len(token_ids) - 1:
            raise BadData("the engine answered log-probabilities of other tokens than it was asked", where="/generate")
        return found


class Unanswered(PeerUnavailable):
    """Nobody knows whether the engine does what it was asked: it may have begun, or begin yet."""


class Engine:
    """Client of one engine. Every method raises PeerUnavailable when there is no answer in time, BadData on a refusal,
    BadConfig on a key that is missing or wrong.

    `key` opens /generate and the reading routes, `admin_key` the controlling ones (SGLang keeps them apart when both
    are set).
    """

    def __init__(self, url: str, *, key: str | None = None, admin_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key, self.admin_key = key, admin_key or key
        self._client = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=4))

    def close(self) -> None:
        self._client.close()

    def facts(self, timeout_s: float = PROBE_TIMEOUT_S) -> EngineFacts:
        """Identity, label, type and placement."""
        info = self._read("/server_info", timeout_s)
        embedded = info.get("engine") == EMBEDDED
        return EngineFacts(
            start=_start(info),
            label=self.label(timeout_s),
            dtype=_dtype(info),
            device=str(info.get("device", "cpu" if embedded else "unknown")),
            shards=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)),
            **_adapters(info),
            receivers=_receivers(info),
            paused=(self._probe("/ready", timeout_s), self._probe("/ping", timeout_s)) == (503, 200),
        )

    def start(self, timeout_s: float) -> str:
        """`EngineFacts.start` alone: one question instead of four."""
        return _start(self._read("/server_info", timeout_s))

    def label(self, timeout_s: float) -> str:
        """Its weight_version, alone."""
        return str(self._read("/model_info", timeout_s).get("weight_version"))

    def checksums(self, timeout_s: float, *, without: Sequence[str] = ()) -> EngineChecksums:
        """Hashes of the engine's own tensors, also while it is paused; of those whose names have none of `without` in them.
        SGLang draws no token meanwhile. BadData when it has no weights yet."""
        order: dict[str, Any] = {"action": "checksum"}
        if without:
            order["skip_tensor_list"] = list(without)
        ranks = self._order("/weights_checker", order, timeout_s).get("ranks") or []
        if not ranks or not (without or all(rank.get("checksums") for rank in ranks)):
            raise BadData(f"engine {self.url} reports no checksums", where="/weights_checker")
        return EngineChecksums(tuple(dict(rank["checksums"]) for rank in ranks))

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop generating. `retract`: requests in flight wait with their tokens; `abort`: they end."""
        self._order("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Generate again; harmless when nothing is paused."""
        self._order("/continue_generation", {}, timeout_s)

    def load(self, folder: str, label: str, timeout_s: float) -> bool:
        """Load a folder that is local to the engine and flush its cache, under a label.

        True: loaded, but the cache was not flushed. BadData: refused, and the engine says that it kept its weights.
        """
        order = {"model_path": folder, "weight_version": label, "flush_cache": True, "abort_all_requests": False}
        return self._loads("/update_weights_from_disk", order, timeout_s)

    def join(self, offer: Offer, timeout_s: float) -> None:
        """Meet a sender. SGLang does nothing else until all ranks are there, or the sender is gone."""
        order = {"master_address": offer.host, "master_port": offer.port, "backend": offer.backend}
        place = {"rank_offset": 1, "world_size": offer.ranks, "group_name": offer.group}
        self._order("/init_weights_update_group", {**order, **place}, timeout_s)

    def leave(self, group: str, timeout_s: float) -> None:
        """Leave a sender's group. BadData when there is none of that name."""
        self._order("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    def begin_update(self, timeout_s: float) -> None:
        """Weights may be received from now on. BadData when an update is open already."""
        self._order("/begin_weight_update", {"selector": "all"}, timeout_s)

    def end_update(self, timeout_s: float) -> None:
        """All weights were received."""
        self._order("/end_weight_update", {}, timeout_s)

    def receive(self, bucket: Bucket, group: str, label: str, *, flush: bool, timeout_s: float) -> bool:
        """Take part in one broadcast of an open update, and load what came. True: loaded, but the cache was not flushed, which
        was asked for."""
        order = {
            "names": [t.name for t in bucket.tensors],
            "dtypes": [TORCH_NAMES[t.dtype] for t in bucket.tensors],
            "shapes": [list(t.shape) for t in bucket.tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "weight_version": label,
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        return self._loads("/update_weights_from_distributed", order, timeout_s)

    def set_label(self, label: str, timeout_s: float) -> None:
        """Change the weight_version, and nothing else."""
        self._order("/update_weight_version", {"new_version": label, "abort_all_requests": False}, timeout_s)

    def load_adapter(self, name: str, folder: str, timeout_s: float) -> None:
        """Load an adapter from a folder that is local to the engine, beside what it serves. A name is given once only."""
        self._order("/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout_s)

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Forget an adapter. SGLang loads it again for a request that names it."""
        self._order("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    def adapters(self, timeout_s: float) -> dict[str, str]:
        """Name -> folder of each adapter that is loaded."""
        models = self._read("/v1/models", timeout_s).get("data") or []
        return {str(m["id"]): str(m["root"]) for m in models if m.get("parent")}

    def flush(self, timeout_s: float) -> None:
        """Empty the prefix cache; the engine must be idle or paused by retraction."""
        response = self._send("POST", "/flush_cache", None, timeout_s, self.admin_key)
        if response.status_code != 200:
            raise BadData(f"engine {self.url} did not flush its cache: {response.text[:200]}", where="/flush_cache")

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        logprobs: bool,
        extra_key: str | None,
        timeout_s: float,
        adapter: str | None = None,
    ) -> Answer:
        """One greedy token after `token_ids`; with the prompt's log-probabilities at temperature 1 if asked for.

        Token ids must be inside the vocabulary: SGLang ends on others.
        """
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_k": 1},
        }
        if logprobs:
            body.update(return_logprob=True, logprob_start_len=0)
        if extra_key is not None:
            body.update(extra_key=extra_key)
        if adapter is not None:
            body.update(lora_path=adapter)
        answer = self._json(self._send("POST", "/generate", body, timeout_s, self.key), "/generate")
        meta = answer.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            raise PeerUnavailable(f"engine {self.url} aborted a probe", where="/generate", hint="ask again")
        rows = meta.get("input_token_logprobs") or []
        if any(value is not None and not math.isfinite(value) for value, *_ in rows):
            raise BadData(f"engine {self.url} answers log-probabilities that are not finite", where="/generate")
        return Answer(
            prompt_logprobs=[None if value is None else float(value) for value, *_ in rows],
            prompt_token_ids=[int(row[1]) for row in rows],
            cached_tokens=int(meta.get("cached_tokens", 0)),
            weight_version=str(meta.get("weight_version")),
        )

    def _probe(self, path: str, timeout_s: float) -> int:
        return self._send("GET", path, None, timeout_s, self.key).status_code

    def _read(self, path: str, timeout_s: float) -> dict[str, Any]:
        return self._json(self._send("GET", path, None, timeout_s, self.key), path)

    def _order(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        answer = self._json(self._send("POST", path, body, timeout_s, self.admin_key), path)
        if answer.get("success", True) is not True:
            raise BadData(f"engine {self.url} refused: {answer.get('message')}", where=path)
        return answer

    def _loads(self, path: str, order: dict[str, Any], timeout_s: float) -> bool:
        """True: the weights are the new ones, and the cache is not."""
        try:
            self._order(path, order, timeout_s)
        except BadData as refusal:
            if DIRTY in refusal.what:
                return True
            raise
        return False

    def _send(self, method: str, path: str, body: object, timeout_s: float, key: str | None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(max(timeout_s, 0.001), connect=min(5.0, max(timeout_s, 0.001)))
        try:
            return self._client.request(method, path, json=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as e:
            sent = not isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
            kind = Unanswered if sent else PeerUnavailable
            if isinstance(e, httpx.TimeoutException):
                raise kind(f"engine {self.url} did not answer within {timeout_s:.1f} s", where=path) from e
            raise kind(
                f"engine {self.url} cannot be reached: {e}", where=path, hint="it is starting, or it ended: see its log"
            ) from e

    def _json(self, response: httpx.Response, path: str) -> dict[str, Any]:
        status, text = response.status_code, response.text
        try:
            body = response.json()
        except ValueError:
            body = None
        if status >= 500:  # a refusal is a 4xx; this one may be gone in a moment
            raise PeerUnavailable(f"engine {self.url} answers {status}: {text[:200]}", where=path)
        if status in (401, 403):
            raise BadConfig(
                f"engine {self.url} wants a key, or another one (HTTP {status})",
                where=path,
                hint="give its agent COLCHIS_ENGINE_ADMIN_KEY, and COLCHIS_ENGINE_KEY where the engine has two",
            )
        if status != 200 or not isinstance(body, dict):
            message = body.get("message") or body.get("error") if isinstance(body, dict) else None
            raise BadData(f"engine {self.url} answers {status}: {message or text[:300]}", where=path)
        return body


def _dtype(info: Mapping[str, Any]) -> str:
    """The embedded engine's `auto` is the type of the files. SGLang's is that of its configuration, and float16 where that says
    float32 or nothing: it stays `auto`, which is no type that anything was written in."""
    named = str(info.get("dtype") or UNKNOWN)
    if named == "auto" and info.get("engine") == EMBEDDED:
        return AS_WRITTEN
    return {"half": "float16", "float": "float32"}.get(named, named)


def _start(info: dict[str, Any]) -> str:
    """An SGLang process keeps its seed, drawn at the start, and the measured durations of that start."""
    marks = [info.get(field) for field in ("start_id", "startup_time", "random_seed")]
    return json.dumps(marks, sort_keys=True) if any(mark is not None for mark in marks) else ""


def _adapters(info: dict[str, Any]) -> dict[str, Any]:
    """The facts about adapters in /server_info. SGLang loads none at run time when it has replicas of its own."""
    rank = int(info.get("max_lora_rank") or 0) if info.get("enable_lora") and info.get("dp_size", 1) == 1 else 0
    named = info.get("lora_target_modules")
    targets = frozenset(map(str, named)) if isinstance(named, list) and "all" not in named else None
    return {"adapter_rank": rank, "adapter_targets": targets}


def _receivers(info: dict[str, Any]) -> int:
    """SGLang receives weights where it has no replicas or stages of its own, the embedded engine when it has a model."""
    single = info.get("dp_size", 1) == info.get("pp_size", 1) == 1  # stages of a pipeline would claim the same ranks
    able = info.get("receives_weights", single)
    return int(info.get("tp_size", 1)) if able else 0
