"""The lessons run as their first lines say: same result on any number of ranks, exact resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from launch import run_job

from pario.demo import train_digits

ROOT = Path(__file__).parents[1]
LESSON = str(ROOT / "examples" / "train_digits.py")


def alone(folder: Path, *options: str) -> str:
    """The lesson as one process, which needs no MPI library: MPI4PY_LIBMPI points to one that does not exist."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = subprocess.run(
        [sys.executable, LESSON, "--folder", str(folder), *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks(n: int, folder: Path, *options: str) -> str:
    done = run_job(n, [LESSON, "--folder", str(folder), *options], limit_s=120, env={"PYTHONPATH": str(ROOT)})
    assert done.status == 0, done.output
    return done.output


def losses(output: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", output)


def weights(folder: Path) -> np.ndarray:
    return np.load(folder / "checkpoint.npz")["weights"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, alone(folder)


def test_one_process_without_mpi_learns(whole):
    _, output = whole
    assert "1 rank;" in output
    assert float(re.search(r"test accuracy ([\d.]+)%", output)[1]) > 95


@pytest.mark.full
def test_two_ranks_get_the_same_result(whole, tmp_path):
    folder, output = whole
    found = ranks(2, tmp_path)
    assert "2 ranks;" in found
    assert losses(found) == losses(output)
    np.testing.assert_allclose(weights(tmp_path), weights(folder), rtol=1e-6, atol=1e-9)


@pytest.mark.full
def test_resumed_on_another_number_of_ranks_it_ends_the_same(whole, tmp_path):
    folder, _ = whole
    for name in ("train.lmdb", "test.lmdb"):
        shutil.copytree(folder / name, tmp_path / name)
    # 24 steps are an epoch: 40 is in the middle of the second one.
    assert "stopped after 40 steps" in ranks(2, tmp_path, "--stop-after", "40")
    state = json.loads((tmp_path / "checkpoint.json").read_text())
    assert (state["epoch"], state["position"]) == (1, 16 * train_digits.GLOBAL_BATCH)
    assert "going on in epoch 2, 8 steps left" in alone(tmp_path, "--resume")
    np.testing.assert_allclose(weights(tmp_path), weights(folder), rtol=1e-6, atol=1e-9)


def test_a_network_that_did_not_learn_is_a_failure(whole, monkeypatch, capsys):
    monkeypatch.setattr(train_digits, "EPOCHS", 0)
    monkeypatch.setattr(train_digits, "communicator", lambda: None)
    assert train_digits.main(["--folder", str(whole[0])]) == 1


def test_the_lesson_in_the_package_is_the_one_in_examples():
    assert Path(LESSON).read_bytes() == Path(train_digits.__file__).read_bytes()


def test_the_encoder_writes_what_protobuf_says():
    # tag = field << 3 | type; 0: varint, 2: length and bytes
    pixels = np.arange(64)
    assert train_digits.datum(pixels, 3) == (
        b"\x08\x01" + b"\x10\x08" + b"\x18\x08" + b"\x22\x40" + bytes(range(64)) + b"\x28\x03"
    )


_ANNOUNCED_TOO_LATE = """
import os, runpy, signal, sys

class Late:
    # Python drops its modules after it took its signal handlers back.
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGUSR1, signal.SIGTERM)):
        print("ending", flush=True)
        for number in numbers:
            kill(pid, number)

runpy.run_path(sys.argv.pop(1), run_name="__main__")
sys.modules["__main__"].late = Late()
"""


def test_a_signal_after_the_end_does_not_make_the_training_a_failure(whole, tmp_path):
    """Slurm announces the time limit while the interpreter and MPI take their leave."""
    folder, _ = whole
    lesson = str(ROOT / "examples" / "train_requeue.py")
    arguments = ["--data", str(folder / "train.lmdb"), "--run", str(tmp_path), "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-c", _ANNOUNCED_TOO_LATE, lesson, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("done\nending\n"), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
