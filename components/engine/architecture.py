"""Shapes of the model families that the static decode loop knows, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from colchis.components.errors import BadData


class Family(StrEnum):
    """Decoder families of the static loop. OTHER goes through transformers' own forward, one row at a time."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    OTHER = "other"


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base frequency and, for llama3, the piecewise stretch of its wavelengths."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Everything that fixes tensor names and shapes, and how the forward pass runs over them."""

    family: Family
    model_type: str
    vocab: int
    context_tokens: int
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rms_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope(RopeKind.DEFAULT, 10000.0)

    @property
    def static(self) -> bool:
        """Whether the static decode loop runs this model."""
        return self.family is not Family.OTHER

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors, as transformers saves them. Static families only."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            projections = [
                ("self_attn.q_proj", q, self.hidden, self.qkv_bias),
                ("self_attn.k_proj", kv, self.hidden, self.qkv_bias),
                ("self_attn.v_proj", kv, self.hidden, self.qkv_bias),
                ("self_attn.o_proj", self.hidden, q, self.o_bias),
                ("mlp.gate_proj", self.intermediate, self.hidden, self.mlp_bias),
                ("mlp.up_proj", self.intermediate, self.hidden, self.mlp_bias),
                ("mlp.down_proj", self.hidden, self.intermediate, self.mlp_bias),
            ]
            for name, rows, columns, bias in projections:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}input_layernorm.weight"] = (self.hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


def _rope(config: Mapping[str, Any]) -> Rope | None:
    """The rotary settings of a config written by transformers 4 (rope_scaling) or 5 (rope_parameters); None: unknown."""
    settings: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in set(RopeKind) or settings.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == RopeKind.DEFAULT:
        return Rope(RopeKind.DEFAULT, theta)
    if kind == RopeKind.LINEAR:
        return Rope(RopeKind.LINEAR, theta, factor=float(settings["factor"]))
    return Rope(
        RopeKind.LLAMA3,
        theta,
        factor=float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_context_tokens=int(settings["original_max_position_embeddings"]),
    )


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Reads a parsed `config.json`. A family, activation or rotary kind that the static loop lacks becomes OTHER.

    Raises BadData when a field that every causal model has is missing or is not a number.
    """
    try:
        model_type = str(config["model_type"])
        vocab, context = int(config["vocab_size"]), int(config.get("max_position_embeddings", 2048))
        other = Architecture(Family.OTHER, model_type, vocab, context)
        rope = _rope(config)
        sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or [])
        known = model_type in {Family.LLAMA.value, Family.QWEN2.value, Family.QWEN3.value}
        if not known or rope is None or sliding or config.get("hidden_act", "silu") != "silu":
            return other
        family = Family(model_type)
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", False))
        return Architecture(
            family=family,
            model_type=model_type,
            vocab=vocab,
            context_tokens=context,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family is Family.QWEN2 or attention_bias,
            o_bias=family is not Family.QWEN2 and attention_bias,
            mlp_bias=family is Family.LLAMA and bool(config.get("mlp_bias", False)),
            qk_norm=family is Family.QWEN3,
            rope=rope,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadData(
            f"config.json does not describe a causal language model: {type(error).__name__} {error}",
            where=where,
            hint="write it with transformers' save_pretrained",
        ) from error
