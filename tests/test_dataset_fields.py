"""Samples of several records on one rank: layouts of public datasets, all orders, missing records, selections, states.
The oracle is py-lmdb."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pytest
from datasets import truth_of
from flips import checksums, flip

import pario
from pario.errors import DecodeError, OptionError, StateError

N = 60
SHUFFLES = [False, "global", "block"]
#: the others run with `-m full`
FULL = pytest.mark.full
QUICK = [pytest.param(False, marks=FULL), pytest.param("global", marks=FULL), "block"]
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=16 << 10, mix_blocks=4)


class Layout(NamedTuple):
    """One dataset: its records, what to write as fields=, and the key of each field by sample number.

    select : None, or what must be said beside the fields
    numbers : the samples
    """

    records: list[tuple[bytes, bytes]]
    fields: dict[str, Any]
    keys: dict[str, Callable[[int], bytes]]
    numbers: list[int]
    select: Any = None


def value(key: bytes, most: int = 3000) -> bytes:
    """The content of a record, of any size, from its key."""
    draw = np.random.default_rng(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big"))
    return key + draw.bytes(int(draw.integers(1, most)))


def made(makers: dict[str, Callable[[int], bytes]], numbers: list[int], *others: bytes) -> list[tuple[bytes, bytes]]:
    """Sample by sample, as writers do."""
    keys = [make(i) for i in numbers for make in makers.values()]
    return [(key, value(key)) for key in (*keys, *others)]


def by_template(*others: bytes, numbers: list[int], **templates: str) -> Layout:
    makers = {name: (lambda i, t=t: (t % i if "%" in t else t.format(i)).encode()) for name, t in templates.items()}
    fields = {name: (t, None) for name, t in templates.items()}
    return Layout(made(makers, numbers, *others), fields, makers, numbers)


def stylegan() -> Layout:
    keys: dict[str, Callable[[int], bytes]] = {f"r{r}": (lambda i, r=r: b"%d-%05d" % (r, i)) for r in (8, 16, 128)}
    two = {name: (f"{name[1:]}-{{:05d}}".encode(), None) for name in ("r16", "r128")}
    return Layout(made(keys, list(range(N)), b"length"), two, {name: keys[name] for name in two}, list(range(N)))


def hashed() -> Layout:
    makers: dict[str, Callable[[int], bytes]] = {
        "x": lambda i: hashlib.sha1(b"x%d" % i).hexdigest().encode(),
        "y": lambda i: b"y" + hashlib.sha1(b"y%d" % i).digest(),
    }
    numbers = list(range(7, 7 + N))
    return Layout(made(makers, numbers), {n: (f, None) for n, f in makers.items()}, makers, numbers, range(7, 7 + N))


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "clovaai": lambda: by_template(
        b"num-samples", numbers=list(range(1, N + 1)), image="image-%09d", label="label-%09d"
    ),
    "stylegan": stylegan,
    "unpadded": lambda: by_template(b"__len__", numbers=list(range(N)), x="x%d", y="y{:d}", z="z{:d}"),
    "suffixes": lambda: by_template(numbers=list(range(3, 3 + 2 * N, 2)), img="%06d.img", cls="%06d.cls"),
    "one of two": lambda: by_template(b"a", b"zz", numbers=list(range(N)), label="label-%04d"),
    "functions": hashed,
}


def write(path: Path, records: list[tuple[bytes, bytes]]) -> str:
    with lmdb.open(str(path), map_size=1 << 26, sync=False) as env:
        for begin in range(0, len(records), 50):
            with env.begin(write=True) as txn:
                for key, content in records[begin : begin + 50]:
                    txn.put(key, content)
    return str(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Layout]]:
    known: dict[str, tuple[str, Layout]] = {}

    def get(name: str) -> tuple[str, Layout]:
        if name not in known:
            layout = LAYOUTS[name]()
            known[name] = write(tmp_path_factory.mktemp("fields") / "x", layout.records), layout
        return known[name]

    return get


def open_loader(path: str, layout: Layout, batch_size: int = 8, **more: Any) -> pario.Loader:
    given: dict[str, Any] = {"fields": layout.fields, "select": layout.select, "options": SMALL, "comm": "self", **more}
    return pario.Loader(path, batch_size, **given)


def epoch(loader: pario.Loader, path: str, layout: Layout) -> list[int]:
    """The numbers of the samples in the order in which they come; all their records are those that py-lmdb finds."""
    numbers = []
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        for batch in loader:
            assert list(batch.keys()) == list(layout.fields)
            for row, number in enumerate(batch.ids.tolist()):
                numbers.append(number)
                for name, make in layout.keys.items():
                    assert batch[name][row] == txn.get(make(number)), (name, number)
    return numbers


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("batch_size", [25, pytest.param(60, marks=FULL)])
def test_steps_larger_than_a_slot(
    written: Callable[[str], tuple[str, Layout]], shuffle: Any, batch_size: int
) -> None:
    path, layout = written("clovaai")
    with open_loader(path, layout, batch_size, shuffle=shuffle) as loader:
        assert sorted(epoch(loader, path, layout)) == layout.numbers


@pytest.mark.usefixtures("through_the_ring")
@pytest.mark.parametrize("name", ["apart", "in turn"])
def test_blocks_are_read_in_long_stretches(tmp_path: Path, name: str) -> None:
    """Also where the labels lie far from the images."""
    layout = by_template(numbers=list(range(800)), image="image-%09d", label="label-%09d")
    records = sorted(layout.records) if name == "apart" else layout.records
    path = write(tmp_path / "x", [(key, data[:700]) for key, data in records])
    options = pario.Options(block_bytes=128 << 10, mix_blocks=4)
    with open_loader(path, layout, shuffle="block", options=options, on_error="skip") as loader:
        taken = [i for batch in loader for i in batch.ids.tolist()]
        assert sorted(taken) == layout.numbers
        assert loader.stats()["reads"] < 40


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        pytest.param(name, shuffle, marks=() if i % 3 == j or name == "clovaai" else FULL)
        for i, name in enumerate(LAYOUTS)
        for j, shuffle in enumerate(SHUFFLES)
    ],
)
def test_every_sample_comes_once(
    written: Callable[[str], tuple[str, Layout]], name: str, shuffle: Any
) -> None:
    path, layout = written(name)
    with open_loader(path, layout, shuffle=shuffle) as loader:
        assert loader.records == len(layout.numbers)
        assert len(loader) == -(-len(layout.numbers) // 8)
        first, second = epoch(loader, path, layout), epoch(loader, path, layout)
    assert sorted(first) == sorted(second) == layout.numbers
    if shuffle:
        assert first != second
    else:  # by the keys of the first field
        make = next(iter(layout.keys.values()))
        assert first == sorted(layout.numbers, key=make)


def test_texts_in_keys(tmp_path: Path) -> None:
    names = [b"%03d_\xc3\xa9" % (i * 7919 % 1000) for i in range(40)]
    records = [(b"structure:" + n, value(n)) for n in names] + [(b"mol:" + n, value(b"m" + n)) for n in names[1:]]
    path = write(tmp_path / "x", [*records, (b"_type", b"1"), (b"structure", b"no")])
    whole = dict(records)
    fields = {"s": ("structure:{}", None), "m": (lambda name: b"mol:" + name, None)}
    with pario.Loader(path, 8, fields=fields, on_error="skip", shuffle="global", comm="self") as loader:
        taken = [(i, s, m) for batch in loader for i, s, m in zip(batch.ids, *batch, strict=True)]
        keys = loader.keys([i for i, *_ in taken])
        assert loader.stats()["bad"] == {f"sample n has no record 'mol:{names[0].decode()[3:]}' (field 'm')".replace(
            "mol:", "mol:n"): 1}
        with pytest.raises(OptionError, match="there is no sample 40"):
            loader.keys([40])
    assert sorted(i for i, *_ in taken) == sorted(set(range(40)) - {sorted(names).index(names[0])})
    for key, (i, s, m) in zip(keys, taken, strict=True):
        assert key == b"structure:" + sorted(names)[i]
        assert s == whole[key]
        assert m == whole[key.replace(b"structure", b"mol")]


def with_holes(tmp_path: Path) -> tuple[str, Layout]:
    layout = LAYOUTS["clovaai"]()
    gone = [b"label-%09d" % i for i in (5, 6, 41)]
    return write(tmp_path / "x", [(key, data) for key, data in layout.records if key not in gone]), layout


@pytest.mark.parametrize("shuffle", QUICK)
@pytest.mark.parametrize("policy", ["raise", "skip", "substitute"])
def test_a_missing_record_makes_a_bad_sample(
    tmp_path: Path, policy: Any, shuffle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path, layout = with_holes(tmp_path)
    with open_loader(path, layout, on_error=policy, shuffle=shuffle) as loader:
        assert "3 of 60 samples have no record of field 'label'; the first of them is sample 5" in caplog.text
        if policy == "raise":
            said = r"sample \d+ has no record 'label-0000000\d\d' \(field 'label'\).*on_error=\"skip\""
            with pytest.raises(DecodeError, match=f"(?s){said}"):
                epoch(loader, path, layout)
            return
        numbers = epoch(loader, path, layout)
        assert set(numbers) == set(layout.numbers) - {5, 6, 41}
        assert len(numbers) == (57 if policy == "skip" else 60)
        assert loader.skipped == 3
        assert loader.stats()["bad"] == {"sample n has no record 'label-n' (field 'label')": 3}


def test_several_files(tmp_path: Path) -> None:
    """Each sample has the records of its own file; a function says no numbers of several."""
    layout = LAYOUTS["clovaai"]()
    paths = [write(tmp_path / name, layout.records) for name in "xy"]
    with pario.Loader(paths, 8, fields={"label": ("label-%09d", None)}, shuffle="global", comm="self") as loader:
        assert loader.records == 2 * len(layout.numbers)
        numbers = [number for batch in loader for number in batch.ids.tolist()]
        assert sorted(numbers) == sorted(2 * list(layout.numbers))
    with pytest.raises(OptionError, match="a function for the first field's keys needs one file, and 2 were given"):
        pario.Loader(paths, 8, fields={"label": (lambda n: b"label-%09d" % n, None)}, select=[1], comm="self")


def test_a_flipped_bit_makes_a_bad_sample(tmp_path: Path) -> None:
    """Whichever record of it has one."""
    path, layout = with_holes(tmp_path)
    checksums(path)
    truth = truth_of(path)
    bad = {b"image-000000003": 3, b"label-000000050": 50, b"image-000000007": 7, b"label-000000007": 7}
    ids = [i for i, (key, _) in enumerate(truth) if key in bad]
    assert len(ids) == 4
    flip(path, [held for _, held in truth], ids)
    with open_loader(path, layout, on_error="skip", verify=True) as loader:
        assert set(layout.numbers) - set(epoch(loader, path, layout)) == {5, 6, 41, 3, 50, 7}
        assert loader.skipped == 6


def test_no_decoder_sees_what_stands_in_for_a_missing_record(tmp_path: Path) -> None:
    path, _ = with_holes(tmp_path)
    seen: list[bytes] = []
    fields = {"image": ("image-%09d", None), "label": ("label-%09d", lambda value, key: seen.append(key) or len(value))}
    with pario.Loader(path, 20, fields=fields, on_error="skip", comm="self") as loader:
        numbers = [i for batch in loader for i in batch.ids.tolist()]
    assert sorted(set(seen)) == [b"label-%09d" % i for i in numbers]


def test_a_missing_record_of_the_first_sample(tmp_path: Path) -> None:
    """The decoders learn from the first one."""
    layout = LAYOUTS["clovaai"]()
    path = write(tmp_path / "x", [one for one in layout.records if one[0] != b"label-000000001"])
    with pytest.raises(DecodeError, match="sample 1 has no record 'label-000000001'"):
        open_loader(path, layout)
    with open_loader(path, layout, on_error="skip") as loader:
        assert epoch(loader, path, layout) == layout.numbers[1:]


def test_a_record_that_cannot_be_read_makes_a_bad_sample(tmp_path: Path) -> None:
    layout = LAYOUTS["clovaai"]()
    records = {**dict(layout.records), b"label-000000007": b"\xff"}
    path = write(tmp_path / "x", [(k, v if k.startswith(b"im") or v == b"\xff" else k) for k, v in records.items()])
    fields = {"image": ("image-%09d", None), "label": ("label-%09d", pario.decode.Text())}
    with pario.Loader(path, 16, fields=fields, on_error="skip", comm="self") as loader:
        numbers = [i for batch in loader for i in batch.ids.tolist()]
        assert numbers == [*range(1, 7), *range(8, N + 1)]
        assert next(iter(loader.stats()["bad"])).startswith("sample n, field 'label': ")
    with pario.Loader(path, 16, fields=fields, comm="self") as loader, pytest.raises(DecodeError, match="sample 7, fi"):
        list(loader)


@pytest.mark.parametrize(
    ("select", "right"),
    [
        (range(10, 20), range(10, 20)),
        (range(20, 10, -2), range(12, 21, 2)),
        ([60, 1, 33], (1, 33, 60)),
        (slice(-5, None), range(56, 61)),
        (b"image-00000001", range(10, 20)),
        (re.compile(rb".*[05]$"), range(5, 61, 5)),
        (lambda key: key.endswith(b"7"), range(7, 61, 10)),
        ("all", range(1, 61)),
    ],
)
def test_select_chooses_samples(
    written: Callable[[str], tuple[str, Layout]], select: Any, right: Any
) -> None:
    path, layout = written("clovaai")
    with open_loader(path, layout, select=select) as loader:
        assert epoch(loader, path, layout) == list(right)


def test_a_split_of_the_first_records_divides_the_samples(written: Callable[[str], tuple[str, Layout]]) -> None:
    path, layout = written("clovaai")
    for by in ("id", "key"):
        parts = pario.split(path, (0.75, 0.25), seed=1, by=by, select=b"image-", comm="self")  # type: ignore[arg-type]
        found = []
        for part in parts:
            with open_loader(path, layout, select=part, shuffle="global") as loader:
                found.append(epoch(loader, path, layout))
        assert sorted(found[0] + found[1]) == layout.numbers
        if by == "id":
            assert len(found[0]) == 45


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"select": [0, 1]}, "select has numbers that no sample has: 0; there are 60 samples, of numbers 1 to 60"),
        ({"select": range(60, 63)}, "no sample has: 61, 62"),
        ({"select": b"label-"}, "picks none of the 60 samples"),
        ({"select": slice(5, 5)}, "picks none of the 60 samples"),
        ({"fields": {"a": ("picture-%09d", None)}}, "no key fits 'picture-%09d', the template of field 'a'"),
        ({"fields": {"a": ("image-%08d", None)}}, "no key fits"),
        ({"fields": {"a": ("image-%d", None)}}, "no key fits"),
        ({"fields": {"a": (lambda i: b"image-%09d" % i, None)}}, "which numbers are there"),
        ({"fields": {"a": (lambda i: b"image-%09d" % i, None)}, "select": [60, 61]}, "sample 61, whose first record"),
        ({"fields": {"a": (lambda i: b"image-000000001", None)}, "select": [1, 2]}, "1 and 2 have the same first"),
        ({"fields": {"a": (lambda i: i, None)}, "select": [1, 2]}, "returned 1 for 1; a key is bytes"),
        ({"fields": {}}, "fields must be a dict"),
        ({"fields": {"a": "image-%09d"}}, r"field 'a' must be \(template or function, decoder\)"),
        ({"fields": {"a": (7, None)}}, "a template or a function of the number"),
        ({"fields": {"a.b": ("image-%09d", None)}}, "a text without a dot"),
        ({"fields": {"a": ("image-%09d", 5)}}, "field 'a': decoder must be"),
        ({"fields": {"a": ("image-%09d", pario.decode.Raw())}}, "field 'a': Raw.. puts the bytes of a whole batch"),
        ({"decoder": pario.decode.Text()}, "exclude each other"),
        ({"recipe": "plain"}, "for studies, and knows no fields="),
        ({"batch_size": pario.Budget(bytes=1 << 20)}, "counts single records, and with fields= a sample has several"),
    ],
)
def test_what_fields_cannot_be(
    written: Callable[[str], tuple[str, Layout]], more: dict[str, Any], message: str
) -> None:
    path, layout = written("clovaai")
    with pytest.raises(OptionError, match=message):
        open_loader(path, layout, **more)


def test_duplicates_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x"), max_dbs=1) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for i in range(4):
                txn.put(b"a%d" % (i // 2), b"%d" % i)
    with pytest.raises(OptionError, match="one record per key"):
        pario.Loader(str(tmp_path / "x"), 2, fields={"a": ("a%d", None)}, db="d", comm="self")


def test_integer_and_reverse_keys(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x"), max_dbs=2) as env:
        numbers, ends = env.open_db(b"n", integerkey=True), env.open_db(b"r", reverse_key=True)
        with env.begin(write=True) as txn:
            for i in range(50):
                txn.put(i.to_bytes(4, "little"), b"%d" % i, db=numbers)
                for letter in b"xy":
                    txn.put(b"%c%02d%c" % (letter, i, letter), b"%d" % (i + letter), db=ends)
    twice = {"a": (lambda i: i.to_bytes(4, "little"), None), "b": (lambda i: (i + 1).to_bytes(4, "little"), None)}
    with pario.Loader(str(tmp_path / "x"), 8, fields=twice, select=range(0, 50, 2), db="n", comm="self") as loader:
        pairs = [(int(a), int(b)) for batch in loader for a, b in zip(*batch, strict=True)]
    assert pairs == [(i, i + 1) for i in range(0, 50, 2)]
    fields = {"x": ("x%02dx", None), "y": ("y%02dy", None)}
    with pario.Loader(str(tmp_path / "x"), 8, fields=fields, db="r", comm="self") as loader:
        taken = [(int(i), int(x), int(y)) for batch in loader for i, x, y in zip(batch.ids, *batch, strict=True)]
    assert sorted(taken) == [(i, i + 120, i + 121) for i in range(50)]


@pytest.mark.parametrize("shuffle", QUICK)
def test_a_state_goes_on_where_it_was(written: Callable[[str], tuple[str, Layout]], shuffle: Any) -> None:
    path, layout = written("clovaai")
    with open_loader(path, layout, shuffle=shuffle) as loader:
        whole = epoch(loader, path, layout)
        loader.set_epoch(0)
        looked = loader.peek()
        loop = iter(loader)
        first = next(loop)
        assert looked.ids.tolist() == first.ids.tolist() == whole[:8]
        assert looked["label"].tolist() == first["label"].tolist()
        state = json.loads(json.dumps(loader.state_dict()))
    for batch_size in (8, 11):
        with open_loader(path, layout, batch_size, shuffle=shuffle) as loader:
            loader.load_state_dict(state)
            rest = epoch(loader, path, layout)
        assert sorted(rest) == sorted(whole[8:])
        assert rest == whole[8:] or batch_size == 11  # other steps are arranged in another way
    others = [{"select": range(1, N + 1, 2)}, {"fields": {"image": layout.fields["image"]}}]
    for other in others:
        with open_loader(path, layout, **{**other, "shuffle": shuffle}) as loader, pytest.raises(StateError):
            loader.load_state_dict(state)


def test_columns_and_what_decoders_get(written: Callable[[str], tuple[str, Layout]]) -> None:
    path, layout = written("clovaai")
    seen: dict[str, list[tuple[int, bytes, float]]] = {"image": [], "label": []}

    def look(name: str) -> Any:
        def decode(value: bytes, key: bytes, id: int, rng: np.random.Generator) -> Any:
            drawn = rng.random()
            seen[name].append((id, key, drawn))
            assert value.startswith(key)
            return (np.frombuffer(value[:5], "u1"), id) if name == "image" else {"n": len(value), "x": {"y": drawn}}

        return decode

    tokens = pario.decode.Function(lambda value: np.frombuffer(value, "u1"), ragged="flat")
    fields: dict[str, Any] = {name: (f"{name}-%09d", look(name)) for name in seen}
    fields |= {"tokens": ("label-{:09d}", tokens), "text": ("label-%09d", None)}
    with pario.Loader(path, 16, fields=fields, shuffle="global", seed=3, comm="self") as loader:
        seen["image"].clear()
        seen["label"].clear()
        batches = list(loader)
    names = ["image", "image.label", "label.n", "label.x.y", "tokens", "tokens_offsets", "text"]
    assert all(list(batch.keys()) == names for batch in batches)
    for batch in batches:
        assert batch["image"].dtype == np.uint8
        assert batch["image"].shape == (len(batch.ids), 5)
        assert batch["image.label"].tolist() == batch.ids.tolist()
        for i, text in enumerate(batch["text"]):
            begin, stop = batch["tokens_offsets"][i : i + 2]
            assert batch["tokens"][begin:stop].tobytes() == text
            assert batch["label.n"][i] == len(text)
    assert sorted(i for i, *_ in seen["image"]) == layout.numbers
    for name, ones in seen.items():
        assert all(key == f"{name}-{i:09d}".encode() for i, key, _ in ones)
    # One sample, one stream of random numbers: a picture and its mask are cropped alike.
    drawn = {i: number for i, _, number in seen["image"]}
    assert drawn == {i: number for i, _, number in seen["label"]}
    assert len(set(drawn.values())) == N


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, _ = pytest.importorskip("simplejpeg"), pytest.importorskip("cv2")
    jpeg = codec.encode_jpeg(np.full((300, 280, 3), 90, np.uint8))
    keys = [(b"image-%09d" % i, jpeg) for i in range(1, 71)] + [(b"label-%09d" % i, b"w%d" % i) for i in range(1, 71)]
    write(tmp_path / "lmdb_train", [*keys, (b"num-samples", b"70")])
    page = (Path(__file__).parent.parent / "docs" / "selections.md").read_text()
    blocks = [one for one in re.findall(r"(?ms)^```python\n(.*?)^```$", page) if "fields=fields" in one]
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    last = names["batch"]
    assert last["image"].shape == (6, 224, 224, 3)
    assert last["image"].dtype == np.uint8
    assert last["label"].tolist() == [f"w{i}" for i in last.ids.tolist()]


def test_two_arrays_of_one_name(written: Callable[[str], tuple[str, Layout]]) -> None:
    path, _ = written("clovaai")
    tokens = pario.decode.Function(lambda value: np.frombuffer(value, "u1"), ragged="flat")
    fields = {"a": ("image-%09d", tokens), "a_offsets": ("label-%09d", None)}
    with pytest.raises(OptionError, match="'a_offsets'"), pario.Loader(path, 4, fields=fields, comm="self") as loader:
        next(iter(loader))


def test_the_users_decoders_learn_nothing(written: Callable[[str], tuple[str, Layout]]) -> None:
    path, _ = written("clovaai")
    mine = pario.decode.Function(len)
    for _ in range(2):
        with pario.Loader(path, 4, fields={"n": ("image-%09d", mine)}, comm="self") as loader:
            assert loader.decoder.spec is not None
    assert mine.spec is None


def test_out_of_the_memory_tier(written: Callable[[str], tuple[str, Layout]]) -> None:
    path, layout = written("clovaai")
    options = pario.Options(tiers=(pario.Tier("memory", "auto"),))
    with open_loader(path, layout, shuffle="global", options=options) as loader:
        for _ in range(2):
            assert sorted(epoch(loader, path, layout)) == layout.numbers
        assert loader.stats()["staged"]


def test_records_that_are_in_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = LAYOUTS["clovaai"]()
    gone = b"image-000000003", b"image-000000060"
    path = write(tmp_path / "x", [one for one in layout.records if one[0] not in gone])
    with open_loader(path, layout) as loader:
        assert sorted(epoch(loader, path, layout)) == sorted(set(layout.numbers) - {3, 60})
    assert "2 records whose keys begin with 'label-' are in no sample: the first field, 'image'" in caplog.text
    caplog.clear()
    with open_loader(path, layout, select=slice(4)):
        assert not caplog.text


def test_no_missing_record_says_nothing(
    written: Callable[[str], tuple[str, Layout]], caplog: pytest.LogCaptureFixture
) -> None:
    path, layout = written("clovaai")
    with caplog.at_level(logging.WARNING, "pario"), open_loader(path, layout) as loader:
        assert loader.records == N
    assert not caplog.text
