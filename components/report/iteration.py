"""The page of one iteration, an artifact of its reload: what it gave, where its time went, what each boundary proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from colchis.components.records.boundary import BoundaryRecord
from colchis.components.records.iteration import Summary
from colchis.components.report.frame import card_row, document, table

STAGES = ("rollout", "grade", "batch", "train", "reload")
WIDTH, ROW, LEFT, RIGHT = 640, 22, 70, 70


def iteration_page(summary: Summary, records: Sequence[BoundaryRecord]) -> str:
    """HTML text. `records`: those of the reload that closed the iteration."""
    decision = summary.decision + (f": {summary.reason}" if summary.reason else "")
    alerts = "".join(f'<p class="alert">{escape(alert)}</p>' for alert in summary.alerts)
    boundaries = [
        (
            f"{r.boundary.value} {r.name}",
            r.at,
            f"{r.seconds:.3f} s",
            ", ".join(f"{k} {v}" for k, v in r.headline().items() if k != "seconds"),
        )
        for r in records
    ]
    metrics = [(name, _number(value)) for name, value in sorted(summary.metrics.items())]
    return document(
        f"{summary.run}, iteration {summary.iteration}",
        f"""<p class="lead">{escape(decision)}; version {summary.version} ({summary.kind}),
weights {summary.weights_digest[:16]}, closed {escape(summary.closed_at)}</p>
{alerts}
{card_row(_cards(summary))}
<h2>Seconds per stage</h2>
{_bars({name: summary.seconds[name] for name in STAGES if name in summary.seconds})}
<h2>Boundaries of the reload</h2>
{table(("boundary", "at", "time", "proof"), boundaries)}
<h2>Training</h2>
{table(("metric", "value"), metrics) if metrics else '<p class="none">nothing was trained</p>'}
<h2>Commits</h2>
{table(("key", "sha256"), sorted(summary.commits.items()))}""",
    )


def _cards(s: Summary) -> list[tuple[str, str]]:
    groups = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in s.groups.items() if count)
    return [
        ("-" if s.reward_mean is None else f"{s.reward_mean:.3f}", "mean reward"),
        (f"{s.samples:,}", "trajectories"),
        (f"{s.tokens:,}", "generated tokens"),
        *((f"{number:,}", f"without a score: {reason}") for reason, number in sorted(s.unscored.items())),
        (str(s.lag), "largest lag of a trained token"),
        (str(sum(s.groups.values())), f"groups: {groups}" if groups else "groups"),
    ]


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _bars(seconds: Mapping[str, float]) -> str:
    """One bar per stage, as SVG; they follow each other."""
    if not seconds:
        return '<p class="none">no stage has run</p>'
    longest = max(seconds.values()) or 1.0
    height = ROW * len(seconds) + 6
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="seconds per stage">']
    for i, (name, value) in enumerate(seconds.items()):
        y, length = 4 + i * ROW, value / longest * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text class="label" x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="bar" x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 6}"/>')
        parts.append(f'<text class="label" x="{LEFT + length + 6:.1f}" y="{y + 12}">{value:.2f} s</text>')
    return "".join(parts) + "</svg>"
