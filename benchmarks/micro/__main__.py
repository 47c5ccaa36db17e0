"""Characterise a job on its store: how reading scales with threads, what computing hides, what checkpoints cost.

    python -m benchmarks.micro threads train.lmdb --decoder image
    python -m benchmarks.micro overlap train.lmdb --decoder image --batch-size 64
    python -m benchmarks.micro checkpoint --slow /scratch/me --fast /local/nvme

Each prints a table and sentences, and saves them with single runs. They need `pip install -e ".[cli,image]"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from benchmarks.micro import commands
from benchmarks.micro.checkpoint import Training
from benchmarks.micro.overlap import Application
from benchmarks.micro.threads import Sweep
from pario.comm.launcher import launched_rank
from pario.commands import arguments
from pario.commands.screen import screen
from pario.errors import ParioError

MOST_THREADS = 512

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _all_of(*options: Decorator) -> Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_rounds = click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each variant, in turns."
)
_results = _all_of(
    click.option(
        "--out", metavar="DIR", help="Save table and JSON here. Default: pario-NAME. (With --json nothing.)"
    ),
    arguments.as_json,
)
#: arguments of the instruments that read
_data = _all_of(
    click.argument("path", required=False, type=click.Path()),
    arguments.db,
    click.option("--decoder", metavar="NAME", help="As for `pario bench run`; none: only read. Made data: image."),
    click.option("--size", type=click.IntRange(1), help="Pixels to which the decoder image scales."),
    click.option("--store", metavar="FOLDER", help="Without PATH: make data here. Default: the current folder."),
    arguments.number("--files", help="Without PATH: number of files to make.", default=512),
    click.option("--bytes", "nbytes", type=click.IntRange(1024), help="Without PATH: bytes of each file."),
    arguments.number("--seed", help="Seed of the shuffled orders.", default=0, kind=click.IntRange(0)),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def group() -> None:
    """Characterise a job on its store."""


@group.command(name="threads")
@_data
@click.option(
    "--threads", "numbers", default="1,2,4,8,16,32,64", show_default=True, metavar="N,...", help="Numbers to try."
)
@arguments.number("--seconds", help="Longest time of a run, in seconds.", default=2.0, kind=click.FloatRange(0.05))
@click.option(
    "--order", default="both", show_default=True, type=click.Choice(["both", "in-order", "shuffled"]), help="Orders."
)
@_rounds
@_results
def threads(
    numbers: str, seconds: float, order: str, rounds: int, seed: int, out: str | None, **options: Any
) -> int:
    """Measure how reading scales with threads.

    PATH is an LMDB, or a folder of files. Each is read whole, by one read, in 1 to 64 threads, with cold caches, in
    order and shuffled, with decoding and without; an LMDB also by a Loader with as many reads in flight. fio, if it is
    installed, says what the device itself gives. Names the limit, and the settings that follow. Without PATH, files
    and an LMDB are made in --store, and removed afterwards.

    \b
    Examples:
      python -m benchmarks.micro threads train.lmdb --decoder image
      python -m benchmarks.micro threads --store /scratch/me --threads 1,8,32
    """
    try:
        found = sorted({int(number) for number in numbers.split(",") if number.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > MOST_THREADS:
        raise click.BadParameter(f"numbers from 1 to {MOST_THREADS}, got {numbers!r}", param_hint="--threads")
    orders = {"both": (False, True), "in-order": (False,), "shuffled": (True,)}[order]
    return commands.threads(commands.Data(**options), Sweep(found, rounds, seconds, orders, seed=seed), out)


@group.command(name="overlap")
@_data
@arguments.number("-b", "--batch-size", "batch", help="Items per batch.", default=32)
@arguments.number("--threads", "numbers", help="Threads that read.", default=16, kind=click.IntRange(1, 512))
@arguments.number("--batches", help="Batches of a run.", default=50, kind=click.IntRange(2))
@_rounds
@_results
def overlap(
    batch: int, numbers: int, batches: int, rounds: int, seed: int, out: str | None, **options: Any
) -> int:
    """Measure what input costs beside computing, and how much computing hides it.

    A mini-application reads batches and computes on each for 0.5, 1 and 2 times as long as reading one
    takes, with 0, 1 and 4 batches prefetched, and beside it with a Loader. PATH is an LMDB, or a folder of files;
    without PATH, files and an LMDB are made in --store, and removed afterwards.

    \b
    Examples:
      python -m benchmarks.micro overlap train.lmdb --decoder image --batch-size 64
      python -m benchmarks.micro overlap --store /scratch/me --bytes 12288
    """
    what = Application(batch, numbers, batches, rounds=rounds, seed=seed)
    return commands.overlap(commands.Data(**options), what, out)


@group.command(name="checkpoint")
@click.option("--slow", metavar="FOLDER", default=".", show_default=True, help="Folder on the shared store.")
@click.option("--fast", metavar="FOLDER", help="Folder on a disk of the node or in its memory: the burst buffer.")
@arguments.number("--bytes", "nbytes", help="Bytes of each.", default=100_000_000, kind=click.IntRange(4))
@arguments.number("--arrays", help="Arrays of a checkpoint.", default=16)
@arguments.number("--checkpoints", help="Checkpoints of a run.", default=5)
@arguments.number("--every", help="Steps between two.", default=20)
@arguments.number("--step-ms", help="Time of a step, in milliseconds.", default=30.0, kind=click.FloatRange(0))
@_rounds
@_results
def checkpoint(
    slow: str, fast: str | None, step_ms: float, rounds: int, out: str | None, **training: Any
) -> int:
    """Measure how long checkpoints stop a training.

    A loop that sleeps in place of computing saves checkpoints: not at all, straight to the slow store, in the
    background, to the fast device alone, and through it as a burst buffer. What was saved is removed.

    \b
    Example:
      python -m benchmarks.micro checkpoint --slow /scratch/me --fast /local/nvme --bytes 2000000000 --step-ms 200
    """
    return commands.checkpoint(Training(step_s=step_ms / 1000, **training), (slow, fast), rounds, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 1 after an error, 2 for wrong arguments, 130 after Ctrl-C."""
    screen.begin(launched_rank())
    try:
        status = group.main(argv, "python -m benchmarks.micro", standalone_mode=False)
    except ParioError as e:
        if screen.verbose:
            raise
        screen.say(f"error: {e}", err=True)
        return 1
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    screen.end()
    return status or 0


arguments.with_common(group)
if __name__ == "__main__":
    sys.exit(main())
