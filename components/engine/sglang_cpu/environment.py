"""The Python environment of SGLang on a CPU: apart from ours, because the two disagree about torchvision and triton.

`make test-sglang` runs this file as a script. Everything is pinned with hashes in `requirements/sglang.txt`, and SGLang itself
in `requirements/sglang-server.txt`, installed without the CUDA kernels that it would bring. The finished environment
(5.9 GB, most of it hard links into uv's cache) is named by what went into it, so a change of a pin builds a new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements"
FILES = ("sglang.txt", "sglang-server.txt")
UV = "uv==0.13.9"


def folder() -> Path:
    """Where the environment of the pinned requirements is, or will be."""
    key = hashlib.sha256(f"{sys.version_info[:2]} {sys.platform}".encode())
    for name in FILES:
        key.update((REQUIREMENTS / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "colchis" / "sglang" / key.hexdigest()[:16]


def find() -> Path | None:
    """The environment's Python, or None while it has not been built completely."""
    python = folder() / "venv" / "bin" / "python"
    return python if (folder() / "complete").exists() else None


def build() -> Path:
    """The environment's Python; built first where it is missing. Two builders wait for each other.

    Raises subprocess.CalledProcessError with the installer's own output on stderr.
    """
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python := find():
            return python
        for half_built in (home / "uv", home / "venv"):
            shutil.rmtree(half_built, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home / "uv"], check=True)
        subprocess.run([home / "uv" / "bin" / "pip", "install", "--quiet", UV], check=True)
        uv = home / "uv" / "bin" / "uv"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home / "venv"], check=True)
        install: list[str | Path] = [uv, "pip", "install", "--quiet", "--require-hashes", "--compile-bytecode"]
        install += ["--python", home / "venv" / "bin" / "python"]
        subprocess.run([*install, "-r", REQUIREMENTS / FILES[0]], check=True)
        subprocess.run([*install, "--no-deps", "-r", REQUIREMENTS / FILES[1]], check=True)
        (home / "complete").touch()
        return home / "venv" / "bin" / "python"


if __name__ == "__main__":
    print(build())
