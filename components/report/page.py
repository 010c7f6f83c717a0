"""report.html: one static page per run, readable in the artifact viewer of the Argo UI (inline CSS and SVG only)."""

from __future__ import annotations

from html import escape
from typing import Any

from colchis.components.records.iteration import Summary
from colchis.components.report.chart import Series, line_chart
from colchis.components.report.frame import card_row, document, table
from colchis.components.report.status import Status, status
from colchis.components.store import Store

ACCENT, SECOND, THIRD = "#2563eb", "#d97706", "#059669"


def render_report(store: Store, run: str) -> str:
    """The report of a run, as HTML text."""
    return page(status(store, run))


def page(s: Status) -> str:
    """The report for a status that is read already."""
    alerts = "".join(f'<p class="alert">{escape(a)}</p>' for a in sorted({a for x in s.summaries for a in x.alerts}))
    return document(
        s.record.run,
        f"""<p class="lead">mode {s.record.config.mode}, configuration {s.record.config_digest[:12]},
begun {escape(s.record.created_at)}, colchis {escape(s.record.code_version)}</p>
{alerts}
{_cards(s)}
<h2>Curves</h2>
<div class="charts">{_charts(s)}</div>
<h2>Newest iterations</h2>
{_table(s.summaries[-25:])}
<h2>Configuration</h2>
<pre>{escape(_configuration(s))}</pre>""",
    )


def _cards(s: Status) -> str:
    version = s.serving.version if s.serving else None
    cards = [
        (f"{version or 0} / {s.record.config.loop.iterations}", "iterations"),
        ("none" if version is None else f"v{version}", "served version"),
        (f"{sum(x.samples for x in s.summaries):,}", "trajectories"),
        (f"{sum(x.tokens for x in s.summaries):,}", "generated tokens"),
    ]
    if s.evaluations:
        first, last = s.evaluations[0], s.evaluations[-1]
        for e, label in ((first, "held-out accuracy before"), (last, "held-out accuracy now"))[
            : 1 + (last is not first)
        ]:
            unscored = f", {e.unscored} of {e.prompts} without a score" if e.unscored else ""
            cards.append((f"{100 * e.accuracy:.1f} %", f"{label} [{100 * e.low:.1f}, {100 * e.high:.1f}]{unscored}"))
    if lost := sum(sum(x.unscored.values()) for x in s.summaries):
        cards.append((f"{lost:,}", "trajectories without a score"))
    return card_row(cards)


def _charts(s: Status) -> str:
    xs = s.summaries

    def of(get: Any, label: str = "", colour: str = ACCENT) -> Series:
        return Series(label, [(float(x.iteration), get(x)) for x in xs], colour)

    def metric(name: str, label: str = "", colour: str = ACCENT) -> Series:
        return of(lambda x: x.metrics.get(name), label, colour)

    def stage(name: str, colour: str) -> Series:
        return of(lambda x: x.seconds.get(name), name, colour)

    accuracy = Series(
        "greedy accuracy",
        [(float(e.version), e.accuracy) for e in s.evaluations],
        THIRD,
        [(float(e.version), e.low, e.high) for e in s.evaluations],
    )
    return "".join(
        (
            line_chart("Mean reward of the sampled groups", [of(lambda x: x.reward_mean)], floor=0.0),
            line_chart("Greedy accuracy on held-out prompts, 95 % interval", [accuracy], floor=0.0),
            line_chart("Gradient norm before clipping", [metric("grad_norm")], log=True),
            line_chart(
                "Gap of sampling and training log-probabilities",
                [metric("gap_mean", "mean"), metric("gap_max", "max", SECOND)],
                log=True,
            ),
            line_chart("Entropy of the sampled tokens", [metric("entropy")]),
            line_chart(
                "Seconds per stage",
                [stage("rollout", ACCENT), stage("train", SECOND), stage("reload", THIRD)],
                floor=0.0,
            ),
            line_chart("Pause of the engines per reload, seconds", [stage("pause", ACCENT)], floor=0.0),
            line_chart(
                "Groups without signal or valid members, share",
                [
                    of(
                        lambda x: (
                            1 - x.groups.get("trained", 0) / sum(x.groups.values()) if any(x.groups.values()) else None
                        )
                    )
                ],
                floor=0.0,
            ),
        )
    )


def _table(summaries: list[Summary]) -> str:
    if not summaries:
        return '<p class="none">no iteration is closed yet</p>'
    names = (
        "iteration",
        "version",
        "decision",
        "reward",
        "samples",
        "tokens",
        "grad norm",
        "gap",
        "rollout",
        "train",
        "reload",
    )
    rows = []
    for x in reversed(summaries):
        values = (
            x.iteration,
            f"v{x.version}",
            x.decision + (f": {x.reason}" if x.reason else ""),
            "-" if x.reward_mean is None else f"{x.reward_mean:.3f}",
            x.samples,
            x.tokens,
            _metric(x, "grad_norm", "{:.3f}"),
            _metric(x, "gap_mean", "{:.1e}"),
            *(f"{x.seconds.get(stage, 0.0):.2f} s" for stage in ("rollout", "train", "reload")),
        )
        rows.append(values)
    return table(names, rows)


def _metric(x: Summary, name: str, form: str) -> str:
    value = x.metrics.get(name)
    return "-" if value is None else form.format(value)


def _configuration(s: Status) -> str:
    lines = []
    for section, value in s.record.config.model_dump(mode="json").items():
        if isinstance(value, dict):
            lines.append(f"{section}:")
            lines += [f"  {k}: {v}" for k, v in value.items()]
        else:
            lines.append(f"{section}: {value}")
    return "\n".join(lines)
