"""One pass over a tensor's bytes: both hashes, and whether every number is finite. Bounded memory, torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from colchis.components.errors import BadData
from colchis.components.weights.header import TensorSpan

CHUNK_BYTES = 256 << 10
"""Small enough that both hashes and the test for finiteness find it in the cache of a core."""
WORKERS = min(4, os.cpu_count() or 1)
"""Hashing and numpy both release the interpreter lock; more threads than this wait for the disk."""

_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("u1", 0x7C),
}
"""Bits of the exponent: an IEEE number is infinite or NaN exactly when all of them are set."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Scan:
    """What one pass found."""

    sha256: str | None
    """None: not asked for."""
    xxh3_128: str
    not_finite: int
    """Elements that are infinite or not a number; 0 for integer types."""


def chunks(path: Path, start: int, length: int) -> Iterator[bytes]:
    """`length` bytes of a file from `start`, in pieces whose size is a multiple of 8. BadData when it ends earlier."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = length
            while left:
                piece = _read_fully(file.read, min(CHUNK_BYTES, left))
                if len(piece) != min(CHUNK_BYTES, left):
                    raise BadData(f"{path.name} ends {left - len(piece)} bytes too early", where=str(path))
                left -= len(piece)
                yield piece
    except OSError as e:
        raise BadData(f"{path.name} cannot be read ({e.strerror})", where=str(path)) from e


def _read_fully(read: Callable[[int], bytes | None], length: int) -> bytes:
    pieces = []
    while length and (piece := read(length)):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def scan(path: Path, span: TensorSpan, *, sha256: bool = True) -> Scan:
    """Hashes and finiteness of one tensor. Most of the time goes into sha256."""
    secure, fast, not_finite = hashlib.sha256() if sha256 else None, xxhash.xxh3_128(), 0
    for piece in chunks(path, span.start, span.bytes):
        if secure is not None:
            secure.update(piece)
        fast.update(piece)
        not_finite += _count_not_finite(piece, span.dtype)
    return Scan(secure.hexdigest() if secure is not None else None, fast.hexdigest(), not_finite)


def _count_not_finite(piece: bytes, dtype: str) -> int:
    if dtype == "F8_E4M3":  # no infinity; NaN is all bits but the sign
        return int(np.count_nonzero(np.frombuffer(piece, "u1") & 0x7F == 0x7F))
    if dtype not in _EXPONENTS:
        return 0
    kind, mask = _EXPONENTS[dtype]
    numbers = np.frombuffer(piece, kind)
    exponent = numbers.dtype.type(mask)
    return int(np.count_nonzero((numbers & exponent) == exponent))


def in_parallel(work: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """`work` of every item, in order, on a few threads; the first error is raised and the rest is dropped."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="weights") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
