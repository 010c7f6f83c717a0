"""Where a run stands, and the report that shows it: read from the store alone."""

from colchis.components.report.page import render_report
from colchis.components.report.status import (
    Status,
    find_evaluations,
    find_outcome,
    find_run,
    find_serving,
    find_stop,
    find_summary,
    known_run,
    list_runs,
    status,
)

__all__ = [
    "Status",
    "find_evaluations",
    "find_outcome",
    "find_run",
    "find_serving",
    "find_stop",
    "find_summary",
    "known_run",
    "list_runs",
    "render_report",
    "status",
]
