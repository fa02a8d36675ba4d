"""Observation of a run: metrics, a timeline, the live view, the final report. Imports fast and without torch."""

from gcore.observe.metrics import MetricsWriter, read_rows, rewind
from gcore.observe.progress import Progress, Status
from gcore.observe.report import plot_reward, summarize, summary, summary_text
from gcore.observe.trace import Tracer, merge_traces
from gcore.observe.trackers import check_trackers

__all__ = [
    "MetricsWriter",
    "Progress",
    "Status",
    "Tracer",
    "check_trackers",
    "merge_traces",
    "plot_reward",
    "read_rows",
    "rewind",
    "summarize",
    "summary",
    "summary_text",
]
