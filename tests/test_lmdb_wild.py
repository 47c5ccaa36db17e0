"""Loading code as people write it gives the same records by pario.lmdb as by py-lmdb; also in workers."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lmdb as real
import pytest
from lmdb_users import USERS, Dataset, close, outcome, outcome_of_inherited, outcome_of_pickled

import pario.lmdb as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[Any]]]:
    """made(name) -> (path, what py-lmdb reads from it), written once."""
    done: dict[str, tuple[str, list[Any]]] = {}

    def get(name: str) -> tuple[str, list[Any]]:
        if name not in done:
            write, user = USERS[name]
            path = write(tmp_path_factory.mktemp("users") / "set", random.Random(name))
            dataset = user(real, path)
            done[name] = path, outcome(dataset)
            close(dataset)
        return done[name]

    return get


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    """One worker for all, since starting one and loading the compiled code costs a second."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", USERS)
def test_same_records(name: str, made: Callable[[str], tuple[str, list[Any]]]) -> None:
    path, expected = made(name)
    assert len(expected) >= 15
    dataset = USERS[name][1](ours, path)
    assert outcome(dataset) == expected
    # A second one beside it, which py-lmdb refuses.
    assert outcome(USERS[name][1](ours, path)) == expected
    close(dataset)


@pytest.mark.parametrize("name", USERS)
def test_pickled_into_a_spawned_worker(
    name: str, made: Callable[[str], tuple[str, list[Any]]], spawned: ProcessPoolExecutor
) -> None:
    path, expected = made(name)
    dataset = USERS[name][1](ours, path)
    dataset[0]  # what opens late is open now
    data = pickle.dumps(dataset)
    assert spawned.submit(outcome_of_pickled, data).result(timeout=60) == expected
    assert outcome(dataset) == expected


@pytest.mark.parametrize("name", USERS)
def test_used_after_a_fork(name: str, made: Callable[[str], tuple[str, list[Any]]]) -> None:
    path, expected = made(name)
    dataset = USERS[name][1](ours, path)
    dataset[0]
    fork = multiprocessing.get_context("fork")
    workers = []
    for _ in range(2):
        mine, theirs = fork.Pipe(duplex=False)
        worker = fork.Process(target=outcome_of_inherited, args=(theirs, dataset))
        worker.start()
        workers.append((worker, mine))
    # The parent reads on meanwhile.
    assert outcome(dataset) == expected
    for worker, connection in workers:
        assert connection.poll(60)
        assert connection.recv() == expected
        worker.join(60)
        assert worker.exitcode == 0


def test_the_real_one_cannot_be_pickled(made: Callable[[str], tuple[str, list[Any]]]) -> None:
    """What the tests above would prove nothing about, if it could."""
    path, _ = made("STR")
    dataset = USERS["STR"][1](real, path)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(dataset)
    close(dataset)


class TestAsePackage:
    """ASE-LMDB through the package that its users use, where it is installed: pip install ".[wild]"."""

    @pytest.fixture
    def connect(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        pytest.importorskip("ase", reason="needs ase: pip install '.[wild]'")
        module = pytest.importorskip(
            "ase_db_backends.aselmdb", reason="needs ase-db-backends: pip install '.[wild]'"
        )

        def connect(lmdb: Any, path: Path, **options: Any) -> Any:
            monkeypatch.setattr(module, "lmdb", lmdb)
            return module.LMDBDatabase(path, **options)

        return connect

    @pytest.fixture
    def written(self, connect: Callable[..., Any], tmp_path: Path) -> Path:
        from ase.build import molecule
        from ase.calculators.singlepoint import SinglePointCalculator

        path = tmp_path / "set.aselmdb"
        db = connect(real, path)
        for i, name in enumerate(["H2O", "CH4", "CO2", "NH3", "C6H6", "CH3CH2OH"] * 4):
            atoms = molecule(name, vacuum=4 + i)
            atoms.calc = SinglePointCalculator(atoms, energy=-float(i), forces=atoms.positions)
            db.write(atoms, charge=i % 3, data={"note": "x" * 300 * i, "name": name})
        db.delete([4, 11])
        db.metadata = {"title": "a test", "n": 22}
        db.close()
        return path

    def seen(self, db: Any) -> list[Any]:
        rows = []
        for row in db.select():
            atoms = row.toatoms()
            rows.append(
                [row.id, row.natoms, row.energy, row.formula, row.key_value_pairs, row.data, atoms.positions.tolist(),
                 atoms.cell.tolist(), atoms.get_forces().tolist()]
            )  # fmt: skip
        some = [row.id for row in db.select("charge=1,natoms>3")]
        return [rows, some, db.metadata, len(db), db.ids, sorted(db.deleted_ids), db.get(5).formula]

    def test_same_rows(self, connect: Callable[..., Any], written: Path) -> None:
        theirs = connect(real, written, readonly=True, readahead=False)
        expected = self.seen(theirs)
        theirs.close()
        assert len(expected[0]) == 22
        mine = connect(ours, written, readonly=True, readahead=False)
        assert type(mine.env) is ours.Environment
        assert self.seen(mine) == expected
        with connect(ours, written, readonly=True) as db:
            assert db.get(7).formula == expected[0][5][3]
        mine.close()

    def test_pickled(self, connect: Callable[..., Any], written: Path) -> None:
        db = connect(ours, written, readonly=True)
        rows = [row.formula for row in db.select()]
        again = pickle.loads(pickle.dumps(db))
        assert [row.formula for row in again.select()] == rows

    def test_writing_says_what_to_use(self, connect: Callable[..., Any], written: Path) -> None:
        from ase.build import molecule

        db = connect(ours, written, readonly=True)
        with pytest.raises(real.ReadonlyError, match="the real lmdb"):
            db.write(molecule("H2O"))


def test_all_conventions_are_here() -> None:
    assert {"STR", "BasicSR", "LSUN", "OC20", "ASE-LMDB", "TAPE", "ATOM3D", "Uni-Mol", "tensorpack", "MeanFlow"} <= set(
        USERS
    )
    assert all(issubclass(user, Dataset) for _, user in USERS.values())  # type: ignore[arg-type]
