"""What a newcomer does first, run inside an environment that has nothing but the wheel: packaging/check.py starts it.

    python -I smoke.py library VERSION     # pip install pario
    python -I smoke.py commands VERSION    # pip install "pario[demo,mpich]"

It knows no file of the repository, needs no package beyond what it tries, and works in the current folder, which must
be empty. Exit status 1, with a traceback, if anything is not as the README says.
"""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path

RECORDS = 300
BATCH = 7


def value_of(number: int) -> bytes:
    """The bytes of a record; all differ in length or content."""
    return bytes([number % 251]) * (50 + number)


def library(version: str) -> None:
    """Imports, types and data files, and one loop over an LMDB, with the packages that pario requires and no MPI."""
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment] # whoever imports it gets ImportError
    import lmdb

    import pario

    assert Path(pario.__file__).is_relative_to(sys.prefix), f"{pario.__file__} is not the installed one"
    assert pario.__version__ == metadata.version("pario") == version, pario.__version__
    assert (resources.files("pario") / "py.typed").is_file()

    with lmdb.open("tiny.lmdb", map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for number in range(RECORDS):
            transaction.put(b"%08d" % number, value_of(number))
    seen = []
    with pario.Loader("tiny.lmdb", BATCH, shuffle="global", seed=1) as loader:
        for batch in loader:
            bounds = batch["offsets"]
            for position, number in enumerate(batch.ids):
                assert bytes(batch["data"][bounds[position] : bounds[position + 1]]) == value_of(number), number
            seen += [int(number) for number in batch.ids]
    assert sorted(seen) == list(range(RECORDS)) != seen, "not every record exactly once, or not shuffled"

    tried, lacking = import_everything()
    check_symbols()
    print(f"{len(seen)} records read; {tried} modules imported, besides those that need {', '.join(sorted(lacking))}")
    done = subprocess.run([sys.executable, "-m", "pario", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done
    assert '.[cli]' in done.stderr, done


def check_symbols() -> None:
    """What compiled functions call is in this interpreter: LLVM ends a process that asks for a function that is not."""
    from numba.types import ExternalFunction

    here = ctypes.CDLL(None)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("pario.")]
    called = {one.symbol for module in modules for one in vars(module).values() if isinstance(one, ExternalFunction)}
    assert "PyEval_SaveThread" in called
    assert not [symbol for symbol in called if not hasattr(here, symbol)]


def import_everything() -> tuple[int, set[str]]:
    """Import each module of the package: (how many could be, packages beyond the required ones that others lack)."""
    import pario

    required = {"lmdb", "mpi4py", "numba", "numpy", "h5py", "xxhash", "pario"}
    tried, lacking = 0, set()
    for module in pkgutil.walk_packages(pario.__path__, "pario.", onerror=lambda name: None):
        if module.name.endswith("__main__") or module.name.startswith("pario.demo."):
            continue  # these run something when they are imported
        try:
            importlib.import_module(module.name)
            tried += 1
        except ModuleNotFoundError as e:
            name = (e.name or "").split(".")[0]
            if name in required and e.name != "mpi4py.MPI":
                raise
            lacking.add(name)
    return tried, lacking


def commands(version: str) -> None:
    """The command line and the demo, which runs on two MPI ranks."""
    run("--version", says=lambda out: out.split()[-1] == version)
    script = subprocess.run([Path(sys.prefix) / "bin/pario", "--version"], capture_output=True, text=True, timeout=120)
    assert script.stdout.split()[-1:] == [version], script
    # 1: it has advice about this machine.
    run("doctor", "tiny.lmdb", statuses=(0, 1), says=lambda out: f"pario {version}" in out and "300 entries" in out)
    run("info", "tiny.lmdb", says=lambda out: "(ids 0 to 299, in key order)" in out)
    run("jobscript", says=lambda out: out.count("train") >= 3)
    run("jobscript", "train")
    run("jobscript", "train_requeue")
    assert {path.name for path in Path().glob("*.slurm")} == {"train.slurm", "train_requeue.slurm"}
    assert {path.name for path in Path().glob("*.py")} == {"train_ddp.py", "train_requeue.py"}
    run("demo", says=lambda out: "2 ranks" in out and "It learned" in out)


def run(*arguments: str, statuses: tuple[int, ...] = (0,), says: Callable[[str], bool] = bool) -> None:
    done = subprocess.run([sys.executable, "-m", "pario", *arguments], capture_output=True, text=True, timeout=240)
    told = f"python -m pario {' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode in statuses, told
    assert says(done.stdout), told
    print(f"python -m pario {' '.join(arguments)}: ok")


if __name__ == "__main__":
    {"library": library, "commands": commands}[sys.argv[1]](sys.argv[2])
