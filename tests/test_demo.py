"""`python -m pario demo`: it learns, it says so, and it copes with machines that have no MPI or the wrong one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("sklearn")

from launch import POLITE

from pario.commands import demo as demo_room
from pario.commands.mpiexec import find_mpiexec
from pario.commands.screen import screen

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_it_learns_on_two_ranks_from_any_directory(tmp_path):
    env = {**os.environ, **POLITE, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pario", "demo"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    waited = time.monotonic() - started
    try:
        rest, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, rest
    assert first.startswith("pario demo")
    # A second is promised on an idle machine; what must not happen is silence until the training is over.
    assert waited < 0.5 * (time.monotonic() - started) + 1
    assert "2 ranks" in rest
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", rest)]
    assert len(losses) >= 5
    assert losses[-1] < 0.2 * losses[0]
    assert float(re.search(r"test accuracy ([\d.]+)%", rest)[1]) > 95
    told = re.search(r"delivered ([\d,]+) records, and read [\d.,]+ MB for them, in ([\d,]+) reads of [\d,]+ KB", rest)
    assert told is not None, rest
    records, reads = (int(number.replace(",", "")) for number in told.groups())
    assert records == 1437 * len(losses)
    assert 0 < reads <= records / 100, "records of 74 bytes, many to a page, come in long reads"
    assert list(tmp_path.iterdir()) == []  # nothing is left in the user's directory


@pytest.fixture
def no_run(monkeypatch):
    """The commands that would be started."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(demo_room, "_run", run)
    monkeypatch.setattr(screen, "launched", False)
    monkeypatch.setattr(screen, "rank", 0)
    return commands


def test_without_mpiexec_it_runs_on_one_process(no_run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert demo_room.demo.callback(2, None) == 0
    out = capsys.readouterr().out
    assert "There is no mpiexec" in out
    assert 'pip install ".[mpich]"' in out
    assert no_run[0][0] == str(tmp_path / "python")


def fake(folder: Path, body: str) -> None:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        # What an mpiexec of another MPI does: it starts the processes, and each of them is alone.
        ('[ "$1" = --version ] && exit; echo "<size 1><size 1>"', "belongs to another MPI library"),
        ('[ "$1" = --version ] && exit; echo "RuntimeError: cannot load MPI library" >&2; exit 1', "cannot load MPI"),
        ("exit 3", "exit status 3"),
        ("echo ----- >&2; echo 'no job as root' >&2; echo 'see the manual' >&2; exit 1", "no job as root"),
    ],
)
def test_a_wrong_mpiexec_is_found_out(tmp_path, monkeypatch, body, why):
    fake(tmp_path, body)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command, said = find_mpiexec()
    assert command == []
    assert why in said


def test_open_mpi_may_have_more_ranks_than_cores(tmp_path, monkeypatch):
    fake(tmp_path, '[ "$1" = --version ] && echo "mpiexec (Open MPI) 5.0.8" && exit; echo "<size 2><size 2>"')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command, said = find_mpiexec()
    assert command[:2] == [str(tmp_path / "mpiexec"), "--oversubscribe"]
    assert said == ""


def test_failure_is_an_exit_status(no_run, monkeypatch, capsys):
    monkeypatch.setattr(demo_room, "_run", lambda command: 1)
    assert demo_room.demo.callback(1, None) == 1
    assert "did not learn" in capsys.readouterr().err


def test_missing_packages_are_named(no_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert demo_room.demo.callback(2, None) == 2
    assert 'needs scikit-learn: pip install ".[demo]"' in capsys.readouterr().err
    assert no_run == []


def test_it_does_not_start_mpiexec_under_mpiexec(no_run, monkeypatch, capsys):
    monkeypatch.setattr(screen, "launched", True)
    assert demo_room.demo.callback(2, None) == 2
    assert "run it without mpiexec" in capsys.readouterr().err
    assert no_run == []


def test_all_that_a_launcher_has_started_is_its_family() -> None:
    """In whatever session it is: Open MPI gives each rank one of its own."""
    command = "setsid sleep 60 & sleep 60 & echo ready; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "ready\n"
        family = demo_room._family(shell.pid)
        for pid in family:
            os.kill(pid, signal.SIGKILL)
    assert family[0] == shell.pid
    assert len(family) == 3
