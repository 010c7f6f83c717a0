"""What an engine process is started with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


def type_of(written: Collection[str]) -> Literal["float32", "bfloat16"]:
    """In which type a model is served whose files have tensors of these types, as safetensors names them."""
    return "bfloat16" if set(written) == {"BF16"} else "float32"


@dataclass(frozen=True)
class EngineSettings:
    """Start-up settings; `/server_info` reports them as they were, live values come from `internal_states`."""

    host: str = "127.0.0.1"
    port: int = 30000
    model_path: Path | None = None
    weight_version: str = "none"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: that of the first weights, by `type_of`."""
    deterministic: bool = False
    max_running_requests: int = 64
    max_total_tokens: int = 65536
    prefix_cache_tokens: int = 8192
    context_length: int | None = None
    threads: int = 1
    api_key: str | None = None

    def public(self) -> dict[str, object]:
        """The settings as JSON, without the key."""
        fields = asdict(self)
        fields["model_path"] = str(self.model_path) if self.model_path else None
        fields["api_key"] = None if self.api_key is None else "set"
        return fields
