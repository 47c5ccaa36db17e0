"""`run`: runs a script unchanged, with its `import lmdb` served by pario."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from pario.comm.launcher import launched_rank
from pario.commands.mpiexec import find_mpiexec
from pario.commands.run_service import script_tiers, use_own_service
from pario.commands.screen import screen
from pario.machine import core_quota

__all__ = ["launch", "run"]

#: More ranks per core than this are probably a typing error.
RANKS_PER_CORE = 16


def launch(
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


def run(module: bool, target: str, arguments: Sequence[str]) -> int:
    """Run a script or a module as Python itself would, in this process. Raises OptionError for a PARIO_TIERS that means
    nothing, and what the script raises."""
    why = _missing(module, target)
    if why:
        screen.say(f"error: {why}", err=True)
        return 2
    tiers = script_tiers()
    if tiers:
        use_own_service(tiers)  # begins while the script does
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
    cores = min(len(os.sched_getaffinity(0)), core_quota() or float("inf"))
    if ranks <= RANKS_PER_CORE * max(1, cores):
        return ""
    return (
        f"{ranks:,} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores:g} cores: add "
        "--oversubscribe if you mean it, or if your mpiexec spreads them over more machines"
    )
