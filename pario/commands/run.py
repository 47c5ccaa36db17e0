"""`run`, `trace` and `advise`: run a script unchanged, with its `import lmdb` served by pario; write down for Perfetto
what it does; say what those numbers mean."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import runpy
import shlex
import signal
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

import click

from pario.comm.launcher import launched_rank, rank_and_size
from pario.commands import arguments
from pario.commands.screen import screen
from pario.errors import FileError

if TYPE_CHECKING:
    from pario.stats.trace_summary import RankSummary

__all__ = ["advise", "run", "trace"]

#: More ranks per core than this are probably a typing error.
RANKS_PER_CORE = 16

#: what follows the target is the script's
_ITS_OWN_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_module = click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
_target = click.argument("target")
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


@click.command(context_settings=_ITS_OWN_OPTIONS)
@click.option("-n", "--ranks", type=click.IntRange(1), help="Start this many MPI ranks with mpiexec.")
@_module
@click.option("--oversubscribe", is_flag=True, help="With -n: allow more than 16 ranks per core of this machine.")
@_target
@_arguments
def run(
    ranks: int | None, module: bool, oversubscribe: bool, target: str, arguments: tuple[str, ...]
) -> int | Callable[[], int]:
    """Run a script unchanged, with pario reading its LMDBs.

    In the script, `lmdb.open(..., readonly=True)` opens with pario: without a memory map, and faster on cold random
    reads. Environments opened for writing go to the real lmdb. The workers of a PyTorch DataLoader are covered, too.
    With PARIO_TIERS set, all of them share a copy of the file in the node's memory (docs/tiers.md).

    \b
    Examples:
      python -m pario run train.py --epochs 3
      python -m pario run -n 4 train.py
      python -m pario run -m my_package.train
    """
    if ranks is not None:
        return _launch(ranks, module, target, arguments, oversubscribe=oversubscribe)
    # Called after click has returned, since click would change some of the script's exceptions.
    return lambda: _run(module, target, arguments)


def _launch(
    ranks: int,
    module: bool,
    target: str,
    arguments: Sequence[str],
    *,
    oversubscribe: bool = False,
    command: Sequence[str] = ("run",),
) -> int:
    """Start the same command on `ranks` MPI ranks; returns mpiexec's exit status.

    Checks everything before it starts anything. oversubscribe : accept any number of ranks; command : of pario, and its
    options, before the target
    Raises OptionError for a PARIO_TIERS that means nothing.
    """
    import subprocess

    from pario.commands.mpiexec import find_mpiexec
    from pario.commands.run_service import script_tiers

    why = _missing(module, target) or ("" if oversubscribe else _too_many(ranks))
    mpiexec: list[str] = []
    if not why:
        script_tiers()
        mpiexec, why = find_mpiexec()
    if why:
        screen.say(f"error: {why}", err=True)
        return 2
    words = [sys.executable, "-m", "pario", *command, *(["-m"] if module else []), target, *arguments]
    return subprocess.run([*mpiexec, "-n", str(ranks), *words]).returncode


def _run(module: bool, target: str, arguments: Sequence[str]) -> int:
    """Run a script or a module as Python itself would, in this process. Raises OptionError for a PARIO_TIERS that means
    nothing, and what the script raises."""
    why = _missing(module, target)
    if why:
        screen.say(f"error: {why}", err=True)
        return 2
    from pario.commands.run_service import join_service

    join_service()  # begins while the script does
    from pario.kernels.jit import tell_cache_problem
    from pario.lmdb.hybrid import install

    tell_cache_problem(launched_rank() or 0)
    install()
    sys.excepthook = sys.__excepthook__
    sys.argv = [target, *arguments]
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    sys.path[0] = os.path.dirname(os.path.realpath(target))
    # A real module, not runpy's temporary one: threads and exit handlers may use it later, and workers that
    # multiprocessing spawns find the script by its __file__.
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(target)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open(target, "rb") as file:
        code = compile(file.read(), os.path.abspath(target), "exec")
    exec(code, vars(main))
    return 0


def _missing(module: bool, target: str) -> str:
    """The reason why there is nothing to run, or "". Searches for a module where `python -m` would."""
    if not module:
        return "" if os.path.isfile(target) else f"there is no script {target!r}"
    sys.path[0] = os.getcwd()  # as `python -m` has it; the command `pario` has its own folder there
    spec = _find(target)
    if spec is not None and spec.submodule_search_locations is not None:
        target += ".__main__"
        spec = _find(target)
    return "" if spec is not None else f"there is no module {target!r} in the working directory or in this Python"


def _find(name: str) -> ModuleSpec | None:
    """The module's spec. Imports the packages around it only if a search without them finds nothing: a package may
    extend its own search path."""
    parts = name.split(".")
    locations = None
    for k, part in enumerate(parts, 1):
        spec = PathFinder.find_spec(part, locations) if part else None
        if spec is None:
            break
        if k == len(parts):
            return spec
        locations = spec.submodule_search_locations
        if locations is None:
            return None
    try:
        return importlib.util.find_spec(name)
    except Exception:  # whatever a package does when it is imported
        return None


def _too_many(ranks: int) -> str:
    from pario.machine import core_quota

    cores = min(len(os.sched_getaffinity(0)), core_quota() or float("inf"))
    if ranks <= RANKS_PER_CORE * max(1, cores):
        return ""
    return (
        f"{ranks:,} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores:g} cores: add "
        "--oversubscribe if you mean it, or if your mpiexec spreads them over more machines"
    )


@click.command(context_settings=_ITS_OWN_OPTIONS)
@click.option("-o", "--output", metavar="FILE", default="trace.json", show_default=True, help="File to write.")
@click.option("-n", "--ranks", type=click.IntRange(1, 1024), help="Start this many MPI ranks with mpiexec.")
@_module
@click.option("--merge", "merges", is_flag=True, help="Run nothing: TARGET is a trace whose ranks have left parts.")
@click.option("--part", is_flag=True, hidden=True)  # of the ranks that --ranks starts
@_target
@_arguments
def trace(
    output: str, ranks: int | None, module: bool, merges: bool, part: bool, target: str, arguments: tuple[str, ...]
) -> int | Callable[[], int]:
    """Run a script unchanged, and write what each rank did, and when.

    https://ui.perfetto.dev shows the file: a track per thread and per slot of the ring, and counters. `advise` says
    what the numbers mean. Works under mpiexec and srun, too: every rank is traced, and rank 0 merges the files.
    `import lmdb` is served by pario, as with `run`. docs/report.md has an example.

    \b
    Examples:
      python -m pario trace train.py --epochs 1
      python -m pario trace -o run1.json -n 4 train.py
      mpiexec -n 4 python -m pario trace train.py
      python -m pario advise trace.json
    """
    if merges:
        return _merge(target)
    if ranks is not None:
        return _launch_traced(ranks, output, module, target, arguments)
    return lambda: _trace(output, module, target, arguments, part=part)


def _launch_traced(ranks: int, output: str, module: bool, target: str, arguments: Sequence[str]) -> int:
    """Trace a script on `ranks` MPI ranks of this machine; returns mpiexec's exit status."""
    from pario.stats.trace_file import check_writable, part_path, take_parts

    output = check_writable(output)
    for earlier in (*_parts_of(output), output):
        with contextlib.suppress(OSError):
            os.unlink(earlier)
    status = _launch(ranks, module, target, arguments, command=("trace", "--part", "-o", output))
    parts = [part_path(output, rank, ranks) for rank in range(ranks)]
    there = [part for part in parts if os.path.exists(part)]
    # An error, or a rank without a loader, has kept rank 0 from it. (Or it was done, and one has written more since.)
    if ranks > 1 and there and (len(there) == ranks or not os.path.exists(output)):
        take_parts(there, output)
    if os.path.exists(output):
        screen.note(_where(output))
    return status


def _trace(output: str, module: bool, target: str, arguments: Sequence[str], *, part: bool) -> int:
    """Run a script as `run` does, with all its loaders traced, and say at its end where the trace is.

    part : say nothing, since somebody else will join the ranks' parts
    Raises OptionError, and what the script raises.
    """
    from pario.stats.trace_file import check_writable, part_path, write_part
    from pario.stats.tracing import begin_process_trace

    output = check_writable(output)
    earlier = _file_number(output)
    recorder = begin_process_trace(output, *rank_and_size())
    recorder.dirty = True  # what the kernel counts is there in any case

    def end() -> None:
        if recorder.pid != os.getpid():  # a forked child, which would replace its parent's file
            return
        try:
            if recorder.dirty:
                write_part(recorder)
        except Exception as e:  # the script has ended, and its exit status stays
            screen.say(f"pario: the trace is not written: {e}", err=True)
            return
        own = part_path(recorder.path, recorder.rank, recorder.size)
        if part:
            return
        if own != output and os.path.exists(own):
            join = f"python -m pario trace --merge {shlex.quote(output)}"
            screen.note(f"pario: this rank's part of the trace is in {own}; `{join}` joins those of all ranks")
        elif _file_number(output) != earlier:
            screen.note(_where(output))

    _end_on_sigterm(end)
    atexit.register(end)
    status = _run(module, target, arguments)
    if status:  # there is no such script: an earlier trace stays
        atexit.unregister(end)
        recorder.dirty = False
    return status


def _merge(output: str) -> int:
    """Make one file of the parts that ranks have left beside it. Raises FileError, OSError."""
    from pario.stats.trace_file import join_parts, part_path

    output = os.path.abspath(os.path.expanduser(output))
    parts = _parts_of(output)
    if not parts:
        usual = os.path.basename(part_path(output, 0, 2))
        raise FileError("there are no parts of this trace", path=output, hint=f"Parts are named like {usual}.")
    join_parts(parts, output)
    screen.say(f"{output}: the trace of {len(parts)} ranks")
    return 0


def _parts_of(output: str) -> list[str]:
    """The files that ranks have left beside a trace, in rank order."""
    stem, suffix = os.path.splitext(os.path.basename(output))
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(output) or "."):
            number = name.removeprefix(f"{stem}.rank").removesuffix(suffix)
            if name == f"{stem}.rank{number}{suffix}" and number.isdecimal():
                found[int(number)] = os.path.join(os.path.dirname(output), name)
    return [path for _, path in sorted(found.items())]


def _where(output: str) -> str:
    """Where the trace is, and what to do with it. Not for stdout, which is the script's."""
    advice = f"python -m pario advise {shlex.quote(output)}"
    return f"pario: the trace is in {output}; `{advice}` says what it means, and https://ui.perfetto.dev shows it"


def _file_number(path: str) -> int | None:
    """Another one after the file was replaced; None: there is no file."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _end_on_sigterm(end: Callable[[], None]) -> None:
    """A scheduler that ends the job gets the trace of what was done, unless the script handles the signal itself."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def stop(number: int, _: object) -> None:
        with contextlib.suppress(Exception):
            end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, stop)


@click.command()
@click.argument("traces", nargs=-1, required=True)
@arguments.as_json
def advise(traces: tuple[str, ...]) -> int:
    """Say what a trace means: what limits the job, which requests are costly, and which option changes it.

    TRACES: a file of `trace` or Options(trace=...), or those of several ranks of one job.

    \b
    Example:
      python -m pario advise trace.json
    """
    from pario.stats.advise import Job
    from pario.stats.advise import advise as found_in
    from pario.stats.trace_file import read_head
    from pario.stats.trace_summary import read_ranks

    ranks: list[RankSummary] = []
    for path in traces:
        whole = os.path.abspath(os.path.expanduser(path))
        for part in [whole] if os.path.exists(whole) else _parts_of(whole) or [whole]:
            ranks += read_ranks(read_head(part), part)
    job, found = Job(ranks), found_in(ranks)
    screen.tell(head=job.head(), advice=[each._asdict() for each in found])
    screen.say(f"{', '.join(traces)}: {job.head()}")
    for number, each in enumerate(found, 1):
        screen.say(f"\n{number}. {each}")
    if not found:
        screen.say("\nNothing to say: no loader took a batch, and no request is out of the ordinary.")
    return 0
