"""A user without HOME and without an entry in passwd: any number given to `docker run --user`."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Made

import pario
from pario.kernels import jit


@pytest.fixture(autouse=True)
def nobody_knows_me(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "PARIO_NUMBA_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("beside", [True, False])
def test_a_loader_works(
    beside: bool, dataset: Callable[[str], Made], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """beside: the index can be saved beside the data; else there is nowhere to save it."""
    made = dataset("caffe_datum")
    place = tmp_path / "set"
    shutil.copytree(made.path, place)
    sidecar = place / "data.mdb.pario.index"
    if sidecar.exists():
        sidecar.unlink()
    if not beside:
        (sidecar / "in the way").mkdir(parents=True)
    with pario.Loader(place, 1, shuffle="global") as loader:
        assert sum(len(batch.ids) for batch in loader) == len(loader) > 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == (not beside)
    assert sidecar.is_file() == beside
    assert not os.path.exists("~")


def test_a_home_that_is_not_there_is_said() -> None:
    with pytest.raises(pario.MissingError, match="~/train"):
        pario.Loader("~/train", 1)


def test_the_kernels_directory_needs_no_name() -> None:
    assert os.path.basename(os.path.dirname(jit.cache_directory())) == f"pario-numba-{os.geteuid()}"
