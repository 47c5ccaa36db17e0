"""`run`: a script as it is, its `import lmdb` served by pario."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import types
from collections.abc import Sequence

from pario.commands.mpiexec import find_mpiexec
from pario.commands.screen import screen

__all__ = ["launch", "run"]


def launch(ranks: int, module: bool, target: str, arguments: Sequence[str]) -> int:
    """Start the same command on `ranks` MPI ranks; returns mpiexec's exit status."""
    mpiexec, why = find_mpiexec()
    if not mpiexec:
        screen.say(f"error: {why}", err=True)
        return 2
    words = [sys.executable, "-m", "pario", "run", *(["-m"] if module else []), target, *arguments]
    return subprocess.run([*mpiexec, "-n", str(ranks), *words]).returncode


def run(module: bool, target: str, arguments: Sequence[str]) -> int:
    """Run a script or a module as Python itself would, in this process."""
    from pario.lmdb.hybrid import install

    install()
    sys.excepthook = sys.__excepthook__
    if module:
        sys.argv = [target, *arguments]
        # What `python -m` puts first is there already: the working directory.
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return 0
    if not os.path.isfile(target):
        screen.say(f"error: there is no script {target!r}", err=True)
        return 2
    sys.argv = [target, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(target))
    # A module of its own and not runpy's temporary one: threads and exit handlers may use it later, and workers that
    # multiprocessing spawns find the script by its __file__.
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(target)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open(target, "rb") as file:
        code = compile(file.read(), os.path.abspath(target), "exec")
    exec(code, vars(main))
    return 0
