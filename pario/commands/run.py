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
from glob import escape, glob
from typing import TYPE_CHECKING

import click

from pario.comm.launcher import launched_rank, rank_and_size
from pario.commands import arguments
from pario.commands.screen import screen
from pario.errors import FileError

if TYPE_CHECKING:
    from pario.stats.trace_summary import RankSummary

#: what follows the target is the script's
_ITS_OWN_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_module = click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
_target = click.argument("target")
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


@click.command(context_settings=_ITS_OWN_OPTIONS)
@_module
@_target
@_arguments
def run(module: bool, target: str, arguments: tuple[str, ...]) -> Callable[[], int]:
    """Run a script unchanged, with pario reading its LMDBs.

    In the script, `lmdb.open(..., readonly=True)` opens with pario: without a memory map, and faster on cold random
    reads. Environments opened for writing go to the real lmdb. The workers of a PyTorch DataLoader are covered, too.
    With PARIO_TIERS set, all of them share a copy of the file in the node's memory (docs/tiers.md).

    \b
    Examples:
      python -m pario run train.py --epochs 3
      mpiexec -n 4 python -m pario run train.py
      python -m pario run -m my_package.train
    """
    # Called after click has returned, since click would change some of the script's exceptions.
    return lambda: _run(module, target, arguments)


def _run(module: bool, target: str, arguments: Sequence[str]) -> int:
    """Run a script or a module as Python itself would, in this process. Raises OptionError for a PARIO_TIERS that means
    nothing, and what the script raises."""
    why = _missing(module, target)
    if why:
        return screen.refuse(why)
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
    """The reason why there is nothing to run, or ""."""
    if not module:
        return "" if os.path.isfile(target) else f"there is no script {target!r}"
    sys.path[0] = os.getcwd()  # as `python -m` has it; the command `pario` has its own folder there
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            target += ".__main__"
            spec = importlib.util.find_spec(target)
    return "" if spec is not None else f"there is no module {target!r} in the working directory or in this Python"


@click.command(context_settings=_ITS_OWN_OPTIONS)
@click.option("-o", "--output", metavar="FILE", default="trace.json", show_default=True, help="File to write.")
@_module
@click.option("--merge", "merges", is_flag=True, help="Run nothing: TARGET is a trace whose ranks have left parts.")
@_target
@_arguments
def trace(
    output: str, module: bool, merges: bool, target: str, arguments: tuple[str, ...]
) -> int | Callable[[], int]:
    """Run a script unchanged, and write what each rank did, and when.

    https://ui.perfetto.dev shows the file: a track per thread and per slot of the ring, and counters. `advise` says
    what the numbers mean. Works under mpiexec and srun, too: every rank is traced, and rank 0 merges the files.
    `import lmdb` is served by pario, as with `run`. docs/report.md has an example.

    \b
    Examples:
      python -m pario trace train.py --epochs 1
      mpiexec -n 4 python -m pario trace -o run1.json train.py
      python -m pario advise trace.json
    """
    if merges:
        return _merge(target)
    return lambda: _trace(output, module, target, arguments)


def _trace(output: str, module: bool, target: str, arguments: Sequence[str]) -> int:
    """Run a script as `run` does, with all its loaders traced, and say at its end where the trace is.

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
    stem, suffix = os.path.splitext(output)
    parts = glob(f"{escape(stem)}.rank*{escape(suffix)}")
    found = {path.removeprefix(f"{stem}.rank").removesuffix(suffix): path for path in parts}
    return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]


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
