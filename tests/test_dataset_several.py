"""Several LMDBs as one, in one process: which files, which records, which errors. The oracle is py-lmdb's cursor."""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from several_sets import SHAPES, Pairs, break_record, name, paths_in, samples, truth, write

import pario
from pario.errors import CorruptedError, DecodeError, FileError, MissingError, OptionError, ParioError, StateError
from pario.options import RECIPES, Recipe

SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
EDGES = np.cumsum([0, *(n + 1 for n, _ in SHAPES)]).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("several") / "sets"
    write(made)
    return made


@pytest.fixture(scope="module")
def paths(folder: Path) -> list[str]:
    return paths_in(folder)


@pytest.fixture(scope="module")
def pairs(paths: list[str]) -> Pairs:
    return truth(paths)


def read(loader: pario.Loader, pairs: Pairs, steps: int | None = None) -> list[int]:
    """The ids of the next epoch, or of its first steps; all values are right."""
    seen: list[int] = []
    for _, batch in zip(range(len(loader) if steps is None else steps), loader, strict=False):
        o = batch["offsets"]
        for row, i in enumerate(batch.ids.tolist()):
            assert batch["data"][o[row] : o[row + 1]].tobytes() == pairs[i][1]
        seen += batch.ids.tolist()
    return seen


@pytest.mark.parametrize("recipe", ["auto", "ring"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_every_record_once(paths: list[str], pairs: Pairs, shuffle: Any, recipe: str) -> None:
    with pario.Loader(paths, 7, shuffle=shuffle, recipe=recipe, options=SMALL) as loader:
        assert loader.records == len(samples(pairs))
        for _ in range(2):
            ids = read(loader, pairs)
            assert ids == samples(pairs) if not shuffle else sorted(ids) == samples(pairs)
        assert ("tiers" in loader.stats()) == (recipe == "auto")
        assert loader.keys(range(len(pairs))) == [key for key, _ in pairs]
        assert loader.index.files.paths == tuple(paths)
        assert loader.index.files.of([0, EDGES[1] - 1, EDGES[1], EDGES[3] - 1]).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("recipe", ["auto", "ring"])
def test_files_of_different_formats(dataset: Any, recipe: str) -> None:
    """Other headers of pages, values inside leaf pages and on pages of their own, and none at all."""
    made = [dataset(name) for name in ("format_3", "variable_sizes", "random_insertion")]
    pairs = [pair for one in made for pair in one.truth]
    options = pario.Options(slots=3, slot_bytes=1 << 20)
    for _ in range(2):  # the second time the places come from the side-cars, and more of them is checked
        with pario.Loader([one.path for one in made], 50, shuffle="global", recipe=recipe, options=options) as loader:
            assert sorted(read(loader, pairs)) == list(range(len(pairs)))
    assert not loader.index.bytes_read


def named(how: str, folder: Path, tmp_path: Path) -> Any:
    if how == "folders":  # each with a data.mdb of its own
        for k in range(len(SHAPES)):
            (tmp_path / f"part{k}").mkdir()
            shutil.copy(folder / name(k), tmp_path / f"part{k}" / "data.mdb")
        return tmp_path
    return {
        "folder": folder,
        "numbers": f"{folder}/data.%04d.lmdb",
        "stars": f"{folder}/data.*.lmdb",
        "bracket": [f"{folder}/data.000[01].lmdb", folder / name(2)],
    }[how]


@pytest.mark.parametrize("how", ["folder", "folders", "numbers", "stars", "bracket"])
def test_how_files_are_named(folder: Path, tmp_path: Path, pairs: Pairs, how: str) -> None:
    with pario.Reader(named(how, folder, tmp_path), save_index=False) as reader:
        records = reader.read(range(len(pairs)))
        assert [bytes(record) for record in records] == [value for _, value in pairs]


def test_a_list_of_one_is_that_file(paths: list[str]) -> None:
    with pario.Loader(paths[0], 7) as one, pario.Loader(paths[:1], 7) as same:
        assert same.state_dict() == one.state_dict()


def test_a_folder_is_named_in_the_log(folder: Path, paths: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pario"):
        pario.Reader(paths).close()
        assert not caplog.records
        pario.Reader(folder).close()
    assert f"{folder}: the 3 LMDBs in this folder are one dataset: {paths[0]}, " in caplog.text


def test_side_cars_are_those_of_the_files(folder: Path, tmp_path: Path, pairs: Pairs) -> None:
    shutil.copytree(folder, tmp_path / "sets", ignore=shutil.ignore_patterns("*.index"))
    mine = paths_in(tmp_path / "sets")
    with pario.Reader(mine[1]) as reader:
        assert reader.index.bytes_read
    for found in ([1, 0, 1], [0, 0, 0]):
        with pario.Reader(mine) as reader:
            assert [int(one.bytes_read > 0) for one in reader.index.files.stretches] == found
            assert [bytes(record) for record in reader.read(range(len(pairs)))] == [value for _, value in pairs]
    with pario.Reader(mine[2]) as reader:
        assert not reader.index.bytes_read


@pytest.mark.parametrize(
    "select",
    [
        range(90, 140),
        slice(-40, None),
        [3, EDGES[1], EDGES[2] + 1],
        b"1",
        re.compile(rb".*[05]$"),
        lambda key: key.endswith(b"7"),
        "all",
    ],
    ids=["range", "slice", "ids", "prefix", "pattern", "function", "all"],
)
def test_selections(paths: list[str], pairs: Pairs, select: Any) -> None:
    everything = range(len(pairs))
    if isinstance(select, re.Pattern):
        right = [i for i in everything if select.match(pairs[i][0])]
    elif isinstance(select, bytes):
        right = [i for i in everything if pairs[i][0].startswith(select)]
    elif callable(select):
        right = [i for i in everything if select(pairs[i][0])]
    elif isinstance(select, slice):
        right = list(everything[select])
    else:
        right = list(everything) if select == "all" else list(select)
    with pario.Loader(paths, 5, shuffle="block", select=select, options=SMALL) as loader:
        assert sorted(read(loader, pairs)) == right


def test_a_split(paths: list[str], pairs: Pairs) -> None:
    parts = pario.split(paths, (0.8, 0.2), seed=3)
    found = []
    for part in parts:
        with pario.Loader(paths, 5, select=part) as loader:
            found.append(read(loader, pairs))
    assert sorted(found[0] + found[1]) == samples(pairs)


def test_meta_records_are_named_once(paths: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pario"), pario.Loader(paths, 5):
        pass
    assert "'length' (3 times)" in caplog.text


@pytest.mark.parametrize("recipe", ["lmm", "dm", "dio", "coal", "stag"])
@pytest.mark.full
def test_recipes(paths: list[str], pairs: Pairs, recipe: str) -> None:
    with pario.Loader(paths, 5, recipe=recipe, options=SMALL, save_index=False) as loader:
        assert read(loader, pairs) == samples(pairs)


def test_the_recipe_that_reads_one_file(paths: list[str]) -> None:
    assert RECIPES["plain"].source == "per_rank"
    with pytest.raises(OptionError, match="reads one LMDB"):
        pario.Loader(paths, 5, recipe="plain")


def test_past_the_page_cache(paths: list[str], pairs: Pairs) -> None:
    try:
        reader = pario.Reader(paths, recipe=Recipe(fetch="direct"))
    except OptionError:
        pytest.skip("this file system has no O_DIRECT")
    with reader:
        assert [bytes(record) for record in reader.read(range(len(pairs)))] == [value for _, value in pairs]


# -- errors ------------------------------------------------------------------------------------------------------------


def copied(folder: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(folder, tmp_path / "sets", ignore=shutil.ignore_patterns("*.index"))
    return paths_in(tmp_path / "sets")


def test_a_file_is_missing(paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no such file.*gone\.lmdb"):
        pario.Loader([*paths, tmp_path / "gone.lmdb"], 5)


def test_a_number_is_missing(folder: Path, tmp_path: Path) -> None:
    os.remove(copied(folder, tmp_path)[1])
    with pytest.raises(MissingError, match=r"files 0 to 2 is missing \[path '.*data\.0001\.lmdb'"):
        pario.Loader(f"{tmp_path}/sets/data.%04d.lmdb", 5)
    with pytest.raises(MissingError, match="no file has a name like this"):
        pario.Loader(f"{tmp_path}/sets/data.%d.lmdb", 5)
    with pytest.raises(MissingError, match="no file has a name like this"):
        pario.Loader(f"{tmp_path}/sets/other*.lmdb", 5)


def test_numbers_come_in_their_order(folder: Path, tmp_path: Path) -> None:
    for number, k in ((9, 0), (10, 1), (11, 2)):
        shutil.copy(folder / name(k), tmp_path / f"{number}.lmdb")
    with pario.Reader(f"{tmp_path}/%d.lmdb", save_index=False) as reader:
        assert [os.path.basename(path) for path in reader.index.files.paths] == ["9.lmdb", "10.lmdb", "11.lmdb"]
        assert [stop - start for _, start, stop, *_ in reader.index.files.stretches] == [n + 1 for n, _ in SHAPES]


def test_a_path_that_exists_is_no_pattern(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / name(1), tmp_path / "a%d[0]*.lmdb")
    with pario.Reader(f"{tmp_path}/a%d[0]*.lmdb", save_index=False) as reader:
        assert len(reader) == SHAPES[1][0] + 1


def test_a_file_is_named_twice(paths: list[str], tmp_path: Path) -> None:
    os.symlink(paths[0], tmp_path / "same.lmdb")
    with pytest.raises(OptionError, match=r"named twice, as .*data\.0000\.lmdb and as .*same\.lmdb"):
        pario.Loader([*paths, tmp_path / "same.lmdb"], 5)


def test_a_file_is_empty(paths: list[str], tmp_path: Path) -> None:
    with lmdb.open(os.fspath(tmp_path / "empty.lmdb"), subdir=False) as env, env.begin(write=True):
        pass
    with pytest.raises(ParioError, match=r"empty\.lmdb"):
        pario.Loader([*paths, tmp_path / "empty.lmdb"], 5)


def test_a_file_is_no_lmdb(folder: Path, tmp_path: Path) -> None:
    mine = copied(folder, tmp_path)
    Path(mine[1]).write_bytes(b"x" * 20_000)
    with pytest.raises(FileError, match=r"data\.0001\.lmdb"):
        pario.Loader(tmp_path / "sets", 5)


def test_what_no_paths_are(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="list of paths is empty"):
        pario.Loader([], 5)
    with pytest.raises(TypeError):
        pario.Loader([3], 5)  # type: ignore[list-item]
    with pytest.raises(MissingError, match=r"has no data\.mdb; it is empty"):
        pario.Loader(tmp_path, 5)


@pytest.mark.parametrize("save_index", [False, True])
def test_damage_names_the_file(folder: Path, tmp_path: Path, save_index: bool) -> None:
    mine = copied(folder, tmp_path)
    with pario.Reader(mine, save_index=save_index) as reader:
        record = int(np.flatnonzero(reader.index.extents["nbytes"][EDGES[2] :] > 5000)[0])
    with pario.Reader(mine[2], save_index=False) as reader:
        offset = int(reader.index.extents["offset"][record])
    break_record(mine[2], offset)
    with pario.Reader(mine, save_index=save_index) as reader, pytest.raises(CorruptedError) as caught:
        reader.read(range(EDGES[2] + record + 1))
    error = caught.value
    where = (error.path, error.page, error.record)
    assert where == (mine[2], (offset - 16) // reader.snapshot.page_size, EDGES[2] + record)


def test_a_record_that_cannot_be_decoded(paths: list[str], pairs: Pairs) -> None:
    def decoder(value: bytes) -> np.ndarray:
        if len(value) > 1000:
            raise ValueError("too long")
        return np.zeros(1)

    wrong = pytest.raises(DecodeError, match=r"too long.*data\.0002\.lmdb")
    with pario.Loader(paths, 5, decoder, select=range(EDGES[1], len(pairs))) as loader, wrong:
        list(loader)


# -- what a state says -------------------------------------------------------------------------------------------------


def test_budgets(paths: list[str], pairs: Pairs) -> None:
    with pario.Loader(paths, pario.Budget(bytes=20_000), shuffle="global") as loader:
        assert sorted(read(loader, pairs)) == samples(pairs)


def test_checksums_are_of_one_file(paths: list[str]) -> None:
    with pytest.raises(OptionError, match="verify=True reads one LMDB, and 3 files were given"):
        pario.Loader(paths, 5, verify=True)


def test_the_order_of_the_files_is_part_of_the_state(paths: list[str], pairs: Pairs) -> None:
    with pario.Loader(paths, 5) as loader:
        read(loader, pairs, 3)
        state = loader.state_dict()
    with pario.Loader(paths, 7) as loader:
        loader.load_state_dict(state)
        assert read(loader, pairs) == samples(pairs)[15:]
    for others in (paths[::-1], paths[:2]):
        with pario.Loader(others, 5) as loader, pytest.raises(StateError, match="fingerprint"):
            loader.load_state_dict(state)


def test_tiers(paths: list[str], pairs: Pairs, tmp_path: Path) -> None:
    """Each byte leaves the files once; a disk tier holds all of them for the next job."""
    for tiers in ((pario.Tier("memory"),), (pario.Tier(str(tmp_path / "disk")),)):
        for first in (True, False):
            with pario.Loader(paths, 5, shuffle="global", options=replace(SMALL, tiers=tiers)) as loader:
                for _ in range(2):
                    assert sorted(read(loader, pairs)) == samples(pairs)
                asked = loader.stats()["store_bytes"]
            assert (asked > 0) == (first or tiers[0].where == "memory")


# -- mixtures ----------------------------------------------------------------------------------------------------------


def sources(ids: list[int]) -> list[int]:
    return (np.searchsorted(EDGES, ids, side="right") - 1).tolist()


@pytest.mark.parametrize(("shuffle", "recipe"), [(False, "ring"), ("global", "ring"), ("global", "auto")])
def test_a_mixture(paths: list[str], pairs: Pairs, shuffle: Any, recipe: str) -> None:
    weights = [2, 1, 1]
    given: dict[str, Any] = {"shuffle": shuffle, "weights": weights, "recipe": recipe, "options": SMALL}
    with pario.Loader(paths, 7, **given) as loader:
        first = loader.peek().ids.tolist()
        whole = [read(loader, pairs) for _ in range(3)]
        assert whole[0][:7] == first
        assert loader.records == len(samples(pairs))
    for ids in whole:
        assert len(ids) == len(samples(pairs))
        drawn = np.cumsum(np.array(sources(ids))[:, None] == np.arange(3), axis=0)
        share = np.arange(1, len(ids) + 1)[:, None] * np.array(weights) / 4
        assert (np.abs(drawn - share) < 1).all()
    # One pass through a source after the other, over the epochs, without the meta records.
    for k in range(3):
        mine = [i for ids in whole for i in ids if EDGES[k] <= i < EDGES[k + 1]]
        for at in range(0, len(mine) - SHAPES[k][0] + 1, SHAPES[k][0]):
            assert sorted(mine[at : at + SHAPES[k][0]]) == [i for i in samples(pairs) if sources([i]) == [k]]
    if shuffle:
        assert whole[0] != whole[1]


def test_a_mixture_of_sources_of_several_files(folder: Path, paths: list[str], pairs: Pairs) -> None:
    with pario.Loader([paths[2], f"{folder}/data.000[01].lmdb"], 7, weights=(0.1, 0.9), select="all") as loader:
        ids = np.concatenate([batch.ids for batch in loader])
        assert loader.index.files.of(ids).max() == 2
        drawn = int((loader.index.files.of(ids) == 0).sum())
    assert abs(drawn - len(pairs) / 10) < 1


def test_a_mixture_goes_on(paths: list[str], pairs: Pairs) -> None:
    given: dict[str, Any] = {"shuffle": "global", "seed": 4, "weights": [0.5, 0.25, 0.25], "options": SMALL}
    with pario.Loader(paths, 6, **given) as loader:
        read(loader, pairs)
        begun = read(loader, pairs, 4)
        state = loader.state_dict()
    with pario.Loader(paths, 6, **given) as loader:
        loader.set_epoch(1)
        whole = read(loader, pairs)
    with pario.Loader(paths, 9, **given) as loader:
        loader.load_state_dict(state)
        assert begun + read(loader, pairs) == whole
    for weights in ([0.5, 0.3, 0.2], None):
        other = pario.Loader(paths, 6, **{**given, "weights": weights})
        with other as loader, pytest.raises(StateError, match="mixture"):
            loader.load_state_dict(state)


def test_what_no_mixture_is(paths: list[str]) -> None:
    with pytest.raises(OptionError, match="weights has 2 numbers for 3 paths"):
        pario.Loader(paths, 5, weights=[1, 2])
    with pytest.raises(OptionError, match="weights must be numbers above 0"):
        pario.Loader(paths, 5, weights=[1, 2, 0])
    with pytest.raises(OptionError, match='shuffle=False or "global"'):
        pario.Loader(paths, 5, weights=[1, 2, 3], shuffle="block")
    with pytest.raises(OptionError, match="counts each record once, and weights= draws some of them several times"):
        pario.Loader(paths, pario.Budget(bytes=1 << 20), weights=[1, 2, 3])
    with pytest.raises(OptionError, match="no record of source 1"):
        pario.Loader(paths, 5, weights=[1, 2, 3], select=range(20))
    with pario.Loader(paths[:1], 5, weights=[3]) as loader, pario.Loader(paths[0], 5) as same:
        assert loader.state_dict() == same.state_dict()
