"""The reload as its stage drives it: one function per boundary, over all engines of a pool, all or none.

A boundary that fails at one engine fails the step, and the error names engine and boundary. Within its deadline a call
is repeated when the agent or its engine cannot be reached (a container that restarts): every call may be repeated.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from colchis.components.credentials import credential
from colchis.components.errors import BadConfig, BadData, Bug, ColchisError, PeerUnavailable, Temporary
from colchis.components.http_client import pool_client
from colchis.components.records.boundary import Boundary, BoundaryRecord
from colchis.components.records.run import now
from colchis.components.records.weights import Adapter, WeightsManifest
from colchis.components.store import Store, keys
from colchis.components.weights.architecture import EMBEDDING
from colchis.components.weights.deadline import Deadline
from colchis.components.weights.gap import Gap
from colchis.components.weights.protocol import (
    ENGINE_HEADER,
    Activate,
    Activated,
    Message,
    Offer,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Refusal,
    Status,
    Verified,
    Verify,
)
from colchis.components.weights.publish import read_manifest

STATUS_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 10.0
"""What an answer may take beyond the deadline that the agent was given: it undoes a pause first."""
LONGEST_WAIT_S = 2.0
_SEVERITY = (Bug, BadData, BadConfig, PeerUnavailable, Temporary)

_Answer = TypeVar("_Answer", bound=Message)


class AgentClient:
    """One agent. Every method raises the error that the agent raised, or PeerUnavailable when it does not answer."""

    def __init__(self, url: str, token: str, client: httpx.AsyncClient) -> None:
        self.url, self.token = url.rstrip("/"), token
        self.engine_id = ""
        """As the last answer named it."""
        self._client = client

    async def status(self) -> Status:
        """What the agent knows of its engine."""
        return await self._call("GET", "/status", None, Status, STATUS_TIMEOUT_S)

    async def prepare(self, request: Prepare) -> Prepared:
        """Fetch and verify a version beside the serving engine."""
        return await self._call("POST", "/prepare", request, Prepared, request.deadline_s + ANSWER_GRACE_S)

    async def verify(self, request: Verify) -> Verified:
        """Read the staged copy again."""
        return await self._call("POST", "/verify", request, Verified, request.deadline_s + ANSWER_GRACE_S)

    async def activate(self, request: Activate) -> Activated:
        """Bring a prepared version into the engine."""
        return await self._call("POST", "/activate", request, Activated, request.deadline_s + ANSWER_GRACE_S)

    async def probe(self, request: Probe) -> Probed:
        """Log-probabilities of given tokens."""
        return await self._call("POST", "/probe", request, Probed, request.deadline_s + ANSWER_GRACE_S)

    async def _call(
        self, method: str, path: str, request: Message | None, answer: type[_Answer], timeout_s: float
    ) -> _Answer:
        where = self.url + path
        try:
            response = await self._client.request(
                method,
                where,
                json=None if request is None else request.model_dump(mode="json"),
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, STATUS_TIMEOUT_S)),
            )
        except httpx.TimeoutException as e:
            raise PeerUnavailable(f"agent {self.url} did not answer within {timeout_s:.0f} s", where=path) from e
        except httpx.HTTPError as e:
            raise PeerUnavailable(f"agent {self.url} cannot be reached ({type(e).__name__}: {e})", where=path) from e
        try:
            if response.status_code != 200:
                raise Refusal.model_validate_json(response.content).to_error(f"agent {self.url}")
            self.engine_id = response.headers[ENGINE_HEADER]
            return answer.model_validate_json(response.content)
        except (ValidationError, KeyError) as e:
            raise BadConfig(
                f"agent {self.url} answers {response.status_code} {response.text[:200]!r}, expected a {answer.__name__}",
                where=path,
                hint="agent and stage must be of the same release, and COLCHIS_ENGINES must name agents",
            ) from e


class Agents:
    """The agents of a pool, as COLCHIS_ENGINES lists them. Use as an async context manager.

    An entry is the address of one agent, or `dns://NAME:PORT`: one agent per address that the name resolves to.
    """

    def __init__(self, entries: Sequence[str], token: str) -> None:
        self.entries, self.token = [e.strip() for e in entries if e.strip()], token
        if not self.entries:
            raise BadConfig(
                "COLCHIS_ENGINES names no agents",
                hint="set it to http://HOST:PORT,... or dns://NAME:PORT of the agents",
            )
        for entry in self.entries:
            parts = urlsplit(entry)
            if parts.scheme not in ("http", "https", "dns") or not parts.hostname or not parts.port:
                raise BadConfig(f"COLCHIS_ENGINES has '{entry}': expected http://HOST:PORT or dns://NAME:PORT")
        self._client = pool_client()

    @classmethod
    def from_environment(cls) -> Self:
        """From COLCHIS_ENGINES and COLCHIS_AGENT_TOKEN. BadConfig when one is missing."""
        token = credential("COLCHIS_AGENT_TOKEN")
        if not token:
            raise BadConfig("COLCHIS_AGENT_TOKEN is not set: agents refuse whoever has no token")
        return cls(os.environ.get("COLCHIS_ENGINES", "").split(","), token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def clients(self, deadline: Deadline) -> list[AgentClient]:
        """One client per agent, names resolved. PeerUnavailable when a name has no address by the deadline."""
        urls: list[str] = []
        for entry in self.entries:
            parts = urlsplit(entry)
            if parts.scheme != "dns":
                urls.append(entry)
                continue
            assert parts.hostname is not None
            assert parts.port is not None
            hosts = await _resolve(parts.hostname, parts.port, deadline)
            urls += [f"http://[{h}]:{parts.port}" if ":" in h else f"http://{h}:{parts.port}" for h in hosts]
        return [AgentClient(url, self.token, self._client) for url in dict.fromkeys(urls)]


async def _resolve(name: str, port: int, deadline: Deadline) -> list[str]:
    wait_s = 0.1
    while True:
        try:
            records = await asyncio.get_running_loop().getaddrinfo(name, port)
        except OSError as e:
            if deadline.left_s() < wait_s:
                raise PeerUnavailable(
                    f"'{name}' has no address: no agent of the pool is running",
                    where=f"dns://{name}:{port}",
                    hint="look at the pool's pods; COLCHIS_ENGINES names their headless Service",
                ) from e
        else:
            return sorted({str(record[4][0]) for record in records})
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


@contextmanager
def passing(boundary: Boundary) -> Iterator[None]:
    """An error of the block begins with the boundary's label, unless it begins with one already."""
    try:
        yield
    except ColchisError as error:
        if Boundary.named_by(error.what) is not None:
            raise
        raise type(error)(f"{boundary.label}: {error.what}", where=error.where, hint=error.hint) from error


@passing(Boundary.STORE)
def verify_published(store: Store, run: str, version: int) -> BoundaryRecord:
    """Boundary 1: the manifest is there, and every object it lists has its size and checksums, read back in full."""
    started_at, started = now(), time.monotonic()
    manifest = read_manifest(store, run, version)
    for payload in [*manifest.files, *(manifest.adapter.files if manifest.adapter else ())]:
        store.verify(payload)
    delta = manifest.delta.payload if manifest.delta else None
    return BoundaryRecord.passed(
        Boundary.STORE,
        run,
        version,
        engine=None,
        started_at=started_at,
        seconds=time.monotonic() - started,
        proof={
            "manifest": keys.weights_manifest(run, version),
            "objects": len(manifest.files),
            "bytes": manifest.file_bytes(),
            "delta_bytes": delta.bytes if delta else None,
            "delta_is_right": store.holds(delta) if delta else None,  # a damaged one makes agents fetch whole files
            "adapter": manifest.adapter_name,
            "tensors": len(manifest.tensors),
            "weights_digest": manifest.weights_digest,
        },
    )


class Sends(Protocol):
    """Who has a copy of the version, for engines that receive it (`components/direct/sender.py`)."""

    def offer(self, receivers: int, *, towards: str, timeout_s: float) -> Offer:
        """Wait for an engine of that many ranks, whose agent has that URL."""
        ...


async def prepare_all(
    agents: Agents, manifest: WeightsManifest, *, direct: bool = False, deadline_s: float
) -> list[BoundaryRecord]:
    """Boundary 3 at every engine, side by side, while all of them serve. `direct`: there will be a sender."""

    async def prepare(agent: AgentClient, left_s: float) -> dict[str, Any]:
        answer = await _prepare(agent, manifest, direct, left_s)
        return answer.model_dump(mode="json")

    return await _everywhere(agents, Boundary.TRANSFER, manifest, prepare, deadline_s)


async def _prepare(agent: AgentClient, manifest: WeightsManifest, direct: bool, left_s: float) -> Prepared:
    request = Prepare(run=manifest.run, version=manifest.version, direct=direct, deadline_s=left_s)
    answer = await agent.prepare(request)
    _expect("digest of the staged copy", _digest(manifest, answer.adapter), answer.weights_digest)
    return answer


async def verify_all(
    agents: Agents, manifest: WeightsManifest, *, direct: bool = False, deadline_s: float
) -> list[BoundaryRecord]:
    """Boundary 2 at every engine: its staged copy, read again under its lock, is the commit's. With `direct`, engines that are
    to receive the version have none: the sender's is the one."""

    async def verify(agent: AgentClient, left_s: float) -> dict[str, Any]:
        if direct and (receivers := (await _prepare(agent, manifest, direct, left_s)).receivers):
            return {"receivers": receivers, "tensors": 0, "bytes": 0}
        answer = await agent.verify(Verify(run=manifest.run, version=manifest.version, deadline_s=left_s))
        _expect("digest of the staged copy", _digest(manifest, answer.adapter), answer.weights_digest)
        return answer.model_dump(mode="json")

    return await _everywhere(agents, Boundary.BUFFER, manifest, verify, deadline_s)


async def activate_all(
    agents: Agents,
    manifest: WeightsManifest,
    *,
    pause: Literal["retract", "abort"] = "retract",
    sender: Sends | None = None,
    deadline_s: float,
) -> list[BoundaryRecord]:
    """Boundary 4 at every engine; call it when all have prepared. Where checksums cannot be predicted from the commit,
    all engines must report the same. `sender` has the version for the engines that said that they receive it."""

    async def activate(agent: AgentClient, left_s: float) -> dict[str, Any]:
        deadline = Deadline(left_s)
        receivers = (await _prepare(agent, manifest, True, left_s)).receivers if sender else 0
        left_s = max(0.1, deadline.left_s())
        answer = await agent.activate(
            Activate(
                run=manifest.run,
                version=manifest.version,
                kind=manifest.kind,
                pause=pause,
                offer=sender.offer(receivers, towards=agent.url, timeout_s=left_s) if sender and receivers else None,
                deadline_s=left_s,
            )
        )
        expected = _digest(manifest, answer.adapter)
        _expect("digest of the staged copy before the load", expected, answer.digest_before)
        if answer.digest_after is not None:
            _expect("digest of the staged copy after the load", expected, answer.digest_after)
        _expect("label that the engine reports", _label(manifest, answer.adapter), answer.version_reported)
        return answer.model_dump(mode="json")

    records = await _everywhere(agents, Boundary.LOAD, manifest, activate, deadline_s)
    reported = {r.proof["engine_checksum"] for r in records}
    if len(reported) > 1 and not all(r.proof["predicted"] for r in records):
        raise BadData(
            f"{Boundary.LOAD.label}: engines report different tensors for v{manifest.version}: "
            + ", ".join(f"{r.engine} {r.proof['engine_checksum'][:12]}" for r in records),
            hint="engines of one pool must run the same image at the same parallelism; reload again",
        )
    return records


async def probe_all(
    agents: Agents,
    manifest: WeightsManifest,
    *,
    probe: Mapping[str, Any] | None,
    tolerance: float,
    deadline_s: float,
) -> list[BoundaryRecord]:
    """Boundary 5 at every engine: nothing of the old cache was left, and the engine agrees with the trainer.

    `probe` is {token_ids: [[int]], logprobs: [[float]]}, the trainer's log-probabilities of all tokens but the first;
    None (v0 has no trainer) asks for some tokens and compares nothing. BadData above `tolerance` (components/weights/gap.py).
    """
    vocabulary = next((t.shape[0] for t in manifest.tensors if t.name == EMBEDDING), 2)
    sequences: list[list[int]] = probe["token_ids"] if probe else [list(range(max(2, min(8, vocabulary))))]
    expected: list[list[float]] | None = probe["logprobs"] if probe else None

    async def ask(agent: AgentClient, left_s: float) -> dict[str, Any]:
        answer = await agent.probe(Probe(token_ids=sequences, deadline_s=left_s))
        _expect("label that the answers carry", _label(manifest, answer.adapter), answer.weight_version)
        if answer.cached_tokens:
            raise BadData(f"{answer.cached_tokens} tokens were cached after the flush")
        gap = Gap.of(answer.logprobs, expected) if expected else None
        if gap and (excess := gap.excess(tolerance)):
            raise BadData(
                f"log-probabilities of engine and trainer {excess}",
                hint="compare the types of engine and trainer; raise reload.probe_tolerance if this is their rounding",
            )
        return {
            "flushed": answer.adapter is None,
            "adapter": answer.adapter,
            "cached_tokens": answer.cached_tokens,
            "cached_tokens_before": answer.cached_tokens_before,
            "sequences": len(sequences),
            "tokens": sum(map(len, sequences)),
            "max_gap": gap.largest if gap else None,
            "mean_gap": gap.mean if gap else None,
            "tolerance": tolerance,
        }

    return await _everywhere(agents, Boundary.CACHE, manifest, ask, deadline_s)


def _digest(manifest: WeightsManifest, adapter: str | None) -> str:
    """What a staged copy must hash to: the version's weights, or its adapter where an engine says that it serves this."""
    return manifest.weights_digest if adapter is None else _adapter(manifest, adapter).digest


def _label(manifest: WeightsManifest, adapter: str | None) -> str:
    """What an engine must call itself that serves the version whole, or as an adapter."""
    return str(manifest.version) if adapter is None else _adapter(manifest, adapter).base_label


def _adapter(manifest: WeightsManifest, name: str) -> Adapter:
    if manifest.adapter is None or name != manifest.adapter_name:
        raise BadData(
            f"the agent speaks of adapter '{name}', the version's is {manifest.adapter_name or 'none'}",
            where=keys.weights_manifest(manifest.run, manifest.version),
            hint="agent and stage must be of the same release",
        )
    return manifest.adapter


def _expect(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise BadData(f"{what}: expected {expected[:16]}, found {found[:16]}")


async def _everywhere(
    agents: Agents,
    boundary: Boundary,
    manifest: WeightsManifest,
    work: Callable[[AgentClient, float], Awaitable[dict[str, Any]]],
    deadline_s: float,
) -> list[BoundaryRecord]:
    """`work` at every agent side by side. All succeed, or the worst error is raised with every engine that failed."""
    deadline = Deadline(deadline_s)

    async def at(agent: AgentClient) -> BoundaryRecord:
        started_at, started = now(), time.monotonic()
        proof = await _patiently(lambda left_s: work(agent, left_s), deadline)
        return BoundaryRecord.passed(
            boundary,
            manifest.run,
            manifest.version,
            engine=agent.engine_id,
            started_at=started_at,
            seconds=time.monotonic() - started,
            proof=proof,
        )

    clients = await agents.clients(deadline)
    results = await asyncio.gather(*(at(client) for client in clients), return_exceptions=True)
    failures: list[tuple[AgentClient, ColchisError]] = []
    records: list[BoundaryRecord] = []
    for client, result in zip(clients, results, strict=True):
        if isinstance(result, ColchisError):
            failures.append((client, result))
        elif isinstance(result, BaseException):
            raise result
        else:
            records.append(result)
    if failures:
        said = {client.url: error.what.removeprefix(f"agent {client.url}: ") for client, error in failures}
        first, worst = min(failures, key=lambda failure: _SEVERITY.index(type(failure[1])))
        boundary = Boundary.named_by(said[first.url]) or boundary  # an agent knows better which one refused
        details = "; ".join(f"{url}: {what.removeprefix(f'{boundary.label}: ')}" for url, what in said.items())
        raise type(worst)(
            f"{boundary.label} of weights v{manifest.version} failed at {len(failures)} of {len(clients)} engines: "
            f"{details}",
            where=worst.where,
            hint=worst.hint,
        ) from worst
    return records


_Result = TypeVar("_Result")


async def _patiently(call: Callable[[float], Awaitable[_Result]], deadline: Deadline) -> _Result:
    """The call, again with full jitter while its peer cannot be reached and the deadline allows."""
    wait_s = 0.1
    while True:
        try:
            return await call(max(0.1, deadline.left_s()))
        except (PeerUnavailable, Temporary):
            pause_s = random.uniform(0.5, 1.0) * wait_s
            if deadline.left_s() < pause_s:
                raise
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
