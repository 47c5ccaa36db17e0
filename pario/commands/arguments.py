"""Arguments that several commands share, for click."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from pario.commands.screen import screen

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

path = click.argument("path", type=click.Path())
db = click.option("--db", metavar="NAME", help="Named database. Default: the main one.")
decoder = click.option(
    "--decoder",
    metavar="NAME",
    help="Decoder: datum, image, json, zlib+json, ase, ... (docs/decoders.md), module:function or file.py:function.",
)
select = click.option(
    "--select",
    metavar="WHICH",
    help='Records to read: START:STOP, or the beginning of their keys; "all" includes meta records.',
)
def _sets(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    return lambda context, _, wanted: setattr(screen, name, getattr(screen, name) or wanted)


as_json = click.option(
    "--json", is_flag=True, expose_value=False, callback=_sets("json"), help="Print one line of JSON instead of text."
)


def number(*names: str, help: str, default: float, kind: click.ParamType | None = None) -> Decorator:
    return click.option(*names, default=default, show_default=True, type=kind or click.IntRange(1), help=help)


def choice(*names: str, known: Iterable[str], help: str) -> Decorator:
    """known : the default first"""
    one, *others = known
    return click.option(*names, default=one, show_default=True, type=click.Choice([one, *others]), help=help)


aim = choice(
    "--for", "aim", known=("capacity", "speed"),
    help="Take, of the codecs that keep up, the one of the highest ratio or the fastest one.",
)  # fmt: skip
batch_size = number("-b", "--batch-size", help="Records per rank and batch.", default=64)


# -- of every command ----------------------------------------------------------------------------------------------


def _verbose(context: click.Context, _: click.Parameter, times: int) -> None:
    if times:
        screen.tell_more(times)


_COMMON = (
    click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_sets("quiet"), help="Show no progress and notes."
    ),
    click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_verbose,
        help="Show pario's log, and tracebacks of errors; -vv also what is tuned.",
    ),
)


def with_common(command: click.Command) -> None:
    """Let this command and those below it take the options that every command has."""
    command.params.extend(_COMMON)
    for each in getattr(command, "commands", {}).values():
        with_common(each)
