"""Which engines there are, which of them serve a version, and which one takes the next request."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import httpx

from colchis.components.credentials import credential
from colchis.components.errors import BadConfig
from colchis.components.rollout.versions import Wanted
from colchis.components.weights import labels
from colchis.components.weights.protocol import EngineState

STATUS_TIMEOUT_S = 3.0
FRESH_S = 5.0
"""A status is asked again after this, or at once when an engine failed."""
PROOF_POLL_S = 0.05
"""Between two questions to an agent that is proving a load: a fraction of a second's work for small models, seconds for large
ones."""
SUSPECT_S = 10.0
"""How long an engine that failed comes last in the choice."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version that an engine serves beside its base."""

    name: str
    """What a request must give."""
    version: int
    label: str
    """What the engine calls itself while the base is there."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: `id` is what trajectories record."""

    id: str
    url: str
    adapter: Adapter | None = None
    """None: what it serves, it serves whole."""
    agent: str | None = None
    """Address of its agent; None: nobody proves what it served."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine's agent (or the engine itself) says of it."""

    engine: Engine
    version: int | None
    ready: bool
    problem: str = ""

    def __str__(self) -> str:
        state = self.problem or f"version {self.version}, {'ready' if self.ready else 'not ready'}"
        return f"{self.engine.id}: {state}"


@dataclass(frozen=True, slots=True)
class Proofs:
    """What an agent says of the loads of its engine."""

    proven: Mapping[str, int]
    """Marks (`components/weights/labels.py`) -> version."""
    under_way: bool
    """One more may be proven soon."""


def wants_key(engine: Engine) -> BadConfig:
    """What to say when an engine answers 401 or 403."""
    return BadConfig(
        f"engine {engine.id} wants a key, and refuses ours or its lack",
        where=engine.url,
        hint="set COLCHIS_ENGINE_KEY to the pool's (in a cluster: `engineKey` of the Secret colchis-store)",
    )


class Engines:
    """A pool of engines, asked through their agents; or engines at known addresses, asked themselves.

    `token` is shown to agents, `key` to engines.
    """

    def __init__(self, agents: Sequence[str] = (), *, urls: Sequence[str] = (), token: str = "", key: str = "") -> None:
        if bool(agents) == bool(urls):
            raise BadConfig("a pool of engines is a list of agents or a list of engine addresses, exactly one of them")
        self.agents = [a.strip().rstrip("/") for a in agents]
        self.urls = [u.strip().rstrip("/") for u in urls]
        for address in (*self.agents, *self.urls):
            parts = urlsplit(address)
            try:
                usable = parts.scheme in ("http", "https", "dns") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                usable = False
            if not usable or (parts.scheme == "dns" and parts.port is None):
                raise BadConfig(f"engine address '{address}': expected http://HOST:PORT or dns://NAME:PORT")
        self._headers = _bearer(token)
        self.engine_headers = _bearer(key)
        """Of each request to an engine."""

    @classmethod
    def from_environment(cls) -> Engines:
        """From COLCHIS_ENGINES (agents, comma-separated, each http://HOST:PORT or dns://NAME:PORT),
        COLCHIS_AGENT_TOKEN, and COLCHIS_ENGINE_KEY where the engines want one."""
        agents = [a for a in os.environ.get("COLCHIS_ENGINES", "").split(",") if a.strip()]
        if not agents:
            raise BadConfig("COLCHIS_ENGINES is not set: it names the engines' agents, e.g. dns://pool-agents:9000")
        return cls(agents, token=credential("COLCHIS_AGENT_TOKEN"), key=credential("COLCHIS_ENGINE_KEY"))

    @classmethod
    def at(cls, urls: Sequence[str], *, key: str = "") -> Engines:
        """Engines without agents; an engine is ready for the version that its /model_info names."""
        return cls(urls=urls, key=key)

    async def proofs(self, client: httpx.AsyncClient, agent: str) -> Proofs:
        """What an agent says of the last loads. Nothing, of one that cannot be asked."""
        try:
            answer = await client.get(f"{agent}/status", headers=self._headers, timeout=STATUS_TIMEOUT_S)
            answer.raise_for_status()
            status = answer.json()
            proven = {str(mark): int(version) for mark, version in status["proven"].items()}
            return Proofs(proven, under_way=status["state"] == EngineState.ACTIVATING)
        except (httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError):
            return Proofs({}, under_way=False)

    async def statuses(self, client: httpx.AsyncClient) -> list[EngineStatus]:
        """All engines, the unreachable ones included. BadConfig when an agent refuses the token."""
        if self.urls:
            return list(await asyncio.gather(*(_ask_engine(client, url, self.engine_headers) for url in self.urls)))
        resolved = await asyncio.gather(*(_resolve(agent) for agent in self.agents))
        addresses = list(dict.fromkeys(a for found in resolved for a in found))
        found = await asyncio.gather(*(_ask_agent(client, a, self._headers) for a in addresses))
        missing = [
            EngineStatus(Engine(agent, agent), None, False, "name has no address")
            for agent, addresses_ in zip(self.agents, resolved, strict=True)
            if not addresses_
        ]
        return [*found, *missing]


async def _resolve(agent: str) -> list[str]:
    """`dns://NAME:PORT` as one address per record, so that agents may come and go; others as they are."""
    parts = urlsplit(agent)
    if parts.scheme != "dns":
        return [agent]
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            records = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return []
    hosts = sorted({str(record[4][0]) for record in records})
    return [f"http://[{h}]:{parts.port}" if ":" in h else f"http://{h}:{parts.port}" for h in hosts]


async def _ask_agent(client: httpx.AsyncClient, agent: str, headers: dict[str, str]) -> EngineStatus:
    unknown = Engine(agent, agent)
    try:
        answer = await client.get(f"{agent}/status", headers=headers, timeout=STATUS_TIMEOUT_S)
        if answer.status_code in (401, 403):
            raise BadConfig("the agent refuses our token", where=agent, hint="set COLCHIS_AGENT_TOKEN to the pool's")
        answer.raise_for_status()
        body = answer.json()
        version = None if body["version"] is None else int(body["version"])
        adapter = None
        if version is not None and (served := body.get("adapter")) is not None:
            adapter = Adapter(str(served["name"]), version, str(served["label"]))
        engine = Engine(str(body["engine_id"]), _reachable(str(body["engine_url"]), agent), adapter, agent)
        return EngineStatus(engine, version, bool(body["ready"]))
    except httpx.HTTPError as e:
        return EngineStatus(unknown, None, False, f"agent: {type(e).__name__} {e}".strip())
    except (KeyError, TypeError, ValueError) as e:
        return EngineStatus(unknown, None, False, f"agent: unexpected status ({type(e).__name__} {e})")


def _reachable(engine_url: str, agent: str) -> str:
    """An agent beside its engine may know it by a loopback address; from another pod it is at the agent's host."""
    engine, agent_host = urlsplit(engine_url.rstrip("/")), urlsplit(agent).hostname or ""
    if engine.hostname not in LOOPBACK or agent_host in LOOPBACK:
        return engine_url.rstrip("/")
    host = f"[{agent_host}]" if ":" in agent_host else agent_host
    return urlunsplit(engine._replace(netloc=f"{host}:{engine.port}" if engine.port else host))


def _bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}


async def _ask_engine(client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> EngineStatus:
    engine = Engine(url, url)
    try:
        answer = await client.get(f"{url}/model_info", headers=headers, timeout=STATUS_TIMEOUT_S)
        if answer.status_code in (401, 403):
            raise wants_key(engine)
        answer.raise_for_status()
        label = str(answer.json().get("weight_version"))
    except httpx.HTTPError as e:
        return EngineStatus(engine, None, False, f"{type(e).__name__} {e}".strip())
    except (AttributeError, ValueError) as e:
        return EngineStatus(engine, None, False, f"unexpected /model_info ({e})")
    version = labels.proven_version(label)
    return EngineStatus(engine, version, version is not None)


class Balance:
    """Hands out the least-loaded engine that is ready at a wanted version."""

    def __init__(self, engines: Engines, client: httpx.AsyncClient, wanted: Wanted) -> None:
        self.engines, self.client, self.wanted = engines, client, wanted
        self.last: list[EngineStatus] = []
        self._load: Counter[str] = Counter()
        self._suspect_until: dict[str, float] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._proofs: dict[str, tuple[float, Proofs]] = {}
        self._proving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take(self, samples: int, *, prefer: str | None, avoid: set[str]) -> Engine:
        """Wait for an engine and count `samples` on it. `prefer`: whose cache holds the earlier turns. `avoid`: those
        that failed this very request; taken again only when there is no other. Ends only with the caller's deadline."""
        wait_s = 0.1
        while True:
            await self._ask_again_if_old()
            ready = [s.engine for s in self.last if s.ready and self.wanted.accepts(s.version)]
            if ready:
                now = time.monotonic()
                engine = min(
                    ready,
                    key=lambda e: (
                        e.id in avoid,
                        self._suspect_until.get(e.id, 0.0) > now,
                        e.id != prefer,
                        self._load[e.id],
                        e.id,
                    ),
                )
                self._load[engine.id] += samples
                return engine
            # nobody announces an engine's return, so it is asked for, ever more slowly
            await asyncio.sleep(random.uniform(0.5, 1.0) * wait_s)
            wait_s = min(2 * wait_s, FRESH_S)
            self._asked_at = float("-inf")

    def give_back(self, engine: Engine, samples: int, *, failed: bool) -> None:
        self._load[engine.id] -= samples
        if failed:
            self._suspect_until[engine.id] = time.monotonic() + SUSPECT_S
            self._asked_at = float("-inf")
        else:
            self._suspect_until.pop(engine.id, None)

    async def _ask_again_if_old(self) -> None:
        async with self._asking:
            if time.monotonic() - self._asked_at > FRESH_S:
                self.last = await self.engines.statuses(self.client)
                self._asked_at = time.monotonic()

    async def proven(self, engine: Engine, marks: set[str], timeout_s: float) -> Mapping[str, int]:
        """Marks of loads -> version, at least for those of `marks` that the engine's agent has proven, or proves in time."""
        since = time.monotonic()
        end = since + timeout_s
        while engine.agent is not None:
            found = await self._ask_for_proofs(engine.agent, since)
            if marks <= found.proven.keys() or not found.under_way or time.monotonic() > end:
                return found.proven
            await asyncio.sleep(PROOF_POLL_S)
            since = max(since, time.monotonic() - PROOF_POLL_S)
        return {}

    async def _ask_for_proofs(self, agent: str, since: float) -> Proofs:
        """An answer to a question that was asked later than `since`: many samples wait for one proof, and share it."""
        async with self._proving[agent]:
            asked, found = self._proofs.get(agent, (float("-inf"), Proofs({}, under_way=False)))
            if asked < since:
                asked = time.monotonic()
                found = await self.engines.proofs(self.client, agent)
                self._proofs[agent] = asked, found
            return found

    def describe(self) -> str:
        return "; ".join(str(s) for s in self.last) or "no engine known"
