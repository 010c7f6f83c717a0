"""A stored object as commits list it: where it is, how long it is, and checksums that we computed ourselves."""

from __future__ import annotations

import hashlib

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from colchis.components.errors import BadData

SMALL_BYTES = 16 << 20
"""Up to here an object is one PUT and carries sha256 and xxh3-128; above, it is multipart and carries xxh3-128 only
(on a core with SHA extensions sha256 makes about 1 GB/s, xxh3-128 more than 10)."""

Data = bytes | bytearray | memoryview


class Checksums:
    """Size and checksums of a stream, computed while it passes."""

    def __init__(self, *, sha256: bool, xxh3_128: bool) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256() if sha256 else None
        self._xxh3_128 = xxhash.xxh3_128() if xxh3_128 else None

    @classmethod
    def for_size(cls, size_bytes: int) -> Checksums:
        """The checksums that an object of this size gets when it is stored."""
        return cls(sha256=size_bytes <= SMALL_BYTES, xxh3_128=True)

    def update(self, data: Data) -> None:
        self.size_bytes += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._xxh3_128 is not None:
            self._xxh3_128.update(data)

    @property
    def sha256(self) -> str | None:
        return None if self._sha256 is None else self._sha256.hexdigest()

    @property
    def xxh3_128(self) -> str | None:
        return None if self._xxh3_128 is None else self._xxh3_128.hexdigest()


class Payload(BaseModel):
    """One immutable object. At least one checksum is set; every checksum that is set is verified on reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """Name within its commit, e.g. `weights/model.safetensors`."""
    key: str = Field(min_length=1)
    """Where it is in the bucket."""
    bytes: int = Field(ge=0)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    xxh3_128: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")

    @model_validator(mode="after")
    def _has_a_checksum(self) -> Payload:
        if self.sha256 is None and self.xxh3_128 is None:
            raise ValueError(f"payload '{self.name}' has no checksum: set sha256 or xxh3_128")
        return self

    @classmethod
    def of(cls, name: str, key: str, data: Data) -> Payload:
        """What `data` is called once it is stored at `key`."""
        checksums = Checksums.for_size(len(data))
        checksums.update(data)
        return cls.measured(name, key, checksums)

    @classmethod
    def measured(cls, name: str, key: str, checksums: Checksums) -> Payload:
        """The payload whose content has passed through `checksums`."""
        return cls(
            name=name,
            key=key,
            bytes=checksums.size_bytes,
            sha256=checksums.sha256,
            xxh3_128=checksums.xxh3_128,
        )

    def checksums(self) -> Checksums:
        """An empty stream that computes exactly what this payload can be checked against."""
        return Checksums(sha256=self.sha256 is not None, xxh3_128=self.xxh3_128 is not None)

    def check(self, found: Checksums) -> None:
        """BadData, naming the object, unless size and every checksum agree with what has passed through `found`."""
        for what, expected, actual in (
            ("bytes", self.bytes, found.size_bytes),
            ("sha256", self.sha256, found.sha256),
            ("xxh3-128", self.xxh3_128, found.xxh3_128),
        ):
            if expected is not None and expected != actual:
                raise BadData(
                    f"object '{self.name}' is not what was committed: {what} expected {expected}, found {actual}",
                    where=self.key,
                    hint="it was changed or damaged after it was written: restore it, or make it again in a new run",
                )
