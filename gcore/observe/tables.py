"""Tables that commands print: in colour on a terminal, as plain text into a pipe."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 118  # in a pipe, which has none


def console() -> Console:
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(file=terminal.file, width=PLAIN_WIDTH, highlight=False)


def table(title: str, columns: Iterable[str], text: Container[str] = ()) -> Table:
    """`text`: the columns that are no numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        made.add_column(column, justify="left" if column in text else "right", no_wrap=True)
    return made
