"""Line charts as inline SVG: the artifact viewer of the Argo UI allows neither scripts nor images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 150, 52, 22, 10


@dataclass(frozen=True)
class Series:
    """One line: y over x; points that are None leave a gap."""

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: str = "var(--accent)"
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): drawn as a vertical bar, for intervals."""


def line_chart(title: str, series: Sequence[Series], *, log: bool = False, floor: float | None = None) -> str:
    """An SVG figure with axes, or a note that there is nothing to draw yet."""
    values = [y for s in series for _, y in s.points if y is not None and _usable(y, log)]
    values += [v for s in series for _, low, high in s.band for v in (low, high)]
    xs = [x for s in series for x, _ in s.points]
    if not values or not xs:
        return f'<figure><figcaption>{escape(title)}</figcaption><p class="none">nothing measured yet</p></figure>'
    low, high = _range(values, log, floor)
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (_scale(y, log) - _scale(low, log)) / (_scale(high, log) - _scale(low, log))
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 8),
            TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in _ticks(low, high, log):
        _, py = place(x0, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{py + 3:.1f}" text-anchor="end">{_number(y)}</text>')
    for x, anchor in ((x0, "start"), (x1, "end")):
        parts.append(
            f'<text class="tick" x="{place(x, low)[0]:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{x:g}</text>'
        )
    for s in series:
        for x, bottom, top in s.band:
            (px, p1), (_, p2) = place(x, bottom), place(x, top)
            parts.append(
                f'<line class="band" x1="{px:.1f}" x2="{px:.1f}" y1="{p1:.1f}" y2="{p2:.1f}" stroke="{s.colour}"/>'
            )
        parts.append(_path(s, place, log))
    parts.append("</svg>")
    legend = "".join(f'<span><i style="background:{s.colour}"></i>{escape(s.label)}</span>' for s in series)
    key = f'<div class="key">{legend}</div>' if len(series) > 1 else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}{key}</figure>"


def _path(s: Series, place, log: bool) -> str:  # type: ignore[no-untyped-def]
    pieces: list[str] = []
    pen = "M"
    for x, y in s.points:
        if y is None or not _usable(y, log):
            pen = "M"
            continue
        px, py = place(x, y)
        pieces.append(f"{pen}{px:.1f},{py:.1f}")
        pen = "L"
    drawn = sum(_usable(y, log) for _, y in s.points)
    dots = ""
    if drawn <= 40:
        spots = [place(x, y) for x, y in s.points if y is not None and _usable(y, log)]
        dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.2" fill="{s.colour}"/>' for px, py in spots)
    return f'<path d="{" ".join(pieces)}" fill="none" stroke="{s.colour}" stroke-width="1.6"/>{dots}'


def _usable(y: float | None, log: bool) -> bool:
    return y is not None and math.isfinite(y) and (not log or y > 0)


def _scale(y: float, log: bool) -> float:
    return math.log10(max(y, 1e-300)) if log else y


def _range(values: Sequence[float], log: bool, floor: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    if floor is not None:
        low = min(low, floor)
    if log:
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9 + (low == high))
    if low == high:
        return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return low, high


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = round(math.log10(low)), round(math.log10(high))
        return [10.0**e for e in range(first, last + 1, max(1, (last - first) // 4))]
    return [low + (high - low) * k / 4 for k in range(5)]


def _number(y: float) -> str:
    return f"{y:.3g}"
