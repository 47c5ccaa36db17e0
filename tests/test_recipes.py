"""Every recipe on one rank, over every kind of file; and what LMDBIO's own code could not do.

The truth is what py-lmdb's cursor reads. test_mpi_recipes.py has the ranks and nodes.
"""

import contextlib
import os
import shutil
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
import sidecars

import pario
from pario.errors import CorruptedError, FileError, OptionError, ParioError, PeerError, ReadError
from pario.fetch.mapped import MappedFetcher
from pario.fetch.resolve import open_dataset
from pario.locate.index import content_id_of
from pario.options import RECIPES
from pario.recipes.lmdbio import AskingReader
from pario.records import EXTENT

pytestmark = pytest.mark.usefixtures("grows")

SMALL = pario.Options(slot_bytes=256 << 10, slots=3, block_bytes=64 << 10, mix_blocks=4)
SIDECAR = [name for name, recipe in RECIPES.items() if recipe.locate == "sidecar" and recipe.source != "per_rank"]


def loader_of(path, batch_size, recipe, **more):
    return pario.Loader(path, batch_size, **{"options": SMALL, "recipe": recipe, **more})


def take(loader, values):
    """ids of one epoch, batch by batch; content checked"""
    seen = []
    for batch in loader:
        offsets = batch["offsets"]
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == values[i], f"record {i}"
        seen.append(batch.ids.tolist())
    return seen


@pytest.fixture(scope="module")
def one_large(tmp_path_factory):
    """Records of 1 KB, inserted in random order, the first one as large as the others; one 100 times as large."""
    path = str(tmp_path_factory.mktemp("one") / "x.lmdb")
    values = [np.random.default_rng(i).bytes(100_000 if i == 77 else 1000) for i in range(301)]
    with lmdb.open(path, map_size=1 << 26) as env:
        for part in np.array_split(np.random.default_rng(1).permutation(len(values)), 5):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%04d" % i, values[i])
    return path, values


@pytest.mark.parametrize("name", ["caffe_datum", "format_3", "variable_sizes", "small_records", "random_insertion"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_every_recipe_delivers_what_auto_delivers(dataset, name, shuffle):
    made = dataset(name)
    values = [value for _, value in made.truth]
    wanted = None
    for recipe in RECIPES:
        with loader_of(made.path, 60, recipe, shuffle=shuffle, seed=2, db=made.db) as loader:
            seen = take(loader, values)
        assert sorted(i for ids in seen for i in ids) == list(range(len(values)))
        wanted = wanted or seen
        assert seen == wanted, recipe


def test_plain_while_py_lmdb_has_the_file_open(one_large):
    path, _ = one_large
    held = os.path.join(path, "data.mdb")
    with (
        lmdb.open(held, subdir=False, readonly=True, lock=False),
        pytest.raises(FileError, match="once per process: close the other one, or use another recipe"),
    ):
        loader_of(path, 16, "plain")
    loader_of(path, 16, "plain").close()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_one_record_a_hundred_times_as_large(one_large, recipe, shuffle):
    """Epochs that wrap, a last batch that is not full, or that is left out."""
    path, values = one_large
    with loader_of(path, 16, recipe, shuffle=shuffle, save_index=False) as loader:
        for _ in range(2):
            seen = take(loader, values)
            assert [len(ids) for ids in seen] == [16] * 18 + [13]
            assert sorted(i for ids in seen for i in ids) == list(range(len(values)))
    with loader_of(path, 16, recipe, shuffle=shuffle, drop_last=True, save_index=False) as loader:
        assert [len(ids) for ids in take(loader, values)] == [16] * 18


@pytest.mark.parametrize("recipe", RECIPES)
def test_duplicates_and_named_databases(dataset, recipe):
    made = dataset("dupfixed")
    values = [value for _, value in made.truth]
    for shuffle in (False, "global"):
        with loader_of(made.path, 500, recipe, shuffle=shuffle, db=made.db) as loader:
            assert sorted(i for ids in take(loader, values) for i in ids) == list(range(len(values)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume(dataset, recipe):
    made = dataset("variable_sizes")
    values = [value for _, value in made.truth]
    for shuffle in (False, "block"):
        with loader_of(made.path, 32, recipe, shuffle=shuffle) as loader:
            whole = take(loader, values)
            for batch in loader:
                if batch.step == 3:
                    break
            state = loader.state_dict()
        with loader_of(made.path, 32, recipe, shuffle=shuffle) as loader:
            loader.load_state_dict(state)
            rest = take(loader, values)
            assert sorted(i for ids in rest for i in ids) == sorted(
                set(range(len(values))) - set(_first(made, shuffle))
            )
        if shuffle is False:
            assert rest == whole[4:]


def _first(made, shuffle):
    """What four batches of the second epoch have, by auto."""
    with loader_of(made.path, 32, "auto", shuffle=shuffle) as loader:
        loader.set_epoch(1)
        ids = [batch.ids.copy() for _, batch in zip(range(4), loader, strict=False)]
    return np.concatenate(ids).tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_decoders_with_threads_of_their_own(dataset, recipe):
    """A synchronous recipe prepares in the caller's thread; records are decoded in others all the same."""
    made = dataset("variable_sizes")
    sizes = [len(value) for _, value in made.truth]
    with loader_of(made.path, 32, recipe, decoder=lambda record: {"n": len(record)}) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch["n"].tolist() == [sizes[i] for i in batch.ids.tolist()]
        assert loader.stats()["ahead"] == RECIPES[recipe].ahead


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_truncated_file(dataset, tmp_path, recipe):
    made = dataset("caffe_datum")
    whole = shutil.copy(made.file, tmp_path / "data.mdb")
    os.truncate(whole, os.path.getsize(whole) * 2 // 3)
    with pytest.raises(FileError):
        loader_of(str(tmp_path), 64, recipe)


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.source != "per_rank"])
def test_a_file_that_is_cut_off_while_it_is_read(dataset, tmp_path, recipe):
    """LMDBIO, as everybody who maps the file, dies of SIGBUS; so does plain, which is LMDB itself."""
    made = dataset("caffe_datum")
    whole = shutil.copy(made.file, tmp_path / "data.mdb")
    with loader_of(str(tmp_path), 64, recipe) as loader:
        for batch in loader:
            if batch.step == 2:
                break
        loader.set_epoch(0)
        os.truncate(whole, os.path.getsize(whole) // 2)
        with pytest.raises((ReadError, CorruptedError)):  # noqa: PT012
            for batch in loader:
                del batch


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bit_flip_in_the_header_of_overflow_pages(dataset, tmp_path, recipe):
    """An error, or the right bytes all the same (LMDB does not look at this header)."""
    made = dataset("caffe_datum")
    values = [value for _, value in made.truth]
    file = shutil.copy(made.file, tmp_path / "data.mdb")
    with pario.Reader(file) as reader:
        offset = int(reader.index.extents["offset"][1234])
    with open(file, "r+b") as raw:
        raw.seek(offset - 16)
        byte = raw.read(1)[0]
        raw.seek(offset - 16)
        raw.write(bytes([byte ^ 0x10]))
    with loader_of(file, 64, recipe) as loader:
        if recipe == "plain":
            take(loader, values)
        else:
            with pytest.raises(CorruptedError) as caught:
                take(loader, values)
            assert caught.value.record == 1234


def forge(path, change):
    """Change the places in a side-car, and make its checksum right again."""

    def both(said, arrays):
        change(arrays["extents"].reshape(-1, 2))
        said["content_id"] = content_id_of(arrays["extents"].view(EXTENT))

    sidecars.edit(f"{path}.pario.index", both)


FORGERIES = {
    "eight bytes on": lambda e: e.__setitem__((slice(10, 20), 0), e[10:20, 0] + 8),
    "a page on": lambda e: e.__setitem__((slice(0, None), 0), e[:, 0] + 4096 - 24),
    "into the next page": lambda e: e.__setitem__((33, 0), e[33, 0] // 4096 * 4096 + 4096 + 40),
    "too long": lambda e: e.__setitem__((50, 1), e[50, 1] + 5000),
    "shorter": lambda e: e.__setitem__((slice(0, None, 7), 1), np.maximum(e[::7, 1] - 1, 0)),
}


@pytest.mark.parametrize("recipe", SIDECAR)
@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_side_car_delivers_no_garbage(tmp_path, recipe, how):
    """Its checksums are right and its fingerprint is; only the places are wrong."""
    values = [np.random.default_rng(i).bytes(700 + i % 50) for i in range(300)]
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i, value in enumerate(values):
            txn.put(b"k%d" % (1000 + i), value)
    with pario.Reader(tmp_path):
        pass
    forge(tmp_path / "data.mdb", FORGERIES[how])
    rebuilt = False
    with contextlib.suppress(CorruptedError), loader_of(tmp_path, 10, recipe, shuffle="global") as loader:
        rebuilt = loader.index.bytes_read > 0
        take(loader, values)
        assert rebuilt, "all records of an index that places some elsewhere"


@pytest.mark.parametrize("recipe", SIDECAR)
def test_a_forged_side_car_of_large_records(dataset, tmp_path, recipe, monkeypatch):
    monkeypatch.setattr("pario.locate.sidecar.probe", lambda pool, database, *_: database.snapshot.main)
    made = dataset("caffe_datum")
    file = shutil.copy(made.file, tmp_path / "data.mdb")
    with pario.Reader(file):
        pass
    forge(file, lambda e: e.__setitem__((slice(100, 200), 0), e[100:200, 0] + 16))
    with pytest.raises(CorruptedError, match="page"), loader_of(file, 64, recipe) as loader:  # noqa: PT012
        for batch in loader:
            del batch


def test_plain_says_what_it_cannot_open(dataset):
    made = dataset("caffe_datum")
    with (
        lmdb.open(made.path, readonly=True, lock=False),
        pytest.raises(FileError, match="py-lmdb cannot open it"),
    ):
        loader_of(made.path, 8, "plain")


def test_an_unknown_recipe(dataset):
    with pytest.raises(OptionError, match="recipe must be one of auto, ring, plain, lmm"):
        pario.Loader(dataset("caffe_datum").path, 8, recipe="magic")
    with pytest.raises(OptionError, match="recipe must be one of auto, ring, plain, lmm"):
        pario.Reader(dataset("caffe_datum").path, recipe="magic")


def test_reader_knows_the_recipes_too(dataset):
    made = dataset("variable_sizes")
    for recipe in RECIPES:
        with pario.Reader(made.path, recipe=recipe, db=made.db) as reader:
            records = reader.read([5, 3, 1199])
            assert [bytes(record) for record in records] == [made.truth[i][1] for i in (5, 3, 1199)]


def test_dio_and_lmm_leave_no_side_car(dataset, tmp_path):
    made = dataset("caffe_datum")
    file = shutil.copy(made.file, tmp_path / "data.mdb")
    for recipe in ("lmm", "dm", "dio"):
        with loader_of(file, 100, recipe) as loader:
            for batch in loader:
                del batch
        assert os.listdir(tmp_path) == ["data.mdb"], recipe
    with pario.Reader(file):
        pass
    with loader_of(file, 100, "dio") as loader:  # nor use one that is there
        assert loader.index.sidecar is None
        assert loader.index.bytes_read > 0


def test_spans_and_steps_per_read(dataset):
    """dio reads once per step, coal several steps at once; both whole stretches of the file."""
    made = dataset("caffe_datum")
    reads = {}
    for recipe in ("dio", "coal"):
        with loader_of(made.path, 35, recipe) as loader:
            for batch in loader:
                del batch
            stats = loader.stats()
        reads[recipe] = stats["reads"]
        assert stats["bytes_read"] < 1.02 * os.path.getsize(made.file)
        assert stats["slots"] == 1
    # 100 steps, and the few reads more where a value took a freed page of an earlier commit
    assert 100 <= reads["dio"] <= 130
    assert reads["coal"] <= 80


def test_a_reader_that_failed_has_not_just_left():
    """It posts its error and leaves between the two looks of a rank that waits for it: that rank tells the error."""
    failed = [None, PeerError("disk is gone")]

    def check():
        if failed and (error := failed.pop(0)):
            raise error

    waiting = AskingReader.__new__(AskingReader)
    waiting._ring = SimpleNamespace(has_left=lambda rank: True, full_slots=lambda group: 0)
    with pytest.raises(PeerError, match="disk is gone"):
        waiting._check_reader(0, check)
    with pytest.raises(ParioError, match="left the loop before"):
        waiting._check_reader(0, check)


def test_the_mapping_notices_a_cut_before_it_is_touched(dataset, tmp_path):
    made = dataset("caffe_datum")
    file = shutil.copy(made.file, tmp_path / "data.mdb")
    fetcher = open_dataset(file, MappedFetcher)
    size = fetcher.nbytes
    os.truncate(file, size - 4096)
    reads = np.array([(size - 8192, 8192)], EXTENT)
    with pytest.raises(ReadError, match="ended early: 4,096 of 8,192"):
        fetcher.read(reads, np.empty(8192, np.uint8), np.zeros(1, np.int64))
    fetcher.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "pool"},
        {"locate": "guess"},
        {"fetch": "mmap"},
        {"stagger": -1},
        {"source": "synchronous", "locate": "cursor", "stagger": 2},
        {"source": "synchronous", "locate": "speculate", "span": True},
    ],
    ids=str,
)
def test_what_is_no_recipe(wrong: dict) -> None:
    with pytest.raises(OptionError):
        pario.options.Recipe(**wrong)
