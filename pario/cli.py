"""`python -m pario`: the packages that the command line needs, its exit status, and how it prints errors.

The commands are in pario/commands/. Exit status: 0 success; 1 an error or damage found; 2 wrong arguments or a
missing package; 130 Ctrl-C. An error of pario is one line on stderr, printed once for all ranks, without a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from types import TracebackType

from pario.comm.launcher import forget_launcher, inherited, launched_rank
from pario.errors import ParioError, PeerError, how_to_install


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of pario are raised; the hook that is set here prints them."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        _flush()
        if launched_rank() is not None:
            # The other ranks got the same signal, so MPI_Finalize would wait for nobody.
            os._exit(130)
        return 130


def _main(argv: Sequence[str] | None) -> int:
    if inherited():  # a rank started this command: it needs no MPI, and prints
        forget_launcher()
    rank = launched_rank()
    missing = [name for name in ("click", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        if not rank:
            sys.stderr.write(
                f"error: the command line needs {' and '.join(missing)}: {how_to_install('cli')}\n"
                "The library itself (import pario) works without.\n"
            )
        return 2
    import click

    from pario.commands.app import group
    from pario.commands.screen import screen

    screen.begin(rank)
    # Set this first: pario.comm.farewell wraps the hook that it finds with its message to the other ranks.
    sys.excepthook = _hook
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    # The shell's completion goes by this name.
    name = "pario" if os.path.basename(sys.argv[0]) == "pario" else "python -m pario"
    try:
        status = group.main(args=None if argv is None else list(argv), prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        if screen.rank == 0:
            e.show()
        return e.exit_code
    except click.Abort:  # what click raises on Ctrl-C
        raise KeyboardInterrupt from None
    screen.end()
    if callable(status):
        return int(status())
    return status if isinstance(status, int) else 0


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Like Python's own, but an error of pario is one line, printed by one rank."""
    from pario.commands.screen import screen

    if screen.verbose or not isinstance(error, ParioError):
        sys.__excepthook__(kind, error, traceback)
        return
    # All ranks agree on opening, so rank 0 has the error, too. Later the rank where it happened prints it: rank 0 may
    # have finished already.
    speaks = not isinstance(error, PeerError) if screen.running else screen.rank == 0
    if speaks:
        screen.end_bar()
        where = f" (rank {screen.rank})" if screen.running and screen.launched and error.rank is None else ""
        sys.stderr.write(f"error{where}: {error}\n")
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
