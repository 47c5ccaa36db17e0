"""`doctor`: each fact against what the system's own tools say, each sentence of advice provoked."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

pytest.importorskip("click")
pytest.importorskip("tqdm")

from launch import Job, run_job

import pario
from pario import machine
from pario.cli import main
from pario.comm.solo import Solo
from pario.commands.doctor import advice
from pario.dataset.host import Host
from pario.options import Options, Tier

ROOT = Path(__file__).parents[1]
GB = 10**9


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("doctor") / "x.lmdb"
    with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(300):
            txn.put(b"%06d" % i, bytes([i % 251]) * 3000)
    return folder


def alone(*args: object, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """One process without a launcher; `code` runs first."""
    start = ["-c", f"{code}\nimport sys\nfrom pario.cli import main\nsys.exit(main(sys.argv[1:]))", "doctor"]
    return subprocess.run(
        [sys.executable, *start, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def together(ranks: int, *args: object, code: str = "", **env: str) -> Job:
    start = ["-c", f"{code}\nimport sys\nfrom pario.cli import main\nsys.exit(main(sys.argv[1:]))", "doctor"]
    return run_job(ranks, [*start, *map(str, args)], limit_s=100, env={"PYTHONPATH": str(ROOT), **env})


@pytest.fixture
def here(capsys, monkeypatch):
    """The command in this process: (exit status, standard output)."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call(*args: object) -> tuple[int, str]:
        return main(["doctor", *map(str, args)]), capsys.readouterr().out

    return call


def said_as_json(text: str) -> dict:
    """MPI libraries may write lines of their own around it."""
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(line)


def sound() -> dict:
    """A report without anything to say: two nodes of four ranks with two cores each."""
    nodes = [
        {
            "node": n,
            "name": f"host{n}",
            "machine_cores": 8,
            "memory": [100 * GB, 50 * GB],
            "core_quota": None,
            "versions": {"pario": "1", "numpy": "2"},
            "kernels": {"place": "/tmp/k", "problem": "", "file_system": "ext4", "shared": False, "compiled": 9},
            "tiers": [{"where": "memory", "quota": "auto", "free": GB, "problem": ""}],
            "address": "10.0.0.7",
            "dataset": {
                "path": "/d/data.mdb",
                "kind": "parallel",
                "file_system": "lustre",
                "bytes": GB,
                "transaction": 3,
                "records": 1000,
                "open_by": [],
                "index": None,
                "index_places": ["/d/data.mdb.pario.index"],
            },
            "ranks": [{"rank": 4 * n + r, "name": f"host{n}", "cores": [2 * r, 2 * r + 1]} for r in range(4)],
        }
        for n in range(2)
    ]
    return {
        "refused": None,
        "mpi": {"library": "MPICH 5.0.2", "thread_level": "FUNNELED"},
        "mpi_library": "MPICH 5.0.2",
        "mpiexec": None,
        "nodes": nodes,
        "wants": {"ring": 50 * 10**6, "block_ring": 200 * 10**6, "index": 10**6},
    }


def test_a_sound_cluster_gets_no_advice() -> None:
    assert list(advice(sound())) == []


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("refused",), "every one is alone", ["every one is alone"]),
        (("mpi", "thread_level"), "SINGLE", ["thread_level"]),
        (("mpiexec",), {"place": "/usr/bin/mpiexec", "family": "Open MPI"}, ["/usr/bin/mpiexec", "MPICH 5.0.2"]),
        (("nodes", 1, "ranks", 0, "name"), "host0", ["ranks of host0 as 2 nodes"]),
        (("nodes", 1, "ranks", 3, "cores"), [4], ["node 1 (host1)", "rank 7 may use one core", "--cpus-per-task"]),
        (("nodes", 0, "core_quota"), 1.5, ["node 0 (host0)", "1.5 cores", "4 ranks", "--cpus"]),
        (("nodes", 0, "memory"), [GB, 100 * 10**6], ["100 MB of memory", "--mem"]),
        (("nodes", 0, "kernels", "problem"), "/tmp is a link", ["/tmp/k", "/tmp is a link", "PARIO_NUMBA_CACHE"]),
        (("nodes", 0, "kernels", "shared"), True, ["/tmp/k", "all nodes", "PARIO_NUMBA_CACHE"]),
        (("nodes", 1, "tiers", 0, "problem"), "it is not writable", ["node 1 (host1)", "tier memory", "not writable"]),
        (("nodes", 0, "address"), None, ["node 0 (host0)", "PARIO_INTERFACE"]),
        (("nodes", 0, "dataset"), {"error": "no such file [/d]"}, ["no such file [/d]"]),
        (("nodes", 0, "dataset", "index_places"), [], ["XDG_CACHE_HOME"]),
        (("nodes", 1, "dataset", "transaction"), 4, ["node 1 (host1) sees another file than node 0"]),
        (("nodes", 1, "versions", "numpy"), "1", ["node 1 (host1)", "numpy 1 against 2"]),
    ],
)
def test_each_fault_gets_one_advice(place: tuple, value: object, words: list[str]) -> None:
    report = copy.deepcopy(sound())
    where = report
    for name in place[:-1]:
        where = where[name]
    where[place[-1]] = value
    (text,) = advice(report)
    assert all(word in text for word in words), text


def test_faults_of_two_facts_together() -> None:
    report = sound()
    for rank in report["nodes"][0]["ranks"]:
        rank["cores"] = [0, 1]
    (text,) = advice(report)
    assert "4 ranks share 2 cores" in text
    report = sound()
    report["nodes"][0]["dataset"] |= {"kind": "network", "file_system": "nfs4", "open_by": [17]}
    (text,) = advice(report)
    assert "nfs4" in text
    assert "process 17" in text


# -- one process -------------------------------------------------------------------------------------------------------


def test_alone(dataset) -> None:
    done = alone(dataset, "--json")
    report = said_as_json(done.stdout)
    assert done.returncode == bool(report["advice"]), done.stdout + done.stderr
    assert report["launcher"] is None
    assert report["mpi"] is None
    for name in ("numpy", "numba", "mpi4py", "h5py", "lmdb"):
        __import__(name)
        assert report["versions"][name] == sys.modules[name].__version__
    (node,) = report["nodes"]
    assert node["ranks"][0]["cores"] == sorted(os.sched_getaffinity(0))
    assert node["dataset"]["records"] == 300
    assert node["dataset"]["bytes"] == (dataset / "data.mdb").stat().st_size
    assert node["dataset"]["lock_file"] == str(dataset / "lock.mdb")
    oracle = subprocess.run(["df", "--output=fstype", dataset], capture_output=True, text=True).stdout.split()[-1]
    assert node["dataset"]["file_system"] == oracle


def test_text(dataset) -> None:
    done = alone(dataset)
    for word in ("launcher", "none: one process", "not started", "kernels", "300 entries", "file system"):
        assert word in done.stdout
    assert ("Nothing is off." in done.stdout) == (done.returncode == 0)
    assert done.stderr == ""


def test_tiers(here, tmp_path, monkeypatch) -> None:
    assert "tier " not in here()[1]
    monkeypatch.setenv("PARIO_TIERS", f"memory:1GiB,{tmp_path}/new")
    _, out = here()
    assert re.search(r"tier +memory, quota 1GiB, .* free", out), out
    assert re.search(rf"tier +{tmp_path}/new \(\w+\), quota auto, .* free", out), out
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv("PARIO_TIERS", "memory:much")
    status, out = here()
    assert status == 1
    assert "no size: 'much'" in out


def test_a_service(here, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path))
    status, out = here()
    assert status == 1
    assert "no service runs there" in out
    host = Host(str(tmp_path), Options(tiers=(Tier("memory"),)), Solo())
    try:
        status, out = here()
    finally:
        host.close()
    assert re.search(rf"tier +service in {tmp_path}, node 0 of 1", out), out
    assert "no service" not in out


def test_alone_it_starts_no_mpi() -> None:
    code = (
        "import atexit\n@atexit.register\ndef _():\n    from mpi4py import MPI\n    print('MPI', MPI.Is_initialized())"
    )
    assert alone(code=code).stdout.endswith("MPI False\n")


def test_wrong_use(capsys) -> None:
    assert main(["doctor", "a", "b"]) == 2
    assert main(["doctor", "--nonsense"]) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PARIO_NUMBA_CACHE": "/proc/pario"}, ["/proc/pario", "PARIO_NUMBA_CACHE"]),
        ({"PALS_SIZE": "4"}, ["PALS_SIZE=4", "every one of them is alone", "docs/clusters.md"]),
        ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "PALS_SIZE": "4"}, ["cannot load an MPI library", "pip install"]),
    ],
)
def test_a_wrong_environment(env: dict[str, str], words: list[str]) -> None:
    done = alone(**env)
    assert done.returncode == 1, done.stdout + done.stderr
    (text,) = [line for line in done.stdout.splitlines() if line.startswith("!") and words[0] in line]
    assert all(word in text for word in words), done.stdout


def test_a_foreign_mpiexec_on_path(tmp_path) -> None:
    """mpiexec of the other family stands beside this Python (a link, so that the environment is the same)."""
    from mpi4py import MPI

    ours = MPI.get_vendor()[0]
    other = "HYDRA build details:" if ours == "Open MPI" else "mpiexec (OpenRTE) 4.1.4"
    (tmp_path / "mpiexec").write_text(f"#!/bin/sh\necho '{other}'\n")
    (tmp_path / "mpiexec").chmod(0o755)
    done = alone(code=f"import sys; sys.executable = {str(tmp_path / 'python')!r}")
    assert done.returncode == 1
    (text,) = [line for line in done.stdout.splitlines() if line.startswith("!") and "mpiexec" in line]
    assert f"{tmp_path}/mpiexec belongs to" in text
    assert f"mpi4py loads {ours}" in text


@pytest.mark.parametrize("wrong", ["missing", "no LMDB", "empty folder", "truncated"])
def test_a_dataset_that_cannot_be_used(dataset, tmp_path, here, wrong: str) -> None:
    place = tmp_path / "data"
    if wrong == "no LMDB":
        place.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(9000))
    elif wrong == "empty folder":
        place.mkdir()
    elif wrong == "truncated":
        place.write_bytes((dataset / "data.mdb").read_bytes()[:100_000])
    status, out = here(place)
    assert status == 1, out
    (text,) = [line for line in out.splitlines() if line.startswith("! the dataset cannot be used")]
    assert str(place) in text


def test_the_index(dataset, tmp_path, here, monkeypatch) -> None:
    """Not there, saved, out of date."""
    copied = Path(shutil.copytree(dataset, tmp_path / "copy"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def index() -> dict:
        return said_as_json(here(copied, "--json")[1])["nodes"][0]["dataset"]

    sidecar = f"{copied}/data.mdb.pario.index"
    assert index()["index"] is None
    assert index()["index_places"][0] == sidecar
    with pario.Reader(copied):
        pass
    assert index()["index"] == sidecar
    with lmdb.open(str(copied), map_size=1 << 24) as lmdb_env, lmdb_env.begin(write=True) as txn:
        txn.put(b"more", b"x")
    assert index()["index"] is None
    assert sidecar in index()["unfit_indexes"][0]


def test_who_has_the_dataset_open(dataset, here) -> None:
    code = "import lmdb, sys; env = lmdb.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, dataset], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "open\n"
        assert machine.lock_holders(str(dataset / "lock.mdb")) == [writer.pid]
        assert f"open through LMDB by process {writer.pid}" in here(dataset)[1]
    finally:
        writer.communicate(timeout=20)
    assert machine.lock_holders(str(dataset / "lock.mdb")) == []


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """Put other text in the place of the kernel's files: kernel({path: text})."""

    def pretend(files: dict[str, str]) -> None:
        monkeypatch.setattr(machine, "_lines", lambda path: files.get(path, "").splitlines())
        monkeypatch.setattr(os.path, "isdir", lambda path: any(name.startswith(f"{path}/") for name in files))

    return pretend


MOUNTS = """\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 0:30 / /scratch rw - lustre mds@tcp:/scratch rw,flock
22 20 0:31 / /home ro,relatime shared:1 - nfs4 filer:/home rw,vers=4.2
23 20 0:32 / /home/a\\040b rw - fuse.sshfs a@b: rw
24 20 0:33 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
25 21 0:34 / /scratch/over rw - tmpfs first rw
26 21 0:35 / /scratch/over rw - overlay second rw
"""


@pytest.mark.parametrize(
    ("path", "type_", "kind", "shared", "readonly"),
    [
        ("/x", "ext4", "local", False, False),
        ("/scratch/set/data.mdb", "lustre", "parallel", True, False),
        ("/scratchy", "ext4", "local", False, False),
        ("/home/me", "nfs4", "network", True, True),
        ("/home/a b/set", "fuse.sshfs", "FUSE", True, False),
        ("/scratch/over/x", "overlay", "a container's layers", False, False),
    ],
)
def test_file_systems(kernel, monkeypatch, path, type_, kind, shared, readonly) -> None:
    kernel({"/proc/self/mountinfo": MOUNTS})
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    found = machine.file_system(path)
    assert (found.type, found.kind, found.shared, found.readonly) == (type_, kind, shared, readonly)


def test_cores_of_a_control_group(kernel) -> None:
    files = {"/proc/self/mountinfo": MOUNTS, "/proc/self/cgroup": "0::/job/step", "/sys/fs/cgroup/cgroup.procs": ""}
    kernel(files)
    assert machine.core_quota() is None
    kernel(files | {"/sys/fs/cgroup/job/cpu.max": "150000 100000"})
    assert machine.core_quota() == 1.5


def test_cores_of_a_control_group_of_version_1(kernel) -> None:
    place = "/sys/fs/cgroup/cpu"
    kernel(
        {
            "/proc/self/mountinfo": f"21 1 0:2 / {place} rw - cgroup cgroup rw,cpu\n",
            "/proc/self/cgroup": "3:cpu,cpuacct:/docker/abc",
            # In a container: the path is the host's, and the container sees its own group as the root.
            f"{place}/cpu.cfs_quota_us": "200000",
            f"{place}/cpu.cfs_period_us": "100000",
        }
    )
    assert machine.core_quota() == 2


def test_this_machines_memory() -> None:
    total, available = machine.memory()
    assert 0 < available <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_ranks(dataset) -> None:
    done = together(3, dataset, "--json")
    report = said_as_json(done.output)
    assert report["ranks"] == 3
    assert report["launcher"]["size"] == 3
    assert [rank["rank"] for node in report["nodes"] for rank in node["ranks"]] == [0, 1, 2]
    assert report["mpi"]["thread_level"] == "MULTIPLE"
    assert bool(done.status) == bool(report["advice"])


def test_ranks_that_share_a_core() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    done = together(2, code=code)
    assert done.status == 1, done.output
    assert "! 2 ranks share 1 core" in done.output


def test_a_machine_that_mpi_shows_as_two_nodes(dataset) -> None:
    """MPICH's cliques. One line tells of the other node; facts that do not differ are not repeated."""
    done = together(3, dataset, MPIR_CVAR_NUM_CLIQUES="2")
    if "3 ranks on 1 node" in done.output:
        pytest.skip("this MPI shows one node only")
    assert done.status == 1, done.output
    assert "3 ranks on 2 nodes" in done.output
    assert "as 2 nodes" in done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("  node 1")]
    assert "ranks 1:" in line
    assert "cores" in line
    assert "index" not in line
    assert done.output.count("versions") == 1


def test_thread_level() -> None:
    done = together(2, MPI4PY_RC_THREAD_LEVEL="single")
    assert "thread level SINGLE" in done.output
    assert done.status == 1, done.output
    assert "mpi4py.rc.threads" in done.output
    done = together(2, MPI4PY_RC_THREAD_LEVEL="funneled")
    assert "thread level FUNNELED" in done.output
    assert "mpi4py.rc.threads" not in done.output


def test_a_rank_that_cannot_tell_does_not_leave_the_others_waiting() -> None:
    code = """
from mpi4py import MPI
from pario.commands import doctor
def refuse():
    raise OSError("no such luck")
if MPI.COMM_WORLD.rank == 1:
    doctor.allowed_cores = refuse
"""
    done = together(3, code=code)
    assert done.status not in (0, None), done.output
    assert "no such luck" in done.output
    assert done.seconds < 40 * done.slowness
