"""Spans at given times, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from gcore.observe.trace import MAIN, Tracer


def span_at(tracer: Tracer, name: str, start_s: float, end_s: float, lane: str = MAIN, **args: Any) -> None:
    """As if the code between these times, in seconds of time.time(), were in `tracer.span(name)`."""
    tracer._add(name, round(start_s * 1e9), round(end_s * 1e9), lane, args)
