"""Tables and progress bars, plain where rich is missing, as on some GPU machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    def __call__(self, done: str) -> None:
        """One more is done; ``done`` says what."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is aligned left, the others right."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, columns, rows))
        return
    table = Table()
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A file has no width of its own: nothing is cut there.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    print(title)  # not as the table's title, which is wrapped at the table's width
    console.print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [title]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere a line for every tenth of the way. Both go to stderr."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        yield _Lines(title, total)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[done]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, done="")
        yield lambda done: bar.update(task, advance=1, done=done)


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._count = title, total, 0

    def __call__(self, done: str) -> None:
        before, self._count = self._count, self._count + 1
        if self._count * 10 // max(self._total, 1) > before * 10 // max(self._total, 1):
            print(f"{self._title}: {self._count}/{self._total}, {done}", file=sys.stderr)
