"""Starts SGLang's own HTTP server on a CPU: `python -P launch.py --model-path DIR --port P ...` in SGLang's environment.

SGLang 0.5.23 has a CPU platform, but two modules that it imports need compiled kernels: `sgl_kernel` (only its
speculative decoding calls them on a CPU) and, beside a CPU-only torch, two operators of torchvision. Both are declared
here; where torch has no accelerator, memory is not pinned. Nothing of SGLang is changed. Arguments are SGLang's own, on
top of the ones that a CPU needs (`CPU_ARGUMENTS`).

Top-level code of this file runs in every process of the server: multiprocessing's spawn imports the main module again
before it unpickles the child's work, which is why this is a plain script without imports of our own.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores cost a factor of ten in decoding
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model path that is missing must not be looked up in the hub
os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")  # a generating probe hangs while paused

if "127.0.0.1" in sys.argv:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # its process groups listen where its routes do

import torch

CPU_ARGUMENTS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle"),
]


def declare_kernels() -> None:
    """Put a module `sgl_kernel` in place whose functions can be imported and raise when they are called."""
    try:
        import sgl_kernel  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        sys.modules.pop("sgl_kernel", None)
    else:
        return

    def missing(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} has no implementation for this CPU")

        return refuse

    def lookup(name: str) -> Callable[..., Any]:
        if name.endswith("_cpu"):
            return missing(name)
        raise AttributeError(name)

    module = types.ModuleType("sgl_kernel")
    module.__dict__.update(__version__="0", __getattr__=lookup)
    sys.modules["sgl_kernel"] = module


def declare_torchvision_operators() -> Any:
    """Schemas that torchvision's CUDA build registers only beside a CUDA build of torch."""
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def forget_pinning() -> None:
    """Pinned memory speeds up copies to an accelerator, and torch refuses to pin without one; SGLang's layers with adapters
    ask for it on every machine. Without an accelerator plain memory is the same thing."""

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return unpinned

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


declare_kernels()
if not torch.cuda.is_available():
    forget_pinning()
_OPERATORS = declare_torchvision_operators() if torch.version.cuda is None else None  # schemas live as long as this


def main(arguments: list[str]) -> None:
    """Serve until terminated."""
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found]

    load_plugins()
    try:
        run_server(prepare_server_args([*CPU_ARGUMENTS, *arguments]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
