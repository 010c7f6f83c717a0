"""A version as its difference from the one before: small when few elements changed, and provable tensor by tensor.

Small steps at a small learning rate leave most bfloat16 numbers as they are. A delta file holds the bits that differ:

    blocks of all tensors, in the order of the files and of the tensors in them
    the index, a sealed record: which files and tensors, how each block is encoded, what base and result hash to
    eight bytes with the length of the index (little-endian)

Bits are compared and moved, never numbers: NaN, -0.0 and denormals pass unchanged. Both encodings hold old XOR new, which
compresses better than new bits; applied twice it would undo itself, so it is never applied in place: the base stays as it
is, the result is a new file, and whoever is interrupted begins again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pydantic import Field

from colchis.components.errors import BadData
from colchis.components.store import Record
from colchis.components.weights.header import ITEM_BYTES, LARGEST_HEADER_BYTES, TensorSpan, read_header
from colchis.components.weights.scan import WORKERS

BLOCK_BYTES = 8 << 20
"""Of a tensor, per block: what is compared, compressed and held in memory at once, a few times over."""
SAMPLE_BYTES = 64 << 10
SAMPLES = 64
LARGEST_SHARE = 0.5
"""Of the full files: a delta above it is not worth the time of the trainer's cores, which make it while others wait."""
SPARSE_SHARE = 0.25
"""Of the elements of a block: with fewer changed ones, naming them is smaller than XOR of all."""
LEVEL = 1
"""Of zstd: higher ones gain a few per cent of the size for several times the time."""

_Bits = NDArray[Any]
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_KINDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_XXH3 = Field(pattern=r"^[0-9a-f]{32}$")
_SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class Encoding(StrEnum):
    """How a block is written."""

    SAME = "same"
    """Nothing: the base's bytes."""
    SPARSE = "sparse"
    """Distances between changed elements, then old XOR new of these; by byte planes, in zstd."""
    DENSE = "dense"
    """Old XOR new of every element; by byte planes, in zstd."""
    RAW = "raw"
    """The new bytes, where nothing is smaller."""


class Block(Record):
    """BLOCK_BYTES of a tensor, or what is left of it."""

    encoding: Encoding
    bytes: int = Field(ge=0)
    """In the delta file."""
    changed: int = Field(ge=0)
    """Elements that differ."""
    gap_bytes: Literal[0, 1, 2, 4] = 0
    """Width of a distance between two of them; 0 where none is written."""


class TensorDelta(Record):
    """One tensor, in blocks."""

    name: str
    base_xxh3_128: str = _XXH3
    xxh3_128: str = _XXH3
    """Of the result."""
    blocks: tuple[Block, ...]


class FileDelta(Record):
    """One file of the version; base and result have the same header."""

    name: str
    header_xxh3_128: str = _XXH3
    tensors: tuple[TensorDelta, ...]


class DeltaIndex(Record):
    """What a delta file is a difference of."""

    format: Literal[1] = 1
    base_version: int = Field(ge=0)
    version: int = Field(ge=1)
    base_digest: str = _SHA256
    """weights_digest of the version that it applies to."""
    digest: str = _SHA256
    """weights_digest of the result."""
    files: tuple[FileDelta, ...]


@dataclass(frozen=True)
class Encoded:
    """A delta that was written, in numbers."""

    bytes: int
    full_bytes: int
    elements: int
    changed: int
    seconds: float
    """Of the wall clock."""
    cpu_s: float


def encode(
    base: Sequence[Path],
    new: Sequence[Path],
    out: Path,
    *,
    base_version: int,
    version: int,
    base_digest: str,
    digest: str,
) -> Encoded | None:
    """Write the difference between two versions' safetensors files to `out`. None when the full files serve better: another
    layout (files, tensors, types, shapes, headers), or so many changes that a delta would hardly be smaller.

    Memory stays at a few blocks per thread. BadData when a file is malformed.
    """
    started, cpu = time.perf_counter(), time.process_time()
    pairs = _pairs(base, new)
    full_bytes = sum(path.stat().st_size for path in new)
    if pairs is None or _estimated_share(pairs) > LARGEST_SHARE:
        return None
    files, elements, changed = [], 0, 0
    with out.open("wb") as file, ThreadPoolExecutor(WORKERS, thread_name_prefix="delta") as pool:
        for pair in pairs:
            tensors = []
            for span in pair.spans:
                tensor = _encode_tensor(pair, span, file, pool)
                elements += span.bytes // ITEM_BYTES[span.dtype]
                changed += sum(block.changed for block in tensor.blocks)
                tensors.append(tensor)
            files.append(FileDelta(name=pair.new.name, header_xxh3_128=pair.header, tensors=tuple(tensors)))
        index = DeltaIndex(
            base_version=base_version, version=version, base_digest=base_digest, digest=digest, files=tuple(files)
        ).to_bytes()
        file.write(index + len(index).to_bytes(8, "little"))
    size = out.stat().st_size
    if size > LARGEST_SHARE * full_bytes:
        out.unlink()
        return None
    return Encoded(size, full_bytes, elements, changed, time.perf_counter() - started, time.process_time() - cpu)


def read_index(delta: Path) -> DeltaIndex:
    """What a delta file says of itself. BadData when it is damaged."""
    with delta.open("rb") as file:
        return _index(file, delta)[0]


def apply(delta: Path, base: Sequence[Path], folder: Path, *, base_digest: str) -> list[Path]:
    """Write the version's files into `folder` from its base's, byte for byte; all of them or none.

    `base_digest` is the weights digest that the base files were proven to have. BadData names file or tensor when the delta
    is of another base or damaged, or when the base is not what it was. Sizes are those of the base's own header, so nothing
    in the delta can make it allocate more.
    """
    done: list[tuple[Path, Path]] = []
    try:
        with ExitStack() as stack:
            source = stack.enter_context(delta.open("rb"))
            index, end = _index(source, delta)
            if index.base_digest != base_digest:
                raise BadData(
                    f"the delta is of v{index.base_version} with digest {index.base_digest[:12]}, here is {base_digest[:12]}",
                    where=str(delta),
                )
            by_name = {path.name: path for path in base}
            if sorted(by_name) != sorted(file.name for file in index.files):
                raise BadData(
                    f"the delta is of files {[f.name for f in index.files]}, not {sorted(by_name)}", where=str(delta)
                )
            pool = stack.enter_context(ThreadPoolExecutor(WORKERS, thread_name_prefix="delta"))
            for file in index.files:
                done.append((folder / f"{file.name}.partial", folder / file.name))
                _apply_file(file, by_name[file.name], source, end, done[-1][0], pool, delta)
            if source.tell() != end:
                raise BadData(f"{end - source.tell()} bytes belong to no tensor", where=str(delta))
        for partial, path in done:
            partial.replace(path)
    finally:
        for partial, _ in done:
            partial.unlink(missing_ok=True)
    return [path for _, path in done]


@dataclass(frozen=True)
class _Pair:
    """A file of the base and the same file of the new version: equal headers, so equal places."""

    base: Path
    new: Path
    spans: list[TensorSpan]
    header: str


def _pairs(base: Sequence[Path], new: Sequence[Path]) -> list[_Pair] | None:
    olds, news = ({path.name: path for path in paths} for paths in (base, new))
    if olds.keys() != news.keys():
        return None
    pairs = []
    for name in sorted(news):
        header, other = _header(news[name]), _header(olds[name])
        if header != other:
            return None
        pairs.append(_Pair(olds[name], news[name], read_header(news[name]), xxhash.xxh3_128_hexdigest(header)))
    return pairs


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), LARGEST_HEADER_BYTES))


def _estimated_share(pairs: Sequence[_Pair]) -> float:
    """Bytes of a delta over full bytes, from pieces that are spread evenly over all tensors."""
    total = sum(span.bytes for pair in pairs for span in pair.spans)
    taken = encoded = position = 0
    step = max(SAMPLE_BYTES, total // SAMPLES)
    for pair in pairs:
        with pair.base.open("rb") as old, pair.new.open("rb") as new:
            for span in pair.spans:
                wanted = -(-position // step) * step - position  # the next multiple of step, from this tensor's start
                item = ITEM_BYTES[span.dtype]
                for offset in range(wanted, span.bytes, step):
                    start = offset // item * item
                    size = min(SAMPLE_BYTES, span.bytes - start)
                    block, _ = _encode_block(_read(old, span, start, size), _read(new, span, start, size))
                    taken, encoded = taken + size, encoded + block.bytes
                position += span.bytes
    return encoded / taken if taken else 0.0


def _read(file: IO[bytes], span: TensorSpan, start: int, size: int) -> _Bits:
    file.seek(span.start + start)
    data = file.read(size)
    if len(data) != size:
        raise BadData(f"tensor '{span.name}' ends {size - len(data)} bytes too early", where=file.name)
    return np.frombuffer(data, _KINDS[ITEM_BYTES[span.dtype]])


def _encode_tensor(pair: _Pair, span: TensorSpan, out: IO[bytes], pool: ThreadPoolExecutor) -> TensorDelta:
    before, after = xxhash.xxh3_128(), xxhash.xxh3_128()

    def pieces() -> Iterator[tuple[_Bits, _Bits]]:
        with pair.base.open("rb") as old_file, pair.new.open("rb") as new_file:
            for start, size in _cuts(span):
                old, new = _read(old_file, span, start, size), _read(new_file, span, start, size)
                before.update(old.data)
                after.update(new.data)
                yield old, new

    blocks = []
    for block, data in _in_order(pool, lambda piece: _encode_block(*piece), pieces()):
        out.write(data)
        blocks.append(block)
    return TensorDelta(
        name=span.name, base_xxh3_128=before.hexdigest(), xxh3_128=after.hexdigest(), blocks=tuple(blocks)
    )


def _cuts(span: TensorSpan) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the blocks of a tensor."""
    for start in range(0, span.bytes, BLOCK_BYTES):
        yield start, min(BLOCK_BYTES, span.bytes - start)


def _encode_block(old: _Bits, new: _Bits) -> tuple[Block, bytes]:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return Block(encoding=Encoding.SAME, bytes=0, changed=0), b""
    if changed < SPARSE_SHARE * new.size:
        places = np.flatnonzero(differs)
        gaps = np.diff(places, prepend=0)
        width: Any = next(bytes_ for bytes_ in (1, 2, 4) if gaps.max() < 1 << 8 * bytes_)
        data = _squeeze(_planes(gaps.astype(_KINDS[width])) + _planes(old[places] ^ new[places]))
        block = Block(encoding=Encoding.SPARSE, bytes=len(data), changed=changed, gap_bytes=width)
    else:
        data = _squeeze(_planes(old ^ new))
        block = Block(encoding=Encoding.DENSE, bytes=len(data), changed=changed)
    if len(data) < new.nbytes:
        return block, data
    return Block(encoding=Encoding.RAW, bytes=new.nbytes, changed=changed), new.tobytes()


def _decode_block(block: Block, old: _Bits, data: bytes) -> _Bits:
    """The new bits. ValueError when the data are none; that they are the right ones, the tensor's checksum says."""
    match block.encoding:
        case Encoding.SAME:
            if data:
                raise ValueError("a block of the same bytes has some of its own")
            return old
        case Encoding.RAW:
            if len(data) != old.nbytes:
                raise ValueError(f"{len(data)} bytes, expected {old.nbytes}")
            return np.frombuffer(data, old.dtype)
        case Encoding.DENSE:
            return old ^ _elements(_unsqueeze(data, old.nbytes), old.dtype)
        case Encoding.SPARSE:
            width = block.gap_bytes
            if block.changed > old.size or not width:
                raise ValueError(f"{block.changed} changed elements of {old.size}, {width} bytes apart")
            plain = _unsqueeze(data, block.changed * (width + old.itemsize))
            end = width * block.changed
            places = np.cumsum(_elements(plain[:end], np.dtype(_KINDS[width])), dtype=np.int64)
            if block.changed and places[-1] >= old.size:
                raise ValueError(f"an element {places[-1]} of {old.size}")
            new = old.copy()
            new[places] ^= _elements(plain[end:], old.dtype)
            return new


def _planes(elements: _Bits) -> bytes:
    """First bytes of all elements, then second ones: those that hardly differ come to lie together."""
    return elements.view("u1").reshape(-1, elements.itemsize).T.tobytes()


def _elements(planes: bytes, kind: np.dtype[Any]) -> _Bits:
    """Inverse of `_planes`."""
    parts = np.frombuffer(planes, "u1").reshape(kind.itemsize, -1)
    together = np.empty(parts.size, "u1")
    for i, part in enumerate(parts):
        together[i :: kind.itemsize] = part
    return together.view(kind)


def _squeeze(data: bytes) -> bytes:
    squeezed: bytes = pa.Codec("zstd", compression_level=LEVEL).compress(data, asbytes=True)
    return squeezed


def _unsqueeze(data: bytes, size: int) -> bytes:
    try:
        plain: bytes = pa.Codec("zstd").decompress(data, decompressed_size=size, asbytes=True)
    except (OSError, pa.ArrowException) as e:
        raise ValueError(f"not zstd of {size} bytes: {e}") from None
    return plain


def _index(file: IO[bytes], delta: Path) -> tuple[DeltaIndex, int]:
    """The index and where the blocks end; `file` stands at their beginning then."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER_BYTES):
        raise BadData(f"{size} bytes cannot hold an index of {length}", where=str(delta), hint="fetch it again")
    file.seek(size - 8 - length)
    index = DeltaIndex.from_bytes(file.read(length), str(delta))
    file.seek(0)
    return index, size - 8 - length


def _apply_file(
    file: FileDelta, base: Path, source: IO[bytes], end: int, out: Path, pool: ThreadPoolExecutor, delta: Path
) -> None:
    header, spans = _header(base), read_header(base)
    if xxhash.xxh3_128_hexdigest(header) != file.header_xxh3_128:
        raise BadData(f"the header of {file.name} is not the one that the delta was made for", where=str(base))
    if [span.name for span in spans] != [tensor.name for tensor in file.tensors]:
        raise BadData(f"the delta lists other tensors than {file.name} has", where=str(delta))
    with base.open("rb") as old_file, out.open("wb") as new_file:
        new_file.write(header)
        for span, tensor in zip(spans, file.tensors, strict=True):
            _apply_tensor(span, tensor, old_file, source, end, new_file, pool, delta)


def _apply_tensor(
    span: TensorSpan,
    tensor: TensorDelta,
    old_file: IO[bytes],
    source: IO[bytes],
    end: int,
    new_file: IO[bytes],
    pool: ThreadPoolExecutor,
    delta: Path,
) -> None:
    before, after = xxhash.xxh3_128(), xxhash.xxh3_128()
    cuts = list(_cuts(span))
    if len(cuts) != len(tensor.blocks):
        raise BadData(f"tensor '{span.name}': {len(tensor.blocks)} blocks, expected {len(cuts)}", where=str(delta))

    def pieces() -> Iterator[tuple[Block, _Bits, bytes]]:
        for (start, size), block in zip(cuts, tensor.blocks, strict=True):
            if block.bytes > min(size, end - source.tell()):
                raise BadData(f"tensor '{span.name}': a block of {block.bytes} bytes for {size}", where=str(delta))
            old = _read(old_file, span, start, size)
            before.update(old.data)
            yield block, old, source.read(block.bytes)

    try:
        for new in _in_order(pool, lambda piece: _decode_block(*piece), pieces()):
            after.update(new.data)
            new_file.write(new.data)
    except ValueError as e:
        raise BadData(f"tensor '{span.name}' cannot be made from its delta ({e})", where=str(delta)) from e
    for what, expected, found in (
        ("of the base", tensor.base_xxh3_128, before.hexdigest()),
        ("of the result", tensor.xxh3_128, after.hexdigest()),
    ):
        if expected != found:
            raise BadData(
                f"tensor '{span.name}': checksum {what} is {found[:12]}, the delta says {expected[:12]}",
                where=str(delta),
                hint="fetch the full version",
            )


def _in_order(pool: ThreadPoolExecutor, work: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """`work` of every item on the pool's threads, in order, with no more than a few items in memory."""
    waiting: deque[Future[_Out]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
