"""Where the object store is and how to speak to it, as every pod and process gets it from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from colchis.components.errors import BadConfig

_VARIABLES = {
    "endpoint": "COLCHIS_S3_ENDPOINT",
    "bucket": "COLCHIS_S3_BUCKET",
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "region": "COLCHIS_S3_REGION",
    "addressing": "COLCHIS_S3_ADDRESSING",
    "checksums": "COLCHIS_S3_CHECKSUMS",
    "session_token": "AWS_SESSION_TOKEN",
}
_OPTIONAL = ("region", "addressing", "checksums", "session_token")
_CHOICES = {"addressing": ("path", "virtual"), "checksums": ("when_supported", "when_required")}


@dataclass(frozen=True)
class StoreSettings:
    """One bucket of an S3-compatible store. BadConfig names the variable whose value cannot work."""

    endpoint: str
    """`http://host:port` or `https://host[:port]`."""
    bucket: str
    access_key: str
    secret_key: str = field(repr=False)
    region: str = "us-east-1"
    """Always sent: a store without regions ignores it, AWS refuses a signature for the wrong one."""
    addressing: str = "path"
    """`path` (endpoint/bucket/key) works everywhere; `virtual` (bucket.endpoint/key) is for stores that demand it."""
    checksums: str = "when_required"
    """When botocore adds its own CRC trailers. `when_required` is safe with older servers, some of which store a body
    with the trailer in it; our own checksums are verified either way."""
    session_token: str = field(default="", repr=False)
    """Set only with temporary credentials (STS, SSO)."""

    def __post_init__(self) -> None:
        for name, variable in _VARIABLES.items():
            if not getattr(self, name) and name != "session_token":
                raise BadConfig(f"{variable} is empty: the object store needs its {name.replace('_', ' ')}")
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadConfig(
                f"COLCHIS_S3_ENDPOINT is '{self.endpoint}': expected http://host:port or https://host",
                hint="the endpoint is the address of the store, without bucket or key",
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadConfig(f"{_VARIABLES[name]} is '{getattr(self, name)}': expected {' or '.join(choices)}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> StoreSettings:
        """Settings from COLCHIS_S3_* and AWS_* variables (of this process unless given). BadConfig lists what lacks."""
        source = os.environ if environment is None else environment
        values = {name: source.get(variable, "") for name, variable in _VARIABLES.items()}
        missing = [_VARIABLES[name] for name, value in values.items() if not value and name not in _OPTIONAL]
        if missing:
            raise BadConfig(
                f"the object store is not configured: {', '.join(missing)} not set",
                hint="set them, or use `colchis run`, which starts a store of its own",
            )
        return cls(**{name: value for name, value in values.items() if value})

    def to_environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads: what a launcher hands to its processes."""
        return {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
