"""Output of commands: lines, a line of JSON in their place, and a progress bar, from one rank."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import click
from tqdm import tqdm

from pario.text import counted, decimal_bytes, seconds, table

__all__ = ["Screen", "counted", "decimal_bytes", "printable", "screen", "seconds", "table"]


_LOG = logging.getLogger("pario")


class Screen:
    """The terminal of all ranks together: only rank 0 writes."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._log = logging.StreamHandler()  # for -v
        self.begin(None)

    def begin(self, rank: int | None) -> None:
        """A new command. rank : of the launcher (mpiexec, srun, ...); None: there is none"""
        self.rank = rank or 0
        self.launched = rank is not None
        self.running = False  # True: all ranks have opened the dataset; errors may now happen on one rank
        self.json = False  # True: what `tell` was told, instead of what `say` says
        self.quiet = False
        self.verbose = False
        self._facts: dict[str, Any] = {}
        _LOG.removeHandler(self._log)
        self._log = logging.StreamHandler()

    def say(self, text: str = "", *, err: bool = False) -> None:
        """A line on stdout, unless it is for JSON; or one on stderr, which is an error."""
        if self.rank == 0 and (err or not self.json):
            self.end_bar()
            click.echo(text, err=err)
            (sys.stderr if err else sys.stdout).flush()

    def note(self, text: str) -> None:
        """A line on stderr that is no error."""
        if not self.quiet:
            self.say(text, err=True)

    def refuse(self, why: str) -> int:
        """An error on stderr; returns the exit status."""
        self.say(f"error: {why}", err=True)
        return 2

    def tell(self, facts: dict[str, Any] | None = None, **more: Any) -> None:
        """Facts for --json: numbers without units in their text, sizes in bytes, times in seconds."""
        self._facts |= (facts or {}) | more

    def add(self, name: str, fact: Any) -> None:
        """One more of a list of facts."""
        self._facts.setdefault(name, []).append(fact)

    def end(self) -> None:
        """The line of JSON, if there is to be one."""
        if self.json and self.rank == 0 and self._facts:
            self.end_bar()
            click.echo(json.dumps(self._facts, default=str))

    def tell_more(self, times: int) -> None:
        """Show pario's log on stderr, and tracebacks."""
        self.verbose = True
        _LOG.setLevel(logging.INFO if times == 1 else logging.DEBUG)
        _LOG.addHandler(self._log)

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
            disable=self.rank != 0 or self.quiet,
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
