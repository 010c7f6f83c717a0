"""What a person sees while a run goes on, and afterwards."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from colchis.components.errors import Bug
from colchis.components.records.boundary import Boundary, BoundaryRecord
from colchis.components.records.iteration import Evaluation, Summary
from colchis.components.report import (
    Status,
    find_evaluations,
    find_outcome,
    find_run,
    find_summary,
    render_report,
    status,
)
from colchis.components.store import Store
from colchis.workflows.boundaries import BOUNDARIES
from colchis.workflows.home import Home
from colchis.workflows.local.calls import Event, EventKind
from colchis.workflows.local.interpreter import WorkflowResult
from colchis.workflows.runs import LocalRun, run_locally

STAGES = ("rollout", "grade", "batch", "train", "reload")
WATCH_S = 2.0
CONTAINER_CODE = re.compile(r"\(exit code (\d+)\)")


def follow(run: LocalRun, *, as_json: bool = False) -> int:
    """Run to the end, showing each iteration as it closes. Returns the exit code."""
    home, console = Home.find(), Console(stderr=as_json)
    board = Board(run, console)
    with board:
        result = run_locally(run, home, on_event=board.on_event, on_store=board.on_store, on_end=board.on_end)
    board.close(result)
    if as_json:
        print(json.dumps({"phase": result.phase} | (board.final.to_json() if board.final else {})))
    return 0 if result.succeeded else exit_code(result, home.run_folder(run.run) / "workflows" / result.name)


def exit_code(result: WorkflowResult, logs: Path) -> int:
    """What the failed stage said itself; else its process's code, which a set of containers has in its message."""
    said = last_error(logs)
    if said is not None and said.exit_code:
        return said.exit_code
    codes = [int(n["outputs"]["exitCode"]) for n in result.nodes.values() if (n.get("outputs") or {}).get("exitCode")]
    # a container of a set has its code in its message only, as under a controller
    codes += [int(code) for n in result.nodes.values() for code in CONTAINER_CODE.findall(n.get("message") or "")]
    return next((code for code in codes if code not in (0, 64)), Bug.exit_code)


@dataclass(frozen=True)
class LastError:
    """The newest error line of a stage: what it said, its exit code when it knew one, and its log."""

    text: str
    exit_code: int | None
    log: Path


class Board:
    """The live view: progress bar, what runs now, and the newest iterations."""

    def __init__(self, run: LocalRun, console: Console) -> None:
        self.run, self.console = run, console
        self.store: Store | None = None
        self.final: Status | None = None
        self.report: Path | None = None
        self.summaries: list[Summary] = []
        self.evaluations: list[Evaluation] = []
        self.running: dict[str, str] = {}
        self.next = 0
        self.started = time.monotonic()
        total = run.config.loop.iterations
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.bar.add_task(run.run, total=total)
        self.live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.console.print(f"run {self.run.run}: {self.run.config.loop.iterations} iterations")
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def on_store(self, store: Store) -> None:
        """The services are up. Iterations closed earlier are shown as done."""
        self.store = store
        found = find_run(store, self.run.run)
        serving = status(store, self.run.run, last=1).serving if found else None
        self.next = serving.version if serving else 0
        self.bar.update(self.task, completed=self.next)

    def on_event(self, event: Event) -> None:
        """Something happened to a node of the Workflow."""
        match event.kind:
            case EventKind.NODE_STARTED if event.type in ("Pod", "Container"):
                name = event.node.rpartition(".")[2]
                self.running[event.node] = BOUNDARIES.get(name, name)
            case EventKind.NODE_FINISHED:
                self.running.pop(event.node, None)
                if event.node.endswith(".reload"):
                    self._show_closed()
                if ".evaluate" in event.node and event.phase == "Succeeded":
                    self._show_evaluations()
                if event.phase in ("Failed", "Error") and event.type == "Pod":
                    self._show_failure(event)
            case _:
                return

    def _show_failure(self, event: Event) -> None:
        """What Argo would say of the node, and what the stage itself said last."""
        logs = Home.find().run_folder(self.run.run) / "workflows" / event.workflow
        said = last_error(logs)
        self.console.print(f"[red]{event.node}[/red] {event.phase}: {event.message}", soft_wrap=True)
        if said is not None:
            self.console.print(f"  {escape(said.text)}\n  log: {said.log}", soft_wrap=True)

    def _show_closed(self) -> None:
        while self.store is not None and (summary := find_summary(self.store, self.run.run, self.next)) is not None:
            self.summaries.append(summary)
            self.next += 1
            self.bar.update(self.task, completed=self.next)
            if not self.console.is_terminal:
                self.console.print(" ".join(f"{k}={v}" for k, v in row(summary).items()), soft_wrap=True)

    def _show_evaluations(self) -> None:
        if self.store is None or (record := find_run(self.store, self.run.run)) is None:
            return
        known = {e.version for e in self.evaluations}
        self.evaluations = find_evaluations(self.store, record, self.next)
        if not self.console.is_terminal:
            for evaluation in self.evaluations:
                if evaluation.version not in known:
                    self.console.print(f"greedy accuracy {describe_evaluation(evaluation)}", soft_wrap=True)

    def __rich__(self) -> Group:
        now = ", ".join(sorted(set(self.running.values()))) or "starting the services"
        parts: list[Progress | Text | Table] = [self.bar, Text(f"now: {now}", style="dim"), table(self.summaries[-8:])]
        if self.evaluations:
            parts.append(Text(f"greedy accuracy {describe_evaluation(self.evaluations[-1])}"))
        return Group(*parts)

    def on_end(self, store: Store, _: WorkflowResult) -> None:
        """The Workflow has ended, the services have not."""
        if find_run(store, self.run.run) is None:
            return
        self.final = status(store, self.run.run)
        self.report = Home.find().run_folder(self.run.run) / "report.html"
        self.report.write_text(render_report(store, self.run.run), encoding="utf-8")

    def close(self, result: WorkflowResult) -> None:
        """Say how the run ended, before and after, and where the report is."""
        if self.final is None:
            self.console.print(f"[red]{result.phase}[/red] {result.message}: the run did not begin")
            return
        print_status(self.final, console=self.console, rows=8)
        colour = "green" if result.phase == "Succeeded" else "red"
        self.console.print(
            f"[{colour}]{result.phase}[/{colour}] {result.message or ''} in {time.monotonic() - self.started:.0f} s"
        )
        self.console.print(f"report: {self.report}", soft_wrap=True)


def last_error(folder: Path) -> LastError | None:
    """The newest error line in the logs of the pods below `folder`."""
    logs = [p for p in folder.glob("*/*stderr.log") if p.stat().st_size]
    for path in sorted(logs, key=lambda p: p.stat().st_mtime_ns, reverse=True):
        line = path.read_text(errors="replace").splitlines()[-1]
        try:
            record = json.loads(line)
        except ValueError:
            return LastError(line, None, path)
        if isinstance(record, dict) and record.get("level") == "error":
            return LastError(str(record["event"]), record.get("exit"), path)
    return None


def row(s: Summary) -> dict[str, str]:
    """One iteration in one line."""
    seconds = s.seconds
    generated = s.tokens / seconds["rollout"] if seconds.get("rollout") else 0.0
    metrics = s.metrics
    return {
        "iteration": str(s.iteration),
        "version": f"v{s.version}" + ("" if s.kind == "full" else " same"),
        "reward": "-" if s.reward_mean is None else f"{s.reward_mean:.3f}",
        "groups": f"{s.groups.get('trained', 0)}/{sum(s.groups.values())}" if s.groups else "-",
        "loss": _number(metrics.get("loss")),
        "grad": _number(metrics.get("grad_norm")),
        "gap": _number(metrics.get("gap_mean"), "{:.1e}"),
        "lag": str(s.lag),
        "tok/s": f"{generated:.0f}",
        **{stage: f"{seconds.get(stage, 0.0):.2f}s" for stage in STAGES if stage != "grade"},
        "pause": f"{1000 * seconds.get('pause', 0.0):.0f}ms",
    }


def _number(value: Any, form: str = "{:.4f}") -> str:
    return "-" if value is None else form.format(value)


def table(summaries: Iterable[Summary]) -> Table:
    """The newest iterations as a table."""
    rows = [row(s) for s in summaries]
    result = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else ():
        result.add_column(name, justify="right", no_wrap=True)
    for values in rows:
        result.add_row(*values.values())
    return result


def boundary_table(records: Sequence[BoundaryRecord]) -> Table:
    """A line per boundary that was passed: the slowest engine's time, how many engines, and what matters most of the proof."""
    result = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        result.add_column(no_wrap=True)
    for _, group in groupby(records, key=lambda r: r.boundary):
        of_boundary = list(group)
        slowest = max(of_boundary, key=lambda r: (r.engine is None, r.seconds))  # a sender's own copy says most
        engines = sum(r.engine is not None for r in of_boundary)
        result.add_row(
            f"  {slowest.boundary.value} {slowest.name}",
            f"{slowest.seconds:.3f}s",
            _count(engines, "engine") if engines else "",
            _proof(slowest),
        )
    return result


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _proof(record: BoundaryRecord) -> str:
    proof = record.proof
    match record.boundary:
        case Boundary.STORE:
            return f"{_count(proof['objects'], 'object')}, {proof['bytes'] / 1e6:.1f} MB, weights {proof['weights_digest'][:12]}"
        case Boundary.TRANSFER:
            return f"{proof['bytes'] / 1e6:.1f} MB, {proof['mb_per_s']:.0f} MB/s, {proof['retries']} retries"
        case Boundary.BUFFER:
            return f"{proof['tensors']} tensors read again" if proof["tensors"] else "nothing: a sender has the copy"
        case Boundary.LOAD:
            if proof.get("adapter"):
                pause = f"paused {1000 * proof['pause_s']:.0f} ms" if proof["pause_s"] else "no pause"
                return f"{pause}, adapter {proof['adapter']} on {proof['checksums']} tensors of its base"
            against = "those of the commit" if proof["predicted"] else "the same at all engines"
            way = " received," if proof.get("direct") else ""
            return f"paused {1000 * proof['pause_s']:.0f} ms,{way} {proof['checksums']} checksums: {against}"
        case Boundary.CACHE:
            gap = proof["max_gap"]
            return f"{proof['cached_tokens']} tokens cached, gap {'-' if gap is None else f'{gap:.1e}'}"


def describe_evaluation(e: Evaluation) -> str:
    text = f"v{e.version}: {100 * e.accuracy:.1f} % of {e.prompts} held-out prompts [{100 * e.low:.1f}, {100 * e.high:.1f}]"
    return f"{text}, {e.unscored} of them without a score" if e.unscored else text


def total_unscored(summaries: Iterable[Summary]) -> str:
    """Samples without a score, by reason; empty when every one has one."""
    total = sum((Counter(s.unscored) for s in summaries), Counter[str]())
    return ", ".join(f"{number} {reason}" for reason, number in sorted(total.items()))


def status_view(s: Status, rows: int = 10) -> Group:
    """A run's state for people."""
    version = s.serving.version if s.serving else None
    parts: list[Text | Table] = [
        Text.from_markup(
            f"[bold]{s.record.run}[/bold]  {version or 0}/{s.record.config.loop.iterations} iterations, "
            f"serving {'nothing' if version is None else f'v{version}'}, mode {s.record.config.mode}"
        )
    ]
    if s.summaries:
        parts.append(table(s.summaries[-rows:]))
    if unscored := total_unscored(s.summaries[-rows:]):
        parts.append(Text.assemble(("without a score", "yellow"), f" {unscored} samples of these iterations"))
    if s.boundaries:
        parts += [Text(f"reload of v{s.boundaries[0].version}, boundary by boundary"), boundary_table(s.boundaries)]
    for alert in sorted({a for summary in s.summaries[-rows:] for a in summary.alerts}):
        parts.append(Text.assemble(("alert", "yellow"), f" {alert}"))
    if s.stop:
        parts.append(Text.assemble(("stopping", "yellow"), f" {s.stop.reason} (asked by {s.stop.by})"))
    if s.evaluations:
        parts.append(Text("greedy accuracy, 95 % interval"))
        parts += [Text(f"  {describe_evaluation(e)}") for e in s.evaluations]
    return Group(*parts)


def print_status(s: Status, *, console: Console | None = None, rows: int = 10) -> None:
    """Print a run's state."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(status_view(s, rows))


def watch_status(store: Store, run: str, rows: int) -> None:
    """Show a run's state as it changes, until its last iteration is closed, the run has ended early, or Ctrl-C."""
    console = Console()
    found = status(store, run, rows)
    with Live(status_view(found, rows), console=console, auto_refresh=False) as live:
        while (found.serving.version if found.serving else 0) < found.record.config.loop.iterations:
            time.sleep(WATCH_S)  # a store tells nobody of changes
            outcome = find_outcome(store, run)
            found = status(store, run, rows)
            live.update(status_view(found, rows), refresh=True)
            if outcome is not None:
                console.print(f"{outcome.workflow} ended as {outcome.status} at {outcome.at}; nothing goes on")
                return
