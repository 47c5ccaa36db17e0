"""Processes that only inherit a launcher's variables or a parent's MPI, ranks that call alone, and errors that a script
caught. The oracle is what each process prints, the exit status of the job, and the clock: 10 s.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest
from launch import Job, run_job
from pace import Pace

from pario.comm import alive
from pario.comm.launcher import inherited, job_name

ROOT = Path(__file__).parents[1]
ENV = {"PYTHONPATH": str(ROOT)}
PROMISED_S = 10.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("strays") / "x.lmdb")
    with lmdb.open(made, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(80):
            txn.put(b"%06d" % i, bytes([i]) * 100)
    return made


def job(code: str, *args: str, ranks: int = 2) -> Job:
    return run_job(ranks, ["-c", code, *args], limit_s=90, env=ENV)


# -- a launcher's variables, inherited ---------------------------------------------------------------------------------

LAUNCHED = ("PMI_", "PMIX_", "OMPI_", "PALS_", "SLURM", "JSM_", "MV2_", "HYDI_")


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, ""),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ""),  # a launcher that gives no descriptor
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "socket"}, ""),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "pipe"}, "PMI_FD=[0-9]+ is not open"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "999"}, "PMI_FD=999 is not open"),
        ({"PMIX_RANK": "1"}, "no server of PMIx"),
        ({"PMIX_RANK": "1", "PMIX_SERVER_URI41": "tcp"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_PTY_WIN_COL": "80"}, "srun --pty"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_PTY_WIN_COL": "80"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, ""),
    ],
)
def test_what_is_no_rank(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], why: str) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHED):
            monkeypatch.delenv(name)
    pair, pipe = socket.socketpair(), os.pipe()
    for name, value in env.items():
        monkeypatch.setenv(name, {"socket": str(pair[0].fileno()), "pipe": str(pipe[0])}.get(value, value))
    found = inherited()
    for each in pipe:
        os.close(each)
    for end in pair:
        end.close()
    assert re.search(why, found) if why else not found


#: started by rank 1 with a command line, or with a script on standard input
STARTS = """
import os, subprocess, sys, time
from mpi4py import MPI
comm, ended = MPI.COMM_WORLD, None
if comm.rank == 1:
    how, *words = sys.argv[1:]
    began = time.monotonic()
    if how == "system":
        status = os.system(" ".join([sys.executable, "-m", "pario", *words])) >> 8
        text = ""
    else:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        status, text = done.returncode, done.stdout + done.stderr
    print(text, flush=True)
    ended = status, round(time.monotonic() - began, 1)
ended = comm.bcast(ended, root=1)
if comm.rank == 0:  # in one write: the launcher may put other ranks' words into the middle of a long text
    print("\\nended with {} after {}\\nrank ends".format(*ended), flush=True)
else:
    print("rank ends", flush=True)
"""

COMMANDS = [
    ["run", "-m", "pario", "data", "info", "PATH"],
    ["run", "-m", "pario", "data", "head", "PATH"],
    ["run", "-m", "pario", "data", "verify", "PATH"],
    ["run", "-m", "pario", "doctor"],
    ["run", "-m", "pario", "data", "pack", "PATH", "NEW"],
    ["system", "info", "PATH"],
]


@pytest.mark.full
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[-3:]))
def test_commands_that_a_rank_starts(path: str, tmp_path: Path, words: list[str]) -> None:
    """They do their work alone, and the rank's MPI goes on."""
    new = str(tmp_path / "new.mdb")
    done = job(STARTS, *({"PATH": path, "NEW": new}.get(word, word) for word in words))
    assert done.status == 0, done.output
    assert done.output.count("rank ends") == 2
    ((status, seconds),) = re.findall(r"ended with (\d+) after ([\d.]+)", done.output)
    assert int(status) <= ("doctor" in words), done.output  # which may have advice
    assert "Error" not in done.output
    if "pack" in words:
        assert os.path.getsize(new)
    else:  # which may have to compile its kernels first
        assert float(seconds) < PROMISED_S * done.slowness


SPAWNS = """
import multiprocessing, sys
import pario
def work(path):
    try:
        pario.split(path, [0.5, 0.5])
    except pario.errors.LauncherError as error:
        print("refused:", error, flush=True)
if __name__ == "__main__":
    from mpi4py import MPI
    child = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
    child.start()
    child.join()
    MPI.COMM_WORLD.Barrier()
    print("rank ends", flush=True)
"""


@pytest.mark.full
def test_a_spawned_worker(path: str, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    done = run_job(2, [str(script), path], limit_s=90, env=ENV)
    assert done.status == 0, done.output
    assert done.output.count("rank ends") == 2
    assert len(re.findall(r'refused: this process .* is no rank of MPI: .*comm="self"', done.output)) == 2, done.output


def alone(words: list[str], env: dict[str, str], limit_s: float = PROMISED_S) -> tuple[int, str]:
    """Status and output of a process with only these variables of launchers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    began, pace = time.monotonic(), Pace()
    done = subprocess.run(
        [sys.executable, *words], env={**own, **ENV, **env}, capture_output=True, text=True, timeout=100, check=False
    )
    pace.sample()
    assert time.monotonic() - began < limit_s * pace.slowness, done
    return done.returncode, done.stdout + done.stderr


FD = {"PMI_FD": "999", "PMI_RANK": "1", "PMI_SIZE": "2"}
PTY = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_PTY_WIN_COL": "80"}
TASKS = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.full
@pytest.mark.parametrize("env", [FD, {"PMIX_RANK": "1"}, PTY, TASKS], ids=str)
def test_a_command_that_reads_needs_no_mpi(path: str, env: dict[str, str]) -> None:
    status, output = alone(["-m", "pario", "data", "head", path], env)
    assert status == 0, output
    assert "000079" in output


@pytest.mark.full
def test_a_command_that_writes_is_refused_with_a_way_out_that_works(path: str, tmp_path: Path) -> None:
    command = ["-m", "pario", "data", "pack", path, str(tmp_path / "new.mdb")]
    status, output = alone(command, TASKS)
    assert status == 1
    assert output.count("\n") == 1, output
    (names,) = re.findall(r"`env -u (\S+) python", output)
    status, output = alone(command, {name: value for name, value in TASKS.items() if name != names}, limit_s=90)
    assert status == 0, output


@pytest.mark.full
@pytest.mark.parametrize("env", [FD, {"PMIX_RANK": "1"}, PTY], ids=str)
def test_a_script_is_refused_in_one_line(path: str, env: dict[str, str]) -> None:
    status, output = alone(["-c", f"import pario; pario.Reader({path!r})"], env)
    assert status == 1
    assert output.count("LauncherError: this process") == 1, output


# -- a parent's MPI, inherited -----------------------------------------------------------------------------------------

FORKS = """
import os, sys
import pario
from mpi4py import MPI
comm, path = MPI.COMM_WORLD, sys.argv[1]
reader = pario.Reader(path)
uses = {
    "Reader": lambda: pario.Reader(path), "Loader": lambda: pario.Loader(path, 4),
    "split": lambda: pario.split(path, [0.5, 0.5]), "self": lambda: pario.Reader(path, comm="self"),
    "comm": lambda: pario.Reader(path, comm=comm),
}
for name, use in uses.items() if comm.rank == 0 else ():
    child = os.fork()
    if child == 0:
        try:
            use()
            os.write(1, f"{name}: made\\n".encode())
        except pario.errors.LauncherError as error:
            os.write(1, f"{name}: {error}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
comm.Barrier()
reader.close()
print("rank ends", flush=True)
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_forked_child_leaves_the_parents_mpi_alone(path: str, ranks: int) -> None:
    done = job(FORKS, path, ranks=ranks)
    assert done.status == 0, done.output
    assert done.output.count("rank ends") == ranks
    said = dict(re.findall(r"^(\w+): (.*)$", done.output, re.MULTILINE))
    assert said.pop("self") == "made"
    assert "it was forked from a process that uses MPI" in said.pop("comm")
    assert sorted(said) == ["Loader", "Reader", "split"]
    assert all(text == "made" if ranks == 1 else "forked from" in text for text in said.values()), said


# -- ranks that do not come --------------------------------------------------------------------------------------------

ALONE = """
import os, sys, time
import pario
from pario.comm import alive
from mpi4py import MPI
alive.TELL_S = 0.2
comm, path, folder, *names = MPI.COMM_WORLD, *sys.argv[1:]
loader = pario.Loader(path, 4)
next(iter(loader))
state = {"loader": loader}
if not names or any(name.startswith("checkpoint") for name in names):
    state["c"] = pario.Checkpointer(slow=folder)
    state["handle"] = state["c"].save(1, {"w": 1})
cases = {
    "Loader": lambda: pario.Loader(path, 4),
    "Reader": lambda: pario.Reader(path),
    "split": lambda: pario.split(path, [0.5, 0.5]),
    "Checkpointer": lambda: pario.Checkpointer(slow=folder + "-2"),
    "epoch": lambda: next(iter(loader)),
    "set_epoch": lambda: (loader.set_epoch(5), next(iter(loader))),
    "report": lambda: loader.report(all_ranks=True),
    "close": loader.close,
    "checkpoint save": lambda: state["c"].save(2, {"w": 2}),
    "checkpoint wait": lambda: state["handle"].wait(),
    "checkpoint latest": lambda: state["c"].latest(),
    "checkpoint restore": lambda: state["c"].restore(),
    "checkpoint close": lambda: state["c"].close(),
}
kept = []
for name in names or cases:
    comm.Barrier()
    if comm.rank == 0:
        os.write(2, f"case {name}: ".encode())
    else:
        time.sleep(1.0)
    kept.append(cases[name]())
comm.Barrier()
"""

#: what rank 0 says, case by case
WAITS = {
    "Loader": "before making a Loader",
    "Reader": "before making a Reader",
    "split": "before pario.split",
    "Checkpointer": "before making a Checkpointer",
    "epoch": "at the start of epoch 1",
    "set_epoch": "at the start of epoch 5",
    "report": "at the report",
    "close": "at the close",
    "checkpoint save": "before saving a checkpoint",
    "checkpoint wait": "before waiting for the checkpoint of step 1",
    "checkpoint latest": "before looking for checkpoints",
    "checkpoint restore": "before restoring a checkpoint",
    "checkpoint close": "before closing a checkpointer",
}


def waits(path: str, tmp_path: Path, *names: str) -> dict[str, list[str]]:
    """The lines of each case."""
    done = job(ALONE, path, str(tmp_path / "saved"), *names)
    assert done.status == 0, done.output
    parts = re.split(r"^case (.*?): ", done.output, flags=re.MULTILINE)[1:]
    return {name: text.splitlines() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def check_waits(said: dict[str, list[str]]) -> None:
    for name, lines in said.items():
        assert 1 <= len(lines) <= 3, (name, lines)  # after 0.2 s, 0.4 s and 0.8 s
        for line in lines:
            assert re.match(rf"after \d+ s rank 0 waits {re.escape(WAITS[name])}; rank 1 ", line), (name, line)


def test_who_waits_where(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 is a file of its own; at growing intervals, and no more after the roll call."""
    monkeypatch.setattr(alive, "TELL_S", 0.01)
    for name in list(os.environ):
        if name.startswith(LAUNCHED):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PARIO_JOB", "job of this test")
    other = os.memfd_create("pario-whereabouts")
    os.write(other, f"{job_name()[0]}\0001\0is in epoch 0, after 1 batch\0".encode())
    world = SimpleNamespace(job_ranks=(0, 1, 2), on_late=None)
    with alive.roll_call(world, "the start of epoch 1"):
        world.on_late()
        assert not caplog.messages
        for _ in range(3):
            time.sleep(0.015)
            world.on_late()
    assert world.on_late is None
    os.close(other)
    places = "rank 0 waits at the start of epoch 1; rank 1 is in epoch 0, after 1 batch; rank 2 is not seen here"
    assert caplog.messages == [f"after 0 s {places}"] * 2


@pytest.mark.full
def test_who_waits_where_is_said(path: str, tmp_path: Path) -> None:
    said = waits(path, tmp_path, "epoch")
    check_waits(said)
    assert said["epoch"][0].endswith("rank 0 waits at the start of epoch 1; rank 1 is in epoch 0, after 1 batch")
    assert alive.TELL_S == PROMISED_S


@pytest.mark.full
def test_every_call_that_one_rank_makes_alone(path: str, tmp_path: Path) -> None:
    said = waits(path, tmp_path)
    assert said.keys() == WAITS.keys()
    check_waits(said)


LATE = """
import sys, time
import pario
from mpi4py import MPI
ckpt = pario.Checkpointer(slow=sys.argv[1], timeout_s=1.0)
began = time.monotonic()
if MPI.COMM_WORLD.rank:
    time.sleep(8)
try:
    ckpt.save(1, {"w": 1})
except pario.ParioError as error:
    print(type(error).__name__, f"took {time.monotonic() - began:.0f} s:", error, flush=True)
"""


@pytest.mark.full
def test_the_first_call_of_a_checkpointer_names_who_is_late(tmp_path: Path) -> None:
    """On one node nobody else's is blamed, and the time that it says is the time that it took."""
    output = job(LATE, str(tmp_path / "saved")).output
    assert re.search(r"CheckpointError took 1 s: rank 1 did not come within 1 s while rank 0 is saving", output), output


# -- ends --------------------------------------------------------------------------------------------------------------

CAUGHT = """
import sys, time
import pario
from mpi4py import MPI
import pario.comm.farewell as farewell
farewell.FAREWELL_S = 0.2
comm, (path, where, end) = MPI.COMM_WORLD, sys.argv[1:]
def decode(value):
    if where == "decoder" and comm.rank == 0:
        sys.exit(3)
    return len(value)
def train():
    for batch in pario.Loader(path, 4, decode):
        if where == "loop" and comm.rank == 0 and batch.step == 2:
            sys.exit(3)
def main():
    try:
        train()
    except (SystemExit, pario.PeerError) as error:
        print("caught", type(error).__name__, flush=True)
    if comm.rank:
        time.sleep(1.0)
    print("finished", flush=True)
main()
if end == "exit 0":
    sys.exit()
"""


@pytest.mark.full
@pytest.mark.parametrize(("where", "end"), [("loop", "last line"), ("loop", "exit 0"), ("decoder", "last line")])
def test_an_exit_that_the_script_caught_is_no_failure(path: str, where: str, end: str) -> None:
    done = job(CAUGHT, path, where, end)
    assert done.status == 0, done.output
    assert done.output.count("finished") == 2
    assert "caught SystemExit" in done.output


LOOPS = """
import sys, time
import pario
loader = pario.Loader(sys.argv[1], 4)
while True:
    for batch in loader:
        time.sleep(0.05)
        if batch.step == 3:
            open(f"{sys.argv[2]}/ready-{loader.world.rank}", "w").close()
"""


@pytest.mark.full
def test_ctrl_c_is_one_line_per_rank(path: str, tmp_path: Path) -> None:
    def press(pid: int) -> None:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(pid, signal.SIGINT)

    done = run_job(2, ["-c", LOOPS, path, str(tmp_path)], limit_s=90, env=ENV, meanwhile=press)
    assert done.status not in (0, None), done.output
    assert "Traceback" not in done.output
    assert 1 <= len(re.findall(r"^pario: rank \d was interrupted in .*, line \d+$", done.output, re.M)) <= 2, (
        done.output
    )
