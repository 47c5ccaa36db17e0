"""The commands `trace` and `advise`, their arguments and help texts, for click (app.py). trace.py does the work."""

from __future__ import annotations

from collections.abc import Callable

import click

__all__ = ["advise", "trace"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE", default="trace.json", show_default=True, help="Where it is written.")
@click.option("-n", "--ranks", type=click.IntRange(1, 1024), help="Start this many MPI ranks with mpiexec.")
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
@click.option("--merge", "merges", is_flag=True, help="Run nothing: TARGET is a trace whose ranks have left parts.")
@click.option("--part", is_flag=True, hidden=True)  # of the ranks that --ranks starts
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def trace(
    output: str, ranks: int | None, module: bool, merges: bool, part: bool, target: str, arguments: tuple[str, ...]
) -> int | Callable[[], int]:
    """Run a script unchanged, and write what each rank did, and when.

    https://ui.perfetto.dev shows the file: a track per thread and per slot of the ring, and counters. `advise` says
    what the numbers mean. Works under mpiexec and srun, too: every rank is traced, and rank 0 merges the files.
    `import lmdb` is served by pario, as with `run`. docs/traces.md has an example.

    \b
    Examples:
      python -m pario trace train.py --epochs 1
      python -m pario trace -o run1.json -n 4 train.py
      mpiexec -n 4 python -m pario trace train.py
      python -m pario advise trace.json
    """
    from pario.commands import trace as room

    if merges:
        return room.merge(target)
    if ranks is not None:
        return room.launch(ranks, output, module, target, arguments)
    # Called after click has returned, since click would change some of the script's exceptions.
    return lambda: room.trace(output, module, target, arguments, part=part)


@click.command()
@click.argument("traces", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def advise(traces: tuple[str, ...], as_json: bool) -> int:
    """Say what a trace means: what limits the job, which requests are costly, and which option changes it.

    TRACES: a file of `trace` or Options(trace=...), or those of several ranks of one job.

    \b
    Example:
      python -m pario advise trace.json
    """
    from pario.commands import trace as room

    return room.advise_on(traces, as_json)
