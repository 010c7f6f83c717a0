"""Weights that a sender broadcasts into this engine, past any file: SGLang's update groups and update sessions.

SGLang writes each bucket over the weights that serve. Here a session collects them beside, and its end checks that all came
and swaps: so a sender that dies half-way changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import torch
from fastapi import FastAPI
from pydantic import Field

from colchis.components.direct.group import BackendName, Group
from colchis.components.engine.architecture import Architecture
from colchis.components.engine.checkpoint import Intake
from colchis.components.engine.decoder import StaticDecoder
from colchis.components.engine.loader import received
from colchis.components.engine.service import Body, Engine
from colchis.components.engine.weights import Assembly
from colchis.components.errors import BadData, PeerUnavailable

GROUP_TIMEOUT_S = 60.0
"""For a group to come together, and for each broadcast."""
SOURCE = "the open weight update"


class InitGroup(Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: BackendName = "gloo"


class DestroyGroup(Body):
    group_name: str = "weight_update_group"


class Selector(Body):
    selector: Literal["all", "target"] = "all"


class UpdateFromDistributed(Body):
    """`torch_empty_cache` changes nothing here: weights are swapped when the update ends. Aborting what runs is a matter of the
    pause, and refused here."""

    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False
    weight_version: str | int | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: Literal["all", "target"] = "all"
    torch_empty_cache: bool = False


class Session:
    """One update that is open: the version as far as it came."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self.assembly = Assembly(architecture, dtype)
        self.intake = Intake(architecture.tensors(), dtype, tied=architecture.tied, assembly=self.assembly)
        self.label: str | None = None
        self.flush = False


class Receiver:
    """The groups that this engine is in, and its open update."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._groups: dict[str, Group] = {}
        self._session: Session | None = None
        self._lock = asyncio.Lock()

    async def join(self, body: InitGroup) -> str:
        if body.group_name in self._groups:
            raise BadData(f"group '{body.group_name}' exists already", hint="names of groups are used once")
        if (body.rank_offset, body.world_size) != (1, 2):
            raise BadData(
                f"rank_offset {body.rank_offset} of world_size {body.world_size}",
                hint="this engine is one rank, beside the sender alone: rank_offset 1, world_size 2",
            )
        self._groups[body.group_name] = await asyncio.to_thread(
            Group.join,
            body.master_address,
            body.master_port,
            rank=body.rank_offset,
            ranks=body.world_size,
            name=body.group_name,
            backend=body.backend,
            timeout_s=GROUP_TIMEOUT_S,
        )
        return "Succeeded to initialize custom process group."

    async def leave(self, name: str) -> str:
        group = self._groups.pop(name, None)
        if group is None:
            raise BadData("The group to be destroyed does not exist.", where=name)
        await asyncio.to_thread(group.close)  # waits for a broadcast under way
        return "Succeeded to destroy custom process group."

    def begin(self) -> str:
        if self._session is not None:
            raise BadData("a weight-update session is already open; call end_weight_update() first")
        serving = self.engine.require_model()
        if not isinstance(serving.decoder, StaticDecoder):
            raise BadData(f"a {serving.architecture.model_type} model can only be loaded from a folder here")
        self._session = Session(serving.architecture, serving.dtype)
        return "Success"

    async def receive(self, body: UpdateFromDistributed) -> str:
        session = self._session
        if session is None:
            raise BadData(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        group = self._groups.get(body.group_name)
        if group is None:
            raise BadData(f"group '{body.group_name}' does not exist", hint="POST /init_weights_update_group first")
        tensors = _layout(body)
        async with self._lock:
            await asyncio.to_thread(self._take, group, tensors, session, body.load_format is not None)
        session.label = session.label if body.weight_version is None else str(body.weight_version)
        session.flush |= body.flush_cache
        return "Succeeded to update parameter online."

    def _take(
        self, group: Group, tensors: list[tuple[str, torch.dtype, list[int]]], session: Session, flattened: bool
    ) -> None:
        """One broadcast for all tensors, or one for each."""
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in tensors]
        buffers = [torch.empty(size, dtype=torch.uint8) for size in ([sum(sizes)] if flattened else sizes)]
        try:
            for buffer in buffers:
                group.broadcast(buffer)
        except PeerUnavailable as error:
            raise BadData(f"Failed to receive weights: {error}") from error
        parts = torch.split(buffers[0], sizes) if flattened else buffers
        for (name, dtype, shape), part in zip(tensors, parts, strict=True):
            session.intake.add(name, part.view(dtype).reshape(shape), SOURCE)

    async def end(self) -> str:
        """All or nothing. BadData when tensors are missing: the weights before go on serving."""
        session, self._session = self._session, None
        if session is None:
            raise BadData("no weight-update session is open; call begin_weight_update() first")
        session.intake.finish(SOURCE)
        engine = self.engine
        async with engine.update_lock:
            await engine.install(received(session.assembly, engine.require_model()), session.label, flush=session.flush)
        return "Success"


def _layout(body: UpdateFromDistributed) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, type and shape of each tensor."""
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise BadData(f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes")
    tensors: list[tuple[str, torch.dtype, list[int]]] = []
    for name, written, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        dtype = getattr(torch, written.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise BadData(f"tensor {name} has dtype '{written}'", hint="as torch names it: float32, bfloat16, float16")
        if any(size < 0 for size in shape):
            raise BadData(f"tensor {name} has shape {shape}")
        tensors.append((name, dtype, shape))
    return tensors


def add_routes(app: FastAPI, engine: Engine) -> None:
    """The routes of direct updates."""
    receiver = Receiver(engine)

    def done(message: str) -> dict[str, Any]:
        return {"success": True, "message": message}

    @app.post("/init_weights_update_group")
    async def join(body: InitGroup) -> dict[str, Any]:
        return done(await receiver.join(body))

    @app.post("/destroy_weights_update_group")
    async def leave(body: DestroyGroup) -> dict[str, Any]:
        return done(await receiver.leave(body.group_name))

    @app.post("/begin_weight_update")
    async def begin(body: Selector | None = None) -> dict[str, Any]:
        return done(receiver.begin())

    @app.post("/update_weights_from_distributed")
    async def receive(body: UpdateFromDistributed) -> dict[str, Any]:
        return done(await receiver.receive(body))

    @app.post("/end_weight_update")
    async def end() -> dict[str, Any]:
        return done(await receiver.end())
