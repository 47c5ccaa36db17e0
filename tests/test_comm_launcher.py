"""What the launchers' environment variables tell."""

from __future__ import annotations

import os

import pytest

from pario.comm.launcher import launched_rank, launcher, node_name


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no launcher had started the tests."""
    for name in list(os.environ):
        if name.startswith(("PMI_", "PMIX_", "OMPI_", "PALS_", "SLURM", "JSM_", "MV2_", "HYDI_")):
            monkeypatch.delenv(name)


def test_no_launcher() -> None:
    assert launcher() == ("", 0, "")
    assert launched_rank() is None


def test_a_launcher_tells_name_size_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    assert launcher() == ("a PMI launcher", 4, "PMI_SIZE=4, PMI_RANK=2")
    assert launched_rank() == 2
    monkeypatch.setenv("PMI_SIZE", "four")
    assert launcher() == ("a PMI launcher", 0, "PMI_RANK=2")


@pytest.mark.parametrize(("inner", "outer"), [("4", "1"), ("1", "4")])
def test_of_nested_launchers_the_larger_number_counts(monkeypatch: pytest.MonkeyPatch, inner: str, outer: str) -> None:
    """mpiexec inside of a batch job has srun's variables around it."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", inner)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", outer)
    found = launcher()
    assert (found.name, found.size) == ("Open MPI's mpiexec", 4)


def test_ranks_of_a_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself has SLURM_PROCID=0, and so have all ranks that its mpiexec starts."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launched_rank() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert launched_rank() == 3


def test_the_name_of_a_node_is_the_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    host = node_name()
    monkeypatch.setenv("SLURMD_NODENAME", f"{host}-as-slurm-knows-it")
    assert node_name() == f"{host}-as-slurm-knows-it"
