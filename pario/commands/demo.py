"""`python -m pario demo`: the lesson of pario/demo, under the mpiexec that belongs to this Python."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click

from pario.commands.screen import screen
from pario.errors import how_to_install

_LESSON = "pario.demo.train_digits"

_WORDS = """\
pario demo: train a small network on images that come out of an LMDB.

  1. scikit-learn's 1,797 handwritten digits (8x8 pixels) are written to an LMDB, as Caffe writes it
  2. {how}
  3. pario reads the LMDB once for all ranks and hands each rank its share of every batch
  4. a network in plain NumPy learns; the ranks add up their gradients by MPI's Allreduce
  5. it is tested on 360 images that it has not seen

The first run on a machine compiles pario's kernels with Numba: up to a minute without a new line is normal."""


@click.command()
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1, 64), help="MPI ranks to start.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the LMDBs here. Default: a temporary directory.")
def demo(ranks: int, folder: Path | None) -> int:
    """Train a small network on two ranks, in seconds.

    Writes scikit-learn's handwritten digits to an LMDB, starts two MPI ranks with mpiexec, trains a network that reads
    the LMDB through pario, and prints its accuracy. Needs no data, no accelerator and no network.

    \b
    Example:
      python -m pario demo
    """
    from pario.commands.mpiexec import find_mpiexec

    if screen.launched:
        return screen.refuse(
            "the demo starts mpiexec itself; run it without mpiexec or srun.\n"
            "To see the same training under your launcher: srun python examples/train_digits.py"
        )
    needs = {"sklearn": "scikit-learn", "lmdb": "lmdb"}
    missing = [package for name, package in needs.items() if importlib.util.find_spec(name) is None]
    if missing:
        return screen.refuse(f"the demo needs {' and '.join(missing)}: {how_to_install('demo')}")
    how = f"mpiexec starts {ranks} ranks of the same script" if ranks > 1 else "one process, without MPI"
    screen.say(_WORDS.format(how=how))
    screen.say()
    launcher: list[str] = []
    if ranks > 1:
        mpiexec, why = find_mpiexec()
        launcher = [*mpiexec, "-n", str(ranks)] if mpiexec else []
        if not mpiexec:
            screen.say(
                f"{why}: the demo runs on one process instead.\n"
                f"For an MPI library of its own in this environment: {how_to_install('mpich')}\n"
            )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="pario-demo-") as temporary:
        command = [*launcher, sys.executable, "-u", "-m", _LESSON, "--folder", str(folder or temporary)]
        status = _run(command)
    took = time.perf_counter() - started
    lesson = Path(__file__).parents[1] / "demo" / "train_digits.py"
    if status:
        screen.say(f"error: the training run failed or did not learn (exit status {status})", err=True)
        return 1
    screen.say(f"It learned, in {took:.0f} s. The script, to read or to start from: {lesson}")
    return 0


def _run(command: list[str]) -> int:
    """Exit status. A Ctrl-C does not reach the ranks and mpiexec, who would complain of it: they are ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        for pid in _family(process.pid):  # Open MPI's ranks outlive an mpiexec that is killed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        raise


def _family(pid: int) -> list[int]:
    """A process and all that it has started, as far as they are there, the eldest first."""
    children = list[str]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ends meanwhile
            children += path.read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]
