"""Values as Go prints them, because Argo's substitutions put them into manifests that way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

Value = Any


def go_json(value: Value) -> str:
    """JSON as Go writes it: compact, sorted keys, `5` for the float 5.0, `<`, `>` and `&` escaped."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"unsupported value: {value}")
        return _go_float(value, "json")
    if isinstance(value, list):
        return "[" + ",".join(map(go_json, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{go_json(k)}:{go_json(value[k])}" for k in sorted(value)) + "}"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def go_string(value: Value) -> str:
    """What Go's `%v` prints, which is what `string(x)` gives."""
    if value is None:
        return "<nil>"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _go_float(value, "print")
    if isinstance(value, list):
        return "[" + " ".join(map(go_string, value)) + "]"
    if isinstance(value, Mapping):
        return "map[" + " ".join(f"{k}:{go_string(value[k])}" for k in sorted(value)) + "]"
    return str(value)


def _go_float(value: float, style: Literal["json", "print"]) -> str:
    if not math.isfinite(value):
        return {"inf": "+Inf", "-inf": "-Inf"}.get(str(value), "NaN")
    small = 1e-6 if style == "json" else 1e-4
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    if small <= abs(value) < 1e21:
        text = format(value, "f") if value.is_integer() else format_plain(value)
        return text.split(".")[0] if value.is_integer() else text
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        mantissa, _, exponent = f"{value:.16e}".partition("e")
        digits = repr(value).replace(".", "").replace("-", "").strip("0")
        mantissa = ("-" if value < 0 else "") + digits[0] + ("." + digits[1:] if digits[1:] else "")
    mantissa = mantissa.removesuffix(".0")
    sign, digits = exponent[0] if exponent[0] in "+-" else "+", exponent.lstrip("+-")
    width = 1 if style == "json" and sign == "-" else 2
    return f"{mantissa}e{sign}{digits.lstrip('0').rjust(width, '0')}"


def format_plain(value: float) -> str:
    """The shortest decimal that reads back as `value`, without an exponent."""
    text = repr(value)
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    places = len(mantissa.partition(".")[2]) - int(exponent)
    return f"{value:.{max(places, 0)}f}"
