"""Solo without MPI, the choice between Solo and World, and that both have one surface."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from pario.comm.base import AnyWorld
from pario.comm.messages import Messages
from pario.comm.slots import Slots
from pario.comm.solo import Solo
from pario.comm.window import Ring
from pario.comm.world import World
from pario.errors import ClosedError, LauncherError, OptionError, ParioError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_one_surface() -> None:
    """World does all that a process alone does in another way; what it has beyond that is MPI's."""
    alone = {name for name, what in vars(AnyWorld).items() if callable(what) and not name.startswith("_")}
    assert alone <= vars(World).keys() | vars(Messages).keys()
    more = {name for name in dir(World) if not name.startswith("_")} - set(dir(Solo))
    assert more <= set(vars(Messages)), more


def test_solo_is_one_rank() -> None:
    solo = Solo()
    assert (solo.size, solo.rank, solo.nodes, solo.node, solo.node_size, solo.node_rank) == (1, 0, 1, 0, 1, 0)
    assert (solo.seat, solo.node_seat, solo.is_leader, solo.node_ranks) == (0, 0, True, (0,))
    solo.barrier()
    solo.node_barrier()
    assert solo.bcast({"a": 1}) == {"a": 1}
    assert solo.node_bcast(5) == 5
    assert solo.allgather("x") == ["x"]
    assert (solo.exscan(7), solo.allreduce_sum(7), solo.allreduce_max(7), solo.allreduce_min(7)) == (0, 7, 7, 7)
    solo.agree(None, "anything")
    with pytest.raises(KeyError, match="own"):
        solo.agree(KeyError("own"), "anything")


def test_solo_arrays() -> None:
    solo = Solo()
    a = np.arange(12.0).reshape(3, 4)
    shared = solo.share_array(a)
    assert np.shares_memory(shared, a)
    np.testing.assert_array_equal(shared, a)
    with pytest.raises(ValueError, match="read-only"):
        shared[0, 0] = 1
    a[0, 0] = 5  # the owner's array is as it was
    gathered = solo.gather_array(a[:, 1])
    assert gathered is not None
    assert gathered.tolist() == [1, 5, 9]
    with pytest.raises(OptionError):
        solo.share_array(None)
    with pytest.raises(OptionError):
        solo.gather_array(a)
    for nbytes in (0, 1, 4096, 10_001):
        memory = solo.shared_bytes(nbytes)
        assert memory.size == nbytes
        assert memory.ctypes.data % 4096 == 0 or nbytes == 0
        assert not memory.any()
        memory[:] = 1


def test_solo_is_freed_once() -> None:
    solo = Solo()
    memory = solo.shared_bytes(10)
    solo.close()
    solo.close(collective=False)
    memory[:] = 3
    with pytest.raises(ClosedError):
        solo.barrier()
    with Solo() as other:
        other.barrier()


def test_ring_of_one() -> None:
    with Solo() as solo:
        slots = Slots(solo, 2, 100, 3, 5)
        assert not len(slots.data)
        slots.allocate()
        data = slots.data
        slots.allocate()
        assert slots.data is data
        assert data.shape == (2, 4096)
        assert slots.ids.shape == slots.starts.shape == slots.nbytes.shape == (3, 5)
        assert slots.ids.dtype == np.int64
        slots.close()
        assert not len(slots.data)
        ring = Ring(solo, 2)
        ring.publish(0, 4)
        assert ring.wait_group(0) == 4
        assert ring.full_slots(0) == 1
        assert ring.wait_done(0)
        ring.finish(0, 3)
        assert ring.wait_done(3)
        ring.fail(0, "my own")
        ring.check()
        ring.close()
        with pytest.raises(ClosedError):
            ring.check()
    with Solo() as solo, pytest.raises(OptionError, match="slots"):
        Ring(solo, 0)


def test_a_check_that_raises_ends_the_wait() -> None:
    with Solo() as solo:
        ring = Ring(solo, 2)

        def check() -> None:
            raise ParioError("something else")

        with pytest.raises(ParioError, match="something else"):
            ring.wait_group(0, check)
        with pytest.raises(ParioError, match="something else"):
            ring.wait_done(1, check)
        ring.close()


#: variables of launchers that may be set where the tests run
OUTER = ("PMI", "OMPI_", "PALS_", "SLURM_", "MPI_LOCAL", "JSM_", "MV2_", "HYDRA_", "HYDI_")


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**own, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


#: what mpi4py says where no MPI library is installed
NO_MPI = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ImportError("cannot load MPI library")
sys.meta_path.insert(0, Finder())
"""

SOLO = """
import sys
import numpy as np
from pario.comm.agree import Alarm
from pario.comm.solo import Solo
from pario.comm.window import Ring
from pario.comm.world import get_world
world = get_world()
assert type(world) is Solo, world
ring, alarm = Ring(world, 2), Alarm(world)
ring.publish(0, 1); ring.wait_group(0, alarm.check); alarm.raise_all(ValueError("x")); alarm.close(); ring.close()
world.share_array(np.zeros(3)); world.agree(None, "x"); world.close()
assert not any(name.startswith("mpi4py") for name in sys.modules)
"""


def test_solo_needs_no_mpi() -> None:
    """Neither the package nor a library: a laptop, a login node."""
    for code in (SOLO, NO_MPI + SOLO):
        done = python(code)
        assert done.returncode == 0, done.stderr


def test_a_single_slurm_task_without_mpi_is_solo() -> None:
    done = python(NO_MPI + SOLO, SLURM_STEP_NUM_TASKS="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "env", [{"PMI_SIZE": "4", "PMI_RANK": "2"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "4"}]
)
def test_a_launcher_without_mpi_library(env) -> None:
    code = NO_MPI + "from pario.comm.world import get_world\nget_world()"
    done = python(code, **env)
    assert done.returncode == 1
    assert LauncherError.__name__ in done.stderr
    assert "cannot load MPI library" in done.stderr
    assert "=4" in done.stderr
    assert 'pip install ".[mpich]"' in done.stderr


#: an mpi4py whose library sees one process
ALONE = """
import sys, types
class Comm:
    def Get_size(self): return 1
mpi = types.ModuleType("mpi4py.MPI")
mpi.COMM_WORLD, mpi.COMM_SELF = Comm(), Comm()
mpi.Is_initialized, mpi.Is_finalized = (lambda: True), (lambda: False)
mpi.get_vendor = lambda: ("Some MPI", (1, 2, 3))
package = types.ModuleType("mpi4py"); package.MPI = mpi
sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = package, mpi
from pario.comm.world import get_world
get_world()
"""


@pytest.mark.parametrize(
    "env", [{"PMI_SIZE": "4"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PALS_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "4"}]
)
def test_a_launcher_of_another_mpi(env) -> None:
    done = python(ALONE, **env)
    assert done.returncode == 1
    assert "LauncherError" in done.stderr
    (name,) = env
    for part in ("started 4 processes", f"{name}=4", "size 1", "Some MPI 1.2.3", 'comm="self"'):
        assert part in done.stderr


@pytest.mark.parametrize("more", [{}, {"TORCHELASTIC_RUN_ID": "none", "PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_processes_of_torchrun_do_not_read_everything_each(more) -> None:
    """Also below an MPI launcher that started torchrun: what it says is not about the processes of torchrun."""
    code = "from pario.comm.world import get_world\nget_world()"
    done = python(code, WORLD_SIZE="2", RANK="1", **more)
    assert done.returncode == 1
    for part in ("LauncherError", "WORLD_SIZE=2, RANK=1", "MASTER_ADDR", "torchrun, mpiexec or srun", 'comm="self"'):
        assert part in done.stderr, done.stderr


def test_one_process_on_purpose() -> None:
    """`comm="self"` whatever the environment says, WORLD_SIZE=1 without it, and commands that each process may run."""
    code = (
        NO_MPI
        + """
import os
from pario.comm.solo import Solo
from pario.comm.world import get_world
assert type(get_world("self")) is Solo
del os.environ["PMI_SIZE"]
os.environ["WORLD_SIZE"] = "1"
assert type(get_world()) is Solo
try:
    get_world("world")
except ValueError as error:
    assert '"self"' in str(error)
else:
    raise AssertionError
"""
    )
    done = python(code, WORLD_SIZE="2", RANK="1", PMI_SIZE="4")
    assert done.returncode == 0, done.stderr
