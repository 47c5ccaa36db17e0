"""Every job script of pario, run by sbatch on a Slurm of four nodes (slurm.py): as it lies in jobscripts/, as
`python -m pario jobscript` writes it out of the built wheel, and as a user gets it wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("click")

import slurm
from launch import POLITE
from required import skip_or_fail
from slurm import Cluster

from pario.demo.train_digits import write_lmdb
from pario.kernels.jit import cache_directory

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "jobscripts"
RECORDS = 603
#: four nodes with a rank each: two cores have enough to do with that
FOUR = ("--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=1")
#: Debian's Open MPI, by the same mpi4py; its fast paths would take the four nodes' common memory for a shared one
OPEN_MPI = {
    "MPI4PY_LIBMPI": "libmpi.so.40",
    # Its own way over TCP crashes now and then while ranks connect to each other: 1 job of 25, by UCX none of 90. For a
    # network without hardware of its own it takes UCX only if told to.
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_btl": "self",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The running cluster, one for all tests."""
    if os.environ.get("PARIO_REQUIRE_SYSTEM") != "1":  # nobody who runs the tests as root gets daemons by surprise
        pytest.skip("starts a Slurm of its own: set PARIO_REQUIRE_SYSTEM=1 and be root")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(slurm.cluster())
        except slurm.Unavailable as reason:
            skip_or_fail(f"no Slurm: {reason}")
            raise
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8x8 pictures of ten classes that are easily told apart."""
    path = tmp_path_factory.mktemp("slurm") / "train.lmdb"
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, RECORDS)
    pixels = rng.integers(20, 235, (10, 8, 8))[labels] + rng.integers(-20, 20, (RECORDS, 8, 8))
    write_lmdb(path, pixels, labels)
    return path


@pytest.fixture
def env(data: Path, tmp_path: Path) -> dict[str, str]:
    """What a user sets, and what makes four nodes bearable for a small machine."""
    local = tmp_path / "local"
    local.mkdir()
    # The place that the templates choose, with the kernels that are compiled already.
    (local / f"pario-numba-{os.environ.get('USER') or os.getuid()}").symlink_to(Path(cache_directory()).parent)
    return {
        **POLITE,
        "DATA": str(data),
        "VENV": sys.prefix,
        "LOCAL": str(local),
        "SCRIPT": str(ROOT / "examples" / "train_ddp.py"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        # MPICH 5.0's UCX exchanges addresses of 4 KiB with whatever lies behind them in memory, and Slurm's pmi2 takes
        # requests of at most 1,024 bytes: now and then MPI_Init fails. Its libfabric has short addresses.
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
    }


def trained(said: str, ranks: int) -> None:
    """The output of examples/train_ddp.py: as many ranks as asked for, every record each epoch, and it learned."""
    assert f"{ranks} ranks," in said
    epochs = re.findall(r"epoch \d: loss ([\d.]+), ([\d,]+) records", said)
    assert [count for _, count in epochs] == [str(RECORDS)] * 3, said
    assert float(epochs[-1][0]) < 0.9 * float(epochs[0][0])


def seen(run: Path) -> Counter[int]:
    """How often each record was seen, from what every rank noted."""
    lines = [line for file in run.glob("ids-*.txt") for line in file.read_text().splitlines()]
    return Counter(int(i) for line in lines for i in line.split()[1:])


def once(run: Path) -> bool:
    return seen(run) == Counter(range(RECORDS))


# -- what holds without a job ------------------------------------------------------------------------------------------


def shellcheck(*paths: Path) -> None:
    if shutil.which("shellcheck") is None:
        skip_or_fail("no shellcheck: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", *paths], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_shellcheck_has_nothing_to_say() -> None:
    scripts = sorted(SCRIPTS.glob("*.slurm"))
    trainings = {"train", "train_staged", "train_requeue", "job_array", "shared_store"}
    assert {path.stem for path in scripts} == {"read_bench", *trainings}
    shellcheck(*scripts)


def test_the_cluster_leaves_nothing_behind() -> None:
    if os.environ.get("PARIO_REQUIRE_SYSTEM") != "1":
        pytest.skip("starts a Slurm of its own: set PARIO_REQUIRE_SYSTEM=1 and be root")
    try:
        with slurm.cluster() as made:
            stubborn = "--wrap=srun bash -c 'trap : TERM; sleep 100 & wait; sleep 100'"
            job = made.submit("--nodes=4", stubborn, cwd=made.folder)
            end = time.monotonic() + 30
            while sum("sleep" in cmdline(pid) for pid in made.processes()) < 4 and time.monotonic() < end:
                time.sleep(0.2)
            assert made.show(job)["JobState"] == "RUNNING"
            assert sum("sleep" in cmdline(pid) for pid in made.processes()) >= 4
    except slurm.Unavailable as reason:
        skip_or_fail(f"no Slurm: {reason}")
    assert made.processes() == []
    assert not made.folder.exists()


def test_a_killed_pytest_leaves_nothing_behind() -> None:
    if os.environ.get("PARIO_REQUIRE_SYSTEM") != "1":
        pytest.skip("starts a Slurm of its own: set PARIO_REQUIRE_SYSTEM=1 and be root")
    program = "import slurm\nwith slurm.cluster() as made: print(made.folder, flush=True); input()"
    folders = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "system")])
    killed = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": folders},
        text=True,
    )
    assert killed.stdout is not None
    folder = Path(killed.stdout.readline().strip())
    made = Cluster(folder)
    assert len(made.processes()) >= slurm.NODES + 2
    killed.kill()
    killed.communicate()
    end = time.monotonic() + 30
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.2)
    assert not folder.exists()
    assert made.processes() == []


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# -- the templates as they lie there -----------------------------------------------------------------------------------


def test_read_bench(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    env |= {"SHUFFLE": "block", "DECODER": "datum", "BATCH_SIZE": "16"}
    done = cluster.run(*FOUR, SCRIPTS / "read_bench.slurm", cwd=tmp_path, env=env, limit_s=120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert "4 ranks on 4 nodes, 16 records per rank and batch, shuffle block, decoder Datum" in done.output
    assert len(re.findall(rf"epoch \d: {RECORDS} records", done.output)) == 2


@pytest.mark.parametrize("how", ["srun, pmi2", "mpiexec", "Open MPI, srun, pmix", "Open MPI, mpiexec"])
def test_train(cluster: Cluster, env: dict[str, str], tmp_path: Path, how: str) -> None:
    """The same training with each launcher."""
    env["LAUNCHER"] = "mpiexec" if "mpiexec" in how else "srun"
    if "Open MPI" in how:
        launcher = shutil.which("mpiexec.openmpi")
        if launcher is None:
            skip_or_fail("no Open MPI: apt-get install openmpi-bin libpmix-dev")
        env |= OPEN_MPI
        if env["LAUNCHER"] == "mpiexec":
            env["LAUNCHER"] = str(launcher)
    env["MPI_TYPE"] = how.rpartition(", ")[2] if "srun" in how else ""
    done = cluster.run(*FOUR, SCRIPTS / "train.slurm", cwd=tmp_path, env=env, limit_s=120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    trained(done.output, 4)


def test_a_training_from_copies_on_the_nodes(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """Twice: the second job finds what the first one left. (The four nodes of this cluster share one disk.)"""
    env |= {"TIER": str(tmp_path / "nvme"), "QUOTA": "1GiB", "MPI_TYPE": "pmi2"}
    for before in ("0.0%", "100.0%"):
        done = cluster.run(*FOUR, SCRIPTS / "train_staged.slurm", cwd=tmp_path, env=env, limit_s=120)
        assert (done.state, done.status) == ("COMPLETED", 0), done.output
        assert re.search(rf"100\.0% of .* lie in .*/nvme on 4 nodes \({before} did before\)", done.output), done.output
        trained(done.output, 4)


def test_four_jobs_share_a_store(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """Each trains on a node of its own, and joins the control plane that the script starts."""
    env |= {"CONTROL": str(tmp_path / "control"), "MPI_TYPE": "pmi2"}
    done = cluster.run(*FOUR, SCRIPTS / "shared_store.slurm", cwd=tmp_path, env=env, limit_s=120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    for k in range(4):
        mine = [line.removeprefix(f"job{k}: ") for line in done.output.splitlines() if line.startswith(f"job{k}: ")]
        trained("\n".join(mine), 1)
    assert "which 4 jobs had joined" in done.output, done.output
    assert not list(tmp_path.glob("control-*")), "nothing is left of the token"


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_ranks_have_nodes_and_cores_of_their_own(
    cluster: Cluster, env: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    script = tmp_path / "place.py"
    script.write_text(
        "import os, numba\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "node = comm.Split_type(MPI.COMM_TYPE_SHARED)\n"
        "mine = (os.environ['SLURMD_NODENAME'], node.size, sorted(os.sched_getaffinity(0)),\n"
        "        os.environ['OMP_NUM_THREADS'], os.environ['PARIO_NUMBA_CACHE'], numba.get_num_threads())\n"
        "for one in comm.gather(mine) or []:\n"
        "    print('place', *one, sep='|')\n"
    )
    env |= {"SCRIPT": str(script), "LAUNCHER": launcher}
    if launcher == "srun":
        env |= OPEN_MPI | {"MPI_TYPE": "pmix"}
    sizes = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    done = cluster.run(*sizes, SCRIPTS / "train.slurm", cwd=tmp_path, env=env, limit_s=60)
    assert done.status == 0, done.output
    places = [line.split("|")[1:] for line in done.output.splitlines() if line.startswith("place")]
    assert len(places) == 4, done.output
    nodes = {node for node, *_ in places}
    assert len(nodes) == 2
    if (os.cpu_count() or 1) >= 2:
        assert len({(node, cores) for node, _, cores, *_ in places}) == 4  # no two ranks of a node on one core
    for _, on_node, cores, omp, cache, numba in places:
        assert on_node == "2"
        assert len(cores.split(",")) == 1
        assert omp == numba == "1"
        assert cache.startswith(env["LOCAL"])


def test_job_array(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """Two seeds, two jobs of two ranks: both train, and differently."""
    sizes = ("--array=3-4", "--ntasks-per-node=2", "--cpus-per-task=1")
    first = cluster.submit(*sizes, SCRIPTS / "job_array.slurm", cwd=tmp_path, env=env)
    outputs = [tmp_path / f"job_array-{first}_{seed}.out" for seed in (3, 4)]
    for seed, output in zip((3, 4), outputs, strict=True):
        done = cluster.wait(f"{first}_{seed}", limit_s=120, output=output)
        assert (done.state, done.status) == ("COMPLETED", 0), done.output
        trained(done.output, 2)
    one, other = (re.findall(r"loss ([\d.]+)", path.read_text()) for path in outputs)
    assert one != other


# -- interrupted trainings ---------------------------------------------------------------------------------------------


def requeue_script(folder: Path, arguments: str) -> Path:
    """The template with a training of one short epoch."""
    text = (SCRIPTS / "train_requeue.slurm").read_text()
    assert "--epochs 90)" in text
    path = folder / "train_requeue.slurm"
    path.write_text(text.replace("--epochs 90)", f"--epochs 1 --log-ids {arguments})"))
    return path


def until(cluster: Cluster, job: int, what: str, limit_s: float, output: Path) -> None:
    end = time.monotonic() + limit_s
    while what not in cluster.output({}, output):
        state = cluster.show(job)
        if state["JobState"] in slurm.ENDED or time.monotonic() > end:
            raise AssertionError(f"never said {what!r}: {state}\n{cluster.output({}, output)}")
        time.sleep(0.2)


def to_its_end(cluster: Cluster, job: int, limit_s: float) -> slurm.Ended:
    """Wait, and spare a requeued job the two minutes for which Slurm holds it back."""
    end = time.monotonic() + limit_s
    while (known := cluster.show(job))["JobState"] not in slurm.ENDED and time.monotonic() < end:
        if known["JobState"] == "PENDING" and known["Reason"] == "BeginTime":
            time.sleep(3)  # the nodes clear up what the first piece left; that is what Slurm's two minutes are for
            cluster.say("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)
    return cluster.wait(job, limit_s=1)


def test_the_time_limit_interrupts_and_no_record_is_lost_or_seen_twice(
    cluster: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    """Slurm's own signal before the time limit, its shortest one: it comes 10 to 40 s after the start."""
    run = tmp_path / "run"
    env |= {"RUN": str(run), "SCRIPT": str(ROOT / "examples" / "train_requeue.py")}
    script = requeue_script(tmp_path, "--batch-size 4 --step-ms 1100 --end 4e9")  # 38 steps; the signal alone counts
    job = cluster.submit(*FOUR, "--time=1", "--signal=B:USR1@20", script, cwd=tmp_path, env=env)
    output = tmp_path / f"train_requeue-{job}.out"
    until(cluster, job, "goes back into the queue", 120, output)
    first = seen(run)
    assert 0 < len(first) < RECORDS
    assert set(first.values()) == {1}
    done = to_its_end(cluster, job, 420)  # on a slow machine a piece makes a step or two
    assert (done.state, done.status) == ("COMPLETED", 0), f"{cluster.show(job)}\n{done.output}\n{cluster.logs()}"
    assert int(cluster.show(job)["Restarts"]) >= 1
    assert "Slurm announces the time limit" in done.output
    assert re.search(rf"saved in epoch 0 after {len(first)} records", done.output)
    assert "going on in epoch 0" in done.output
    assert once(run)
    assert len(list(run.glob("ids-*.txt"))) == 4


def test_without_a_signal_the_measured_time_ends_the_piece(
    cluster: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    """Slurm says when the job ends, and the script saves before that."""
    run = tmp_path / "run"
    env |= {"RUN": str(run), "SCRIPT": str(ROOT / "examples" / "train_requeue.py")}
    script = requeue_script(tmp_path, "--batch-size 4 --step-ms 3000")  # 38 steps
    job = cluster.submit(*FOUR, "--time=1", "--signal=B:CONT@1", script, cwd=tmp_path, env=env)
    output = tmp_path / f"train_requeue-{job}.out"
    until(cluster, job, "goes back into the queue", 120, output)
    cluster.say("scancel", str(job))
    said = cluster.output({}, output)
    assert f"the time limit is near: saved in epoch 0 after {len(seen(run))} records" in said
    assert set(seen(run).values()) == {1}


def test_requeued_under_mpiexec(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """The signal sent by hand; mpiexec passes it on to its ranks."""
    run = tmp_path / "run"
    env |= {"RUN": str(run), "SCRIPT": str(ROOT / "examples" / "train_requeue.py"), "LAUNCHER": "mpiexec"}
    script = requeue_script(tmp_path, "--batch-size 4 --step-ms 150")
    job = cluster.submit("--nodes=2", *FOUR[1:], script, cwd=tmp_path, env=env)
    output = tmp_path / f"train_requeue-{job}.out"
    until(cluster, job, "first step", 60, output)
    cluster.say("scancel", "--batch", "--signal=USR1", str(job))
    done = to_its_end(cluster, job, 120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert "going on in epoch 0" in done.output
    assert once(run)


def test_cancelled_it_saves_stays_cancelled_and_goes_on_with_other_ranks(
    cluster: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    env |= {"RUN": str(run), "SCRIPT": str(ROOT / "examples" / "train_requeue.py")}
    script = requeue_script(tmp_path, "--batch-size 4 --step-ms 250")
    job = cluster.submit(*FOUR, script, cwd=tmp_path, env=env)
    output = tmp_path / f"train_requeue-{job}.out"
    until(cluster, job, "first step", 60, output)
    cluster.say("scancel", str(job))  # SIGTERM to all ranks, SIGKILL after KillWait
    cancelled = cluster.wait(job, limit_s=30)
    assert cancelled.state == "CANCELLED"
    assert "asked to stop: saved in epoch 0" in cancelled.output
    assert not (run / "requeue").exists()
    assert cluster.show(job)["Restarts"] == "0"
    assert 0 < len(seen(run)) < RECORDS

    script = requeue_script(tmp_path, "--batch-size 16")
    sizes = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1")
    done = cluster.run(*sizes, script, cwd=tmp_path, env=env, limit_s=120)
    assert (done.state, done.status) == ("COMPLETED", 0), done.output
    assert "going on in epoch 0" in done.output
    assert once(run)


# -- written out by the installed package ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as pip would put it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("pario-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    for kernel in (ROOT / "pario" / "kernels").glob("*.py"):  # same age, hence the same compiled kernels: it saves 20 s
        shutil.copystat(kernel, folder / "site" / "pario" / "kernels" / kernel.name)
    return folder / "site"


@pytest.mark.parametrize("name", ["read_bench", "train", "train_requeue", "job_array"])
def test_written_out_filled_in_and_run(
    cluster: Cluster, env: dict[str, str], installed: Path, tmp_path: Path, name: str
) -> None:
    here = {**os.environ, "PYTHONPATH": str(installed)}
    words = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=00:05:00", f"--data={env['DATA']}"]
    words += ["--set", f"LOCAL={env['LOCAL']}"]
    if name == "job_array":
        words += ["--array", "0"]
    if name == "train_requeue":
        arguments = '--data "$DATA" --run "$RUN" --epochs 1 --log-ids'
        words += ["--set", f"ARGUMENTS={arguments}", "--set", f"RUN={tmp_path}/a run"]
    done = subprocess.run(
        [sys.executable, "-m", "pario", "jobscript", name, *words],
        cwd=tmp_path,
        env=here,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    script = tmp_path / f"{name}.slurm"
    shellcheck(script)
    # No knob is set from outside: all of them stand in the file.
    outside = {key: env[key] for key in (*POLITE, "MPIR_CVAR_CH4_NETMOD", "FI_PROVIDER")} | {
        "PYTHONPATH": str(installed)
    }
    ended = cluster.run(script, cwd=tmp_path, env=outside, limit_s=120)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.output
    if name == "train_requeue":
        assert once(tmp_path / "a run")
    elif name == "read_bench":
        assert "2 ranks on 1 node," in ended.output
    else:
        trained(ended.output, 2)


# -- as a user gets it wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"VENV": "/nowhere"}, "error: no Python in /nowhere: set VENV"),
        ({"DATA": ""}, "error: no dataset: set DATA to an LMDB, for example  DATA="),
        ({"DATA": "/nowhere.lmdb"}, "error: DATA names /nowhere.lmdb, which does not exist on node"),
        ({"SCRIPT": "nowhere.py"}, "error: no script nowhere.py (working directory: "),
        ({"LAUNCHER": "/nowhere/mpiexec"}, "error: LAUNCHER=/nowhere/mpiexec does not run"),
        ({"PYTHONPATH": "no-pario"}, "error: pario or mpi4py is missing in "),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_mistake_is_one_line_that_helps(
    cluster: Cluster, env: dict[str, str], tmp_path: Path, wrong: dict[str, str], said: str
) -> None:
    if wrong.get("PYTHONPATH") == "no-pario":
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "pario.py").write_text("raise ImportError('no pario here')\n")
        wrong = {"PYTHONPATH": str(tmp_path / "empty")}
    done = cluster.run(*FOUR, SCRIPTS / "train.slurm", cwd=tmp_path, env=env | wrong, limit_s=60)
    assert (done.state, done.status) == ("FAILED", 2), done.output
    assert said in done.output


def test_ranks_of_srun_without_a_pmi(cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    """They meet without MPI. A script that uses MPI itself would be alone on each: pario says so, instead of training
    two models."""
    env["MPI_TYPE"] = "none"
    sizes = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    done = cluster.run(*sizes, SCRIPTS / "read_bench.slurm", cwd=tmp_path, env=env, limit_s=60)
    assert done.state == "COMPLETED", done.output
    assert "2 ranks on 2 nodes" in done.output
    script = f"from mpi4py import MPI; import pario; pario.Loader({env['DATA']!r}, 4, comm=MPI.COMM_WORLD)"
    command = f"srun --mpi=none {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    done = cluster.run(*sizes, f"--wrap={command}", cwd=tmp_path, env=env, limit_s=60)
    assert done.state == "FAILED", done.output
    assert "every one of them is alone" in done.output
    assert "--mpi=pmi2 or --mpi=pmix" in done.output


@pytest.mark.parametrize("mpi", ["pmi2", "none"])
def test_doctor(cluster: Cluster, env: dict[str, str], tmp_path: Path, mpi: str) -> None:
    command = f"srun --mpi={mpi} {shlex.quote(sys.executable)} -m pario doctor {shlex.quote(env['DATA'])}"
    done = cluster.run(*FOUR, f"--wrap={command}", cwd=tmp_path, env=env, limit_s=60)
    assert "launcher        srun (" in done.output
    assert "4 ranks on 4 nodes" in done.output, done.output
    for node in (1, 2, 3):
        assert re.search(rf"^  node {node} +node{node + 1}, ranks {node}: ", done.output, re.M), done.output
    # The virtual nodes share a host name; Slurm's names tell them apart.
    assert "MPI shows the ranks" not in done.output
