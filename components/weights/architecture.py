"""What a `config.json` says the tensors must be, and how the engine fuses them. Torch-free.

Known families: Llama, Qwen2, Qwen3 (dense). For any other the first version of the run is the reference instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colchis.components.errors import BadData

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the families whose tensors are derived from the configuration."""

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: Mapping[str, Any]) -> Shapes | None:
    """Name -> shape of every tensor that the configuration implies; None for a family that is not known.

    With tied embeddings `lm_head.weight` is not listed: a file may leave it out or repeat the embedding there.
    BadData when the configuration lacks a size.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        return None

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise BadData(f"config.json: {field} is {value!r}, expected a positive integer", where="config.json")
        return value

    hidden, inner, vocabulary = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    heads = size("num_attention_heads")
    head = size("head_dim", 128 if family == "qwen3" else hidden // heads)
    width = {"q_proj": heads * head}
    width["k_proj"] = width["v_proj"] = size("num_key_value_heads", heads) * head
    attention_bias = QKV if family == "qwen2" else (*QKV, "o_proj") if config.get("attention_bias") else ()
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))

    shapes: Shapes = {EMBEDDING: (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(size("num_hidden_layers")):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name in QKV:
            shapes[f"{prefix}self_attn.{name}.weight"] = (width[name], hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, width["q_proj"])
        for name in attention_bias:
            shapes[f"{prefix}self_attn.{name}.bias"] = (width.get(name, hidden),)
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = (head,)
        for name in GATE_UP:
            shapes[f"{prefix}mlp.{name}.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        if mlp_bias:
            shapes[prefix + "mlp.gate_proj.bias"] = shapes[prefix + "mlp.up_proj.bias"] = (inner,)
            shapes[prefix + "mlp.down_proj.bias"] = (hidden,)
    if not is_tied(config):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding. The three families' own default is that it is not."""
    return bool(config.get("tie_word_embeddings", False))


def fused(names: list[str]) -> dict[str, list[str]]:
    """The engine's tensor name -> the checkpoint's tensors whose bytes it is made of, in order.

    SGLang stacks q, k, v into `qkv_proj` and gate, up into `gate_up_proj`; every other tensor stays as it is.

    >>> fused(["a.mlp.gate_proj.weight", "a.mlp.up_proj.weight", "a.mlp.down_proj.weight"])
    {'a.mlp.gate_up_proj.weight': ['a.mlp.gate_proj.weight', 'a.mlp.up_proj.weight'],
     'a.mlp.down_proj.weight': ['a.mlp.down_proj.weight']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        group, parts = _group(name)
        groups.setdefault(group, list(parts))
    return groups


def _group(name: str) -> tuple[str, tuple[str, ...]]:
    for stacked, members in (("qkv_proj", QKV), ("gate_up_proj", GATE_UP)):
        for member in members:
            if f".{member}." in name:
                return name.replace(member, stacked), tuple(name.replace(member, m) for m in members)
    return name, (name,)
