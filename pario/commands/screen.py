"""Output of commands: lines and a progress bar, from one rank."""

from __future__ import annotations

import sys
from typing import Any

import click
from tqdm import tqdm

from pario.text import counted, decimal_bytes, seconds, table

__all__ = ["Screen", "counted", "decimal_bytes", "printable", "screen", "seconds", "table"]


class Screen:
    """The terminal of all ranks together: only rank 0 writes."""

    def __init__(self) -> None:
        self.rank = 0
        self.launched = False  # by mpiexec, srun, ...
        self.running = False  # True: all ranks have opened the dataset; errors may now happen on one rank
        self._bar: Any = None

    def say(self, text: str = "", *, err: bool = False) -> None:
        """A line on stdout (or stderr)."""
        if self.rank == 0:
            self.end_bar()
            click.echo(text, err=err)
            (sys.stderr if err else sys.stdout).flush()

    def bar(self, total: int, what: str, unit: str) -> Any:
        """A progress bar on stderr: `bar.update(n)`, and `bar.n`. It appears after a second; a log file gets a line
        every 5 s instead of a moving bar."""
        self.end_bar()
        moving = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            desc=what,
            unit=unit,
            unit_scale=True,
            disable=self.rank != 0,
            delay=1.0,
            mininterval=0.1 if moving else 5.0,
            leave=False,
            file=sys.stderr,
        )
        return self._bar

    def progress(self, what: str, unit: str) -> Any:
        """A function (done, total) that moves a bar, for `Reader(progress=...)`."""
        bars: list[Any] = []

        def move(done: int, total: int) -> None:
            if not bars:
                bars.append(self.bar(total, what, unit))
            bars[0].update(done - bars[0].n)
            if done >= total:
                self.end_bar()

        return move

    def end_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


screen = Screen()


def printable(key: bytes, most: int = 48) -> str:
    """Key bytes as text if they are text, else in hex; at most `most` characters."""
    try:
        text = key.decode()
        if not text.isprintable():
            raise ValueError
    except ValueError:
        text = "0x" + key.hex()
    return text if len(text) <= most else text[: most - 3] + "..."
