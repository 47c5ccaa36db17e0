"""Fixtures for all tests: small LMDBs with their truth, and the folder of published LMDB files."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import MAKERS, Made
from grown_sets import SETS, forget
from lanes import pytest_xdist_auto_num_workers, pytest_xdist_make_scheduler  # noqa: F401
from required import skip_or_fail
from side_by_side import side_by_side  # noqa: F401

from pario.kernels.jit import tell_cache_problem

tell_cache_problem(1)  # where nothing is compiled yet, a test that counts warnings would find one more

# Images of containers set it. Each piece of a `print` then is a write of its own, and the lines of ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """dataset(name) -> Made: one of the small LMDBs of tests/datasets.py, written once per session."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp("datasets") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def grown_set_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grown")


@pytest.fixture(autouse=True)
def as_before_a_command() -> Iterator[None]:
    """Commands with -v, -q or --json change what this process logs and prints."""
    log = logging.getLogger("pario")
    level = log.level
    yield
    log.setLevel(level)
    if (screen := sys.modules.get("pario.commands.screen")) is not None:
        screen.screen.begin(None)


@pytest.fixture
def grown_set(grown_set_folder: Path) -> Callable[[str], str]:
    """grown_set(name) -> path of one of the LMDBs of tests/grown_sets.py, written once; no index beside it."""

    def get(name: str) -> str:
        place = grown_set_folder / name.replace(" ", "-")
        if not place.exists():
            SETS[name](place)
        forget(str(place))
        return str(place)

    return get


@pytest.fixture
def grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a saved index one grows in key order, however soon all of it could be read."""
    monkeypatch.setattr("pario.dataset.reader.SOON_S", 0.0)


@pytest.fixture(scope="session")
def caffe_datum(dataset: Callable[[str], Made]) -> Made:
    return dataset("caffe_datum")


@pytest.fixture(params=sorted(set(MAKERS) - {"empty"}))
def any_dataset(request: pytest.FixtureRequest, dataset: Callable[[str], Made]) -> Made:
    """Every kind of LMDB that holds records, one after the other."""
    return dataset(request.param)


@pytest.fixture
def nothing_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk comes into memory tiers of files on this node: ranks read everything by themselves."""
    monkeypatch.setattr("pario.feed.seat.begin_fill", lambda *_: None)


@pytest.fixture
def through_the_ring(monkeypatch: pytest.MonkeyPatch, grows: None) -> None:
    """Records come through the node's ring unless tiers are named, and an index grows: as for a file of a parallel file
    system that memory has no room for."""
    monkeypatch.setattr("pario.dataset.staging.tiers_by_default", lambda *_: ((), False))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published LMDB files (wild/, foreign/), named by PARIO_SHARED_DATA."""
    named = os.environ.get("PARIO_SHARED_DATA")
    if not named:
        skip_or_fail("PARIO_SHARED_DATA does not name the folder of published LMDB files")
    path = Path(named or "").resolve()
    if not path.is_dir():
        pytest.fail(f"PARIO_SHARED_DATA names {path}, which is no folder")
    return path


#: By default a parametrized test runs at most this many of its cases, evenly spread; `-m full` runs the others.
_MOST_CASES = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        other = {"full", "system", "frameworks", "site", "mpi"} & {mark.name for mark in item.iter_markers()}
        if not other and item.path.name != "test_mpi.py":  # which starts one job for all files of MPI tests
            cases.setdefault((item.nodeid.split("::")[0], item.nodeid.split("[")[0]), []).append(item)
    for group in cases.values():
        kept = {len(group) * k // _MOST_CASES for k in range(_MOST_CASES)}
        for number, item in enumerate(group):
            if len(group) > _MOST_CASES and number not in kept:
                item.add_marker("full")
