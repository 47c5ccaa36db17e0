"""`trace` and `advise`: what a script does as a file for Perfetto, and what its numbers say."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from typing import Any

from pario.comm.launcher import rank_and_size
from pario.commands import run as script
from pario.commands.screen import screen
from pario.errors import FileError
from pario.stats.advise import Job, advise
from pario.stats.trace_file import check_writable, join_parts, part_path, read_head, take_parts, write_part
from pario.stats.trace_summary import RankSummary, read_ranks
from pario.stats.tracing import begin_process_trace

__all__ = ["advise_on", "launch", "merge", "trace"]


def launch(ranks: int, output: str, module: bool, target: str, arguments: Sequence[str]) -> int:
    """Trace a script on `ranks` MPI ranks of this machine; returns mpiexec's exit status."""
    output = check_writable(output)
    for earlier in (*parts_of(output), output):
        with contextlib.suppress(OSError):
            os.unlink(earlier)
    status = script.launch(ranks, module, target, arguments, command=("trace", "--part", "-o", output))
    parts = [part_path(output, rank, ranks) for rank in range(ranks)]
    there = [part for part in parts if os.path.exists(part)]
    # An error, or a rank without a loader, has kept rank 0 from it. (Or it was done, and one has written more since.)
    if ranks > 1 and there and (len(there) == ranks or not os.path.exists(output)):
        take_parts(there, output)
    if os.path.exists(output):
        screen.say(_where(output), err=True)
    return status


def trace(output: str, module: bool, target: str, arguments: Sequence[str], *, part: bool = False) -> int:
    """Run a script as `run` does, with all its loaders traced, and say at its end where the trace is.

    part : say nothing, since somebody else will join the ranks' parts
    Raises OptionError, and what the script raises.
    """
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
            screen.say(f"pario: this rank's part of the trace is in {own}; `{join}` joins those of all ranks", err=True)
        elif _file_number(output) != earlier:
            screen.say(_where(output), err=True)

    _end_on_sigterm(end)
    atexit.register(end)
    status = script.run(module, target, arguments)
    if status:  # there is no such script: an earlier trace stays
        atexit.unregister(end)
        recorder.dirty = False
    return status


def merge(output: str) -> int:
    """Make one file of the parts that ranks have left beside it. Raises FileError, OSError."""
    output = os.path.abspath(os.path.expanduser(output))
    parts = parts_of(output)
    if not parts:
        raise FileError("there are no parts of this trace", path=output, hint=f"Parts are named like {_part(output)}.")
    join_parts(parts, output)
    screen.say(f"{output}: the trace of {len(parts)} ranks")
    return 0


def advise_on(paths: Sequence[str], as_json: bool) -> int:
    """Print what the traces of one job say. Raises FileError."""
    ranks: list[RankSummary] = []
    for path in paths:
        whole = os.path.abspath(os.path.expanduser(path))
        for part in [whole] if os.path.exists(whole) else parts_of(whole) or [whole]:
            ranks += read_ranks(read_head(part), part)
    job, found = Job(ranks), advise(ranks)
    if as_json:
        said: dict[str, Any] = {"head": job.head(), "advice": [each._asdict() for each in found]}
        screen.say(json.dumps(said, indent=1))
        return 0
    screen.say(f"{', '.join(paths)}: {job.head()}")
    for number, each in enumerate(found, 1):
        screen.say(f"\n{number}. {each}")
    if not found:
        screen.say("\nNothing to say: no loader took a batch, and no request is out of the ordinary.")
    return 0


def parts_of(output: str) -> list[str]:
    """The files that ranks have left beside a trace, in rank order."""
    stem, suffix = os.path.splitext(os.path.basename(output))
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(output) or "."):
            number = name.removeprefix(f"{stem}.rank").removesuffix(suffix)
            if name == f"{stem}.rank{number}{suffix}" and number.isdecimal():
                found[int(number)] = os.path.join(os.path.dirname(output), name)
    return [path for _, path in sorted(found.items())]


def _part(output: str) -> str:
    return os.path.basename(part_path(output, 0, 2))


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
