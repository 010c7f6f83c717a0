"""Durations as Argo reads them: a bare number is seconds, else Go's `1h30m`, `15s`, `500ms`."""

from __future__ import annotations

import re

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(h|ms|m|s|us|µs|ns)")


def seconds(text: str | int) -> float:
    """Raises ValueError for what is neither.

    >>> seconds("1m30s"), seconds("15")
    (90.0, 15.0)
    """
    text = str(text).strip()
    if re.fullmatch(r"\d+", text):
        return float(text)
    if not re.fullmatch(f"(?:{_PART.pattern})+", text):
        raise ValueError(f"unable to parse {text} as a duration")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def humanize(duration_s: float) -> str:
    """`90.0` as `1 minutes 30 seconds`, the way the controller's messages say it."""
    minutes, rest = divmod(round(duration_s), 60)
    return (f"{minutes} minutes " if minutes else "") + f"{rest} seconds"
