"""The command line, against what py-lmdb and numpy say about the same files; an error is one line, no traceback."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("tqdm")

from caffe2_message import tensor_protos
from launch import run_job

import pario
from pario.cli import main
from pario.commands.guess import guess
from pario.commands.screen import screen
from pario.errors import ParioError
from pario.options import RECIPES

ROOT = Path(__file__).parents[1]
PAGE = 4096
OVERFLOW = 0x04
LEAF = 0x02


def datum(pixels: bytes, label: int) -> bytes:
    """1 x 8 x 8; written by hand, so that no encoder of pario is trusted."""
    return b"\x08\x01\x10\x08\x18\x08\x22\x40" + pixels + b"\x28" + bytes([label])


class Trap:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@dataclass
class Made:
    folder: Path
    items: dict[bytes, bytes]

    @property
    def file(self) -> Path:
        return self.folder / "data.mdb"


def write(folder: Path, items: dict[bytes, bytes], db: bytes | None = None, **flags: bool) -> Made:
    env = lmdb.open(str(folder), map_size=1 << 27, max_dbs=4)
    handle = None if db is None else env.open_db(db, **flags)
    with env.begin(write=True, db=handle) as txn:
        for key, value in items.items():
            txn.put(key, value)
    env.close()
    return Made(folder, items)


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(0)
    made = {
        "datum": write(folder / "datum", {b"%08d" % i: datum(rng.bytes(64), i % 10) for i in range(1000)}),
        "large": write(folder / "large", {b"%08d" % i: rng.bytes(3000 + 7 * i) for i in range(400)}),
        "empty": write(folder / "empty", {}),
        "named": write(folder / "named", {b"%d" % i: b"v%d" % i for i in range(40)}, b"train"),
    }
    write(folder / "named", {b"%d" % i: b"w" for i in range(30)}, b"test")
    return made


def copy(made: Made, folder: Path) -> Path:
    """The data file alone, to be damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(made.file, folder / "data.mdb"))


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process the way `python -m pario` does; returns (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(screen, "running", False)

    def run(*args: object) -> tuple[int, str, str]:
        try:
            status = main([str(a) for a in args])
        except ParioError as e:
            sys.excepthook(type(e), e, e.__traceback__)  # what the interpreter does with an uncaught error
            status = 1
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def job(ranks: int, *args: object):
    return run_job(ranks, ["-m", "pario", *map(str, args)], limit_s=100, env={"PYTHONPATH": str(ROOT)})


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("nonsense",),
        ("data", "info"),
        ("data", "head", "-n", "0", "x"),
        ("bench", "run", "--shuffle", "a", "x"),
        ("bench", "run", "-b", "0", "x"),
    ],
)
def test_wrong_arguments(call, args):
    status, out, err = call(*args)
    assert status == 2
    assert out == ""
    assert "Error: " in err


def test_missing_packages_are_named_with_the_pip_command():
    code = "import sys; sys.modules['click'] = None; from pario.cli import main; sys.exit(main(['info', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert 'needs click: pip install ".[cli]" in a clone' in done.stderr
    assert "Traceback" not in done.stderr


# -- info and head -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["datum", "large"])
def test_info_says_what_lmdb_says(sets, call, name):
    made = sets[name]
    status, out, _ = call("data", "info", made.folder)
    assert status == 0
    with lmdb.open(str(made.folder), readonly=True, lock=False) as env:
        stat, last = env.stat(), env.info()
    row = [stat[k] for k in ("entries", "depth", "branch_pages", "leaf_pages", "overflow_pages")]
    assert re.search(r"main database\s+" + r"\s+".join(f"{n:,}" for n in row), out)
    sizes = [len(v) for v in made.items.values()]
    expected = f"{sizes[0]:,} bytes each" if len(set(sizes)) == 1 else f"{min(sizes):,} to {max(sizes):,} bytes"
    assert expected in out
    assert f"{last['last_pgno'] + 1:,} in use, of {stat['psize']:,} bytes" in out
    assert "64-bit, little-endian" in out


def test_info_tells_whether_an_index_is_saved(sets, call, tmp_path):
    file = copy(sets["large"], tmp_path / "set")
    assert "not saved yet: python -m pario data index" in call("data", "info", file)[1]
    assert call("data", "index", file)[0] == 0
    assert f"saved as {file}.pario.index" in call("data", "info", file)[1]
    os.utime(file, ns=(1, 1))
    assert "does not fit the file any more" in call("data", "info", file)[1]


def test_info_lists_named_databases(sets, call):
    status, out, _ = call("data", "info", sets["named"].folder)
    assert status == 0
    assert re.search(r'"train"\s+40 ', out)
    assert re.search(r'"test"\s+30 ', out)
    status, out, _ = call("data", "info", sets["named"].folder, "--db", "train")
    assert status == 0
    assert "40 (ids 0 to 39" in out


@pytest.mark.parametrize(
    ("items", "lines"),
    [
        ({b"%04d" % i: datum(bytes(64), i) for i in range(30)}, ["64, pario.decode.Datum(), shuf"]),
        ({b"n%04d.jpg" % i: b"\xff\xd8\xff\xe0...." for i in range(30)}, ["64, pario.decode.Image(), shuffle="]),
        ({b"%04d" % i: bytes([200, i] * 9) for i in range(30)}, ["64, pario.decode.Raw(), shuffle="]),
        ({b"%04d" % i: b'{"a": %d}' % i for i in range(30)}, ["64, pario.decode.Json(), shuffle="]),
        ({b"%04d" % i: [b"text", b'{"a": 1}'][i % 2] for i in range(30)}, ["64, your_function, shuffle="]),
        (
            {b"image-%04d" % i: b"\xff\xd8\xff\xe0...." for i in range(30)}
            | {b"label-%04d" % i: b"a" for i in range(30)},
            [
                '64, fields={"image": ("image-%04d", pario.decode.Image()), "label": ("label-%04d", '
                'pario.decode.Text())}, shuffle="global")  # a JPEG; text'
            ],
        ),
        (
            {b"%d%s" % (i, end): b"%d" % i for i in range(3, 33) for end in (b".a", b".b")},
            ['fields={"a": ("%d.a", pario.decode.Text()), "b": ("%d.b", pario.decode.Text())}, shuffle='],
        ),
        (
            {b"x%d" % i: b"a" for i in range(30)} | {b"y%d" % i: bytes([200, i]) for i in range(30)},
            ['fields={"x": ("x%d", pario.decode.Text()), "y": ("y%d", None)}, shuffle="global")  # text; bytes'],
        ),
        (
            {b"image-%04d" % i: b"\xff\xd8\xff\xe0...." for i in range(30)}
            | {b"other-%04d" % i: b"a" for i in range(5, 35)},
            [
                "64, pario.decode.Image(), shuffle=\"global\", select=b'image-')  # a JPEG",
                "64, pario.decode.Text(), shuffle=\"global\", select=b'other-')  # text",
            ],
        ),
    ],
    ids=["datum", "jpeg", "bytes", "json", "mixed", "samples", "suffixes", "unpadded", "other numbers"],
)
def test_info_prints_the_lines_to_paste_and_names_meta_records(tmp_path, call, items, lines):
    write(tmp_path, {**items, b"num-samples": b"30", b"__keys__": b"x"})
    status, out, _ = call("data", "info", tmp_path)
    assert status == 0
    assert "meta records  __keys__, num-samples: about the dataset" in out
    found = [line for line in out.splitlines() if "pario.Loader(" in line]
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert expected in line
        if "Image" not in line:  # these are none
            names = {"pario": pario, "your_function": len}
            exec(line.strip(), names)
            with names["loader"] as loader:
                assert loader.records == 30
                assert sum(len(batch.ids) for batch in loader) == 30
    write(tmp_path / "plain", items)
    assert "meta records" not in call("data", "info", tmp_path / "plain")[1]



@pytest.mark.parametrize(("width", "call_"), [(20, "Image()"), (31, "Image(224)")])
def test_info_suggests_a_size_for_pictures_of_different_sizes(tmp_path, call, width, call_):
    """The line runs."""
    cv2 = pytest.importorskip("cv2")
    rows = {b"%04d" % i: np.full((20, width if i == 4 else 20, 3), i, np.uint8) for i in range(9)}
    write(tmp_path, {key: cv2.imencode((".jpg", ".png")[key[-1] % 2], row)[1].tobytes() for key, row in rows.items()})
    (line,) = [line for line in call("data", "info", tmp_path)[1].splitlines() if "pario.Loader(" in line]
    assert f"64, pario.decode.{call_}, " in line
    names = {"pario": pario}
    exec(line.strip(), names)
    with names["loader"] as loader:
        assert sum(len(pictures) for (pictures,) in loader) == 9


@pytest.mark.parametrize(
    ("select", "records"), [("10:500", 490), (":7", 7), ("all", 1000), ("000009", 100), ("00000042", 1)]
)
def test_bench_of_a_selection(sets, call, select, records):
    status, out, _ = call("bench", "run", "--json", "--select", select, sets["datum"].folder)
    assert status == 0
    told = json.loads(out)
    assert (told["records"], told["epochs"][0]["records"], told["value_bytes"]) == (records, records, 74 * records)


def test_info_of_an_empty_database_is_no_error(sets, call):
    status, out, _ = call("data", "info", sets["empty"].folder)
    assert status == 0
    assert "no record" in out


def test_head_shows_the_first_records(sets, call):
    made = sets["datum"]
    status, out, _ = call("data", "head", "-n", "3", made.folder)
    assert status == 0
    lines = out.splitlines()[1:]
    assert lines.pop() == "To try: decoder=pario.decode.Datum()"
    assert len(lines) == 5
    for i, line in enumerate(lines[:3]):
        assert line.split()[:3] == [str(i), f"{i:08d}", "74"]
        assert line.endswith(f"Caffe Datum, 1 x 8 x 8 u8 pixels, label {i}")
    about, key = lines[3].split()[:2]
    assert about.startswith("~")
    assert 400 < int(key) < 600
    assert abs(int(about[1:]) - int(key)) < 50
    assert lines[4].split()[:2] == ["999", "00000999"]
    assert "not of one kind" not in out


@pytest.mark.parametrize(
    ("select", "ids"),
    [("7:12", [7, 8, 9, 11]), ("0000099", [990, 991, 995, 999]), (":", [0, 1, 500, 999]), ("all", [0, 1, 500, 999])],
)
def test_head_of_a_selection(sets, call, select, ids):
    """The first ones, one from the middle, the last one; each record once."""
    status, out, err = call("data", "head", "-n", "2", "--select", select, sets["datum"].folder)
    assert status == 0, err
    assert [line.split()[:2] for line in out.splitlines()[1:-1]] == [[str(i), f"{i:08d}"] for i in ids]
    assert out.splitlines()[-1] == "To try: decoder=pario.decode.Datum()"


def test_head_of_no_records(sets, call):
    status, _, err = call("data", "head", "--select", "nothing-", sets["datum"].folder)
    assert status == 1
    assert "nothing-" in err


def test_head_sees_that_records_differ(tmp_path, call):
    """Images first, others later, and at the end what describes them all, as published sets have it."""
    items = {b"%06d" % i: b"\xff\xd8\xff\xe0...." for i in range(60)}
    items |= {b"%06d" % i: b"\x89PNG\r\n\x1a\n...." for i in range(60, 200)}
    write(tmp_path, {**items, b"length": b"200"})
    status, out, _ = call("data", "head", tmp_path)
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["0", "1", "2", "3", "4"]
    assert lines[6].endswith("a PNG")
    assert lines[7].split() == ["200", "length", "3", "text:", "200"]
    assert lines[8] == "These records are not of one kind: a JPEG, a PNG, text."


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_head_shows_no_record_twice(tmp_path, call, count):
    write(tmp_path, {b"%d" % i: b"v%d" % i for i in range(5)})
    _, out, _ = call("data", "head", "-n", count, tmp_path)
    ids = [line.split()[0] for line in out.splitlines()[1:-1]]
    few = {1: ["0", "2", "4"], 2: ["0", "1", "2", "4"], 3: ["0", "1", "2", "4"]}
    assert ids == few.get(count, ["0", "1", "2", "3", "4"])


def test_head_finds_the_middle_and_the_last_duplicate(tmp_path, call):
    env = lmdb.open(str(tmp_path), map_size=1 << 24, max_dbs=1)
    db = env.open_db(b"d", dupsort=True, dupfixed=True, integerkey=True)
    with env.begin(write=True, db=db) as txn:
        for key in range(3):
            txn.cursor().putmulti([(key.to_bytes(8, "little"), b"%06d" % i) for i in range(2000)])
    env.close()
    _, out, _ = call("data", "head", "-n", "2", "--db", "d", tmp_path)
    rows = [line.split() for line in out.splitlines()[1:-1]]
    assert [words[1] for words in rows] == ["0", "0", "1", "2"]
    assert [words[-1] for words in rows] == ["000000", "000001", "000000", "001999"]
    assert rows[-1][0] == "5999"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([b"%d" % i for i in range(200)], "first 0, last 99, in the order of their bytes: 10 comes before 9"),
        ([b"%d" % i for i in range(12)], "first 0, last 9, in the order of their bytes: 10 comes before 9"),
        ([b"%d" % i for i in range(8)], "first 0, last 7, in the order of their bytes\n"),
        ([b"%05d" % i for i in range(200)], "first 00000, last 00199, in the order of their bytes\n"),
        ([b"a", b"b"], "first a, last b, in the order of their bytes\n"),
    ],
)
def test_info_says_how_keys_are_ordered(tmp_path, call, keys, words):
    write(tmp_path, dict.fromkeys(keys, b"v"))
    assert words in call("data", "info", tmp_path)[1]


@pytest.mark.parametrize(
    ("flag", "keys", "words"),
    [
        ("integerkey", [i.to_bytes(4, "little") for i in (7, 300, 70000)], "first 7, last 70000, in the order of the"),
        ("reverse_key", [b"%d" % i for i in range(20)], "first 0, last 19, in the order of their bytes from the end"),
    ],
)
def test_info_says_how_other_keys_are_ordered(tmp_path, call, flag, keys, words):
    write(tmp_path, dict.fromkeys(keys, b"v"), b"d", **{flag: True})
    assert words in call("data", "info", "--db", "d", tmp_path)[1]


def test_head_shows_duplicates_as_records_of_their_own(tmp_path, call):
    items = [(b"a", b"%04d" % i) for i in range(9)] + [(b"b", b"x")]
    env = lmdb.open(str(tmp_path), map_size=1 << 24, max_dbs=1)
    db = env.open_db(b"d", dupsort=True)
    with env.begin(write=True, db=db) as txn:
        txn.cursor().putmulti(items)
        there = list(txn.cursor().iternext_dup()) or [(k, v) for k, v in txn.cursor()]
    env.close()
    status, out, _ = call("data", "head", "-n", "20", "--db", "d", tmp_path)
    assert status == 0
    shown = [line.split() for line in out.splitlines()[1:-1]]
    assert [(words[1].encode(), words[-1].encode()) for words in shown] == [(k, v) for k, v in there]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "empty"),
        (b"\xff\xd8\xff\xe0....", "a JPEG"),
        (b"\x89PNG\r\n\x1a\n....", "a PNG"),
        (b'{"a": 1}', 'JSON: {"a": 1}'),
        (b"hello\nworld", "text: hello world"),
        (b"\x1f\x8b\x08\x00\x00\x00", "gzip"),
        (datum(bytes(64), 7), "1 x 8 x 8 u8 pixels, label 7"),
        (b"\x08\x01\x10\x02\x18\x01" + b"\x35\x00\x00\x80\x3f" * 2 + b"\x28\x80\x01", "1 x 2 x 1 floats, label 128"),
        (b"\x22\x04\xff\xd8\xff\xe0\x28\x03\x38\x01", "Datum with a JPEG, label 3"),
        (datum(bytes(63), 7), "bytes 08 01"),  # its length does not fit: no Datum
        (b"\xfe\xfd\xfc", "bytes fe fd fc"),
        (pickle.dumps(Path("x"), protocol=4), "pickle, protocol 4 of pathlib"),
    ],
)
def test_guesses(value, words):
    assert words in guess(value, len(value))[0]


@pytest.mark.parametrize(
    ("value", "call_"),
    [
        (b"\xff\xd8\xff\xe0....", "Image()"),
        (b"RIFF....WEBPVP8 ", "Image()"),
        (b'{"a": 1}', "Json()"),
        (b"hello", "Text()"),
        (datum(bytes(64), 7), "Datum()"),
        (tensor_protos(("FLOAT", (2,), [1, 2]), ("INT32", (1,), [3])), "TensorProtos()"),
        (zlib.compress(b'{"a": 1}'), "Zlib(pario.decode.Json())"),
        (gzip.compress(pickle.dumps({"a": 1}), mtime=0), "Gzip(pario.decode.Pickle(allow=[]))"),
        (zlib.compress(bytes(100)), "Zlib()"),
        (pickle.dumps({"a": np.zeros(3)}), "Pickle(allow=[])"),
        (pickle.dumps(Path("x")), "Pickle(allow_pickle=True)"),
        (b"\x93NUMPY\1\0", "Npy()"),
        (b"\xfe\xfd\xfc", ""),
        (b"\x28\xb5\x2f\xfd....", ""),
        (b"", ""),
    ],
    ids=lambda one: one[:24] if isinstance(one, str) else "",
)
def test_which_decoder_to_try(value, call_):
    assert guess(value, len(value))[1] == (call_ and f"pario.decode.{call_}")


def test_a_bomb_is_guessed_at_in_little_memory():
    assert guess(zlib.compress(bytes(1 << 26)), 1 << 16)[0].startswith("zlib data of ")


LABELLED = """
def decode(value, key, id):
    return {"twice": value * 2, "key": key, "id": id}
"""


def test_head_and_info_take_a_decoder(tmp_path, call, monkeypatch):
    write(tmp_path / "set", {b"%02d" % i: zlib.compress(b'{"a": [%d]}' % i) for i in range(20)})
    (tmp_path / "mine.py").write_text(LABELLED)
    monkeypatch.chdir(tmp_path)
    for command in ("head", "info"):
        status, out, _ = call(command, "set")
        assert status == 0
        assert "pario.decode.Zlib(pario.decode.Json())" in out
        status, out, _ = call(command, "set", "--decoder", "zlib+json")
        assert status == 0
        assert "data: {'a': [0]}" in out
        assert "data: {'a': [19]}" in out
        for name in ("mine.py:decode", "mine:decode"):
            status, out, _ = call(command, "set", "--decoder", name)
            assert status == 0
            assert "key: b'19', id: 19" in out
        status, out, _ = call(command, "set", "--decoder", "datum")
        assert status == 0
        assert "not a Caffe Datum" in out


def test_info_never_calls_mixed_data_by_the_name_of_its_first_record(tmp_path, call):
    write(tmp_path, {b"%02d" % i: b"\xff\xd8\xff\xe0" if i < 3 else b"text %d" % i for i in range(20)})
    out = call("data", "info", tmp_path)[1]
    assert "These records are not of one kind: a JPEG, text." in out
    assert "To try" not in out


@pytest.mark.parametrize("name", ["pickle", "tape"])
def test_pickles_on_the_command_line_are_plain_data(tmp_path, call, name):
    trap = tmp_path / "sprung"
    write(tmp_path / "set", {b"a": pickle.dumps({"x": 1}), b"b": pickle.dumps({"x": Trap(str(trap))})})
    status, out, _ = call("data", "head", tmp_path / "set", "--decoder", name)
    assert status == 0
    assert "'x': 1" in out or "x: 1" in out
    assert "which is no plain data" in out
    assert not trap.exists()


def test_bench_takes_a_decoder(tmp_path, call, monkeypatch):
    write(tmp_path / "set", {b"%02d" % i: b"%d" % i for i in range(20)})
    (tmp_path / "mine.py").write_text(LABELLED)
    monkeypatch.chdir(tmp_path)
    for name, said in (("mine.py:decode", "Function(decode)"), ("json", "Json()"), (None, "Raw()")):
        given = ("--decoder", name) if name else ()
        status, out, err = call("bench", "run", "set", "--json", *given)
        assert status == 0, err
        assert json.loads(out)["decoder"] == said


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jpeg", "no decoder is called 'jpeg'"),
        ("nothing.py:f", "there is no file nothing.py"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_name", "has no attribute 'no_such_name'"),
        (":f", "module:function or file.py:function"),
        ("gzip+", "no decoder is called ''"),
        ("math:pi", "must be a pario.decode decoder"),
    ],
)
def test_decoders_that_do_not_exist(tmp_path, call, name, why):
    write(tmp_path, {b"a": b"b"})
    status, _, err = call("data", "head", tmp_path, "--decoder", name)
    assert status != 0
    assert why in err


def test_a_pickle_is_never_loaded(tmp_path, call):
    trap = tmp_path / "sprung"
    write(tmp_path / "set", {b"k": pickle.dumps(Trap(str(trap)))})
    for command in ("head", "info"):
        status, out, _ = call(command, tmp_path / "set")
        assert status == 0
        assert "decode.Pickle(allow_pickle=True)" in out
        status, out, _ = call(command, tmp_path / "set", "--decoder", "json")
        assert not trap.exists()


# -- index and verify --------------------------------------------------------------------------------------------------


def test_index_is_built_once(sets, call, tmp_path):
    file = copy(sets["large"], tmp_path)
    status, out, _ = call("data", "index", file)
    assert status == 0
    percent = float(re.search(r"([\d.]+)% of the file", out)[1])
    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env:
        stat = env.stat()
    tree = (stat["branch_pages"] + stat["leaf_pages"]) * PAGE
    assert 100 * tree / file.stat().st_size <= percent * 1.01
    assert percent < 2
    assert Path(f"{file}.pario.index").exists()
    assert "the saved index fits this file" in call("data", "index", file)[1]


@pytest.mark.parametrize("name", ["datum", "large", "empty", "named"])
def test_verify_finds_nothing_wrong_in_sound_files(sets, call, name):
    status, out, err = call("data", "verify", sets[name].folder)
    assert (status, err) == (0, "")
    assert "no damage found" in out


def pages_of_kind(file: Path, flags: int) -> list[int]:
    data = np.fromfile(file, np.uint8)
    kinds = data[: len(data) // PAGE * PAGE].reshape(-1, PAGE)[:, 10:12].copy().view("<u2")[:, 0]
    return [k for k in range(2, len(kinds)) if kinds[k] == flags]


def poke(file: Path, at: int, value: bytes) -> None:
    with open(file, "r+b") as f:
        f.seek(at)
        f.write(value)


def test_verify_names_each_damage(sets, call, tmp_path):
    file = copy(sets["large"], tmp_path)
    # Of the first page of a run: later ones have no header, their bytes may look like one.
    firsts = [k for k in pages_of_kind(file, OVERFLOW) if int.from_bytes(read(file, k * PAGE, 8), "little") == k]
    first, second = firsts[20], firsts[60]
    poke(file, first * PAGE, b"\x01")  # another page number
    poke(file, second * PAGE + 10, b"\x02")  # the flags of a leaf page
    status, out, _ = call("data", "verify", file)
    assert status == 1
    assert f"page {first}, offset {first * PAGE}, record " in out
    assert f"page {second}, offset {second * PAGE}, record " in out
    assert "damaged in 2 places" in out


def read(file: Path, at: int, nbytes: int) -> bytes:
    with open(file, "rb") as f:
        f.seek(at)
        return f.read(nbytes)


def test_verify_sees_keys_out_of_order(sets, call, tmp_path):
    file = copy(sets["datum"], tmp_path)
    leaf = pages_of_kind(file, LEAF)[5]
    second = int.from_bytes(read(file, leaf * PAGE + 16 + 2, 2), "little")  # the pointer of item 1
    poke(file, leaf * PAGE + second + 8, b"9")  # its key was 0000....
    status, out, _ = call("data", "verify", file)
    assert status == 1
    assert "keys do not ascend: b'9" in out
    assert f"page {leaf}, " in out


def test_verify_sees_a_lost_leaf_and_counts_the_rest(sets, call, tmp_path):
    file = copy(sets["datum"], tmp_path)
    leaf = pages_of_kind(file, LEAF)[3]
    items = (int.from_bytes(read(file, leaf * PAGE + 12, 2), "little") - 16) // 2
    poke(file, leaf * PAGE, bytes(PAGE))
    status, out, _ = call("data", "verify", file)
    assert status == 1
    assert f"{1000 - items:,} records found" in out
    assert f"page {leaf}, offset {leaf * PAGE}" in out


def test_verify_sees_a_cut_file(sets, call, tmp_path):
    file = copy(sets["large"], tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    status, out, _ = call("data", "verify", file)
    assert status == 1
    assert "damaged in" in out


# -- bench -------------------------------------------------------------------------------------------------------------


def test_bench_counts_right(sets, call, monkeypatch):
    """What ranks read by themselves: copies into a tier are counted with the tier."""
    monkeypatch.setenv("PARIO_TIERS", "")
    made = sets["large"]
    status, out, _ = call("bench", "run", made.folder, "-b", "32", "-e", "2", "--shuffle", "block", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["records"] == 400
    assert [e["records"] for e in found["epochs"]] == [400, 400]
    assert found["value_bytes"] == sum(len(v) for v in made.items.values())
    # Every value starts a page here and has 16 bytes of header before it.
    assert found["page_bytes"] == sum(-(-(16 + len(v)) // PAGE) * PAGE for v in made.items.values())
    # Up to as much again may have been read ahead of an epoch: all of it fits into the ring.
    assert 2 * found["value_bytes"] <= found["bytes_read"] <= 3.1 * found["page_bytes"]
    assert set(found["rank_seconds"]) == {"locate", "turn", "read", "check", "share", "decode", "consumer"}
    assert 0 < found["open_seconds"] <= found["first_batch_seconds"]


def test_bench_in_words(sets, call):
    status, out, _ = call("bench", "run", sets["datum"].folder, "--decoder", "datum", "--step-ms", "0.1")
    assert status == 0
    assert "1,000 records in" in out
    assert "in the page cache before" in out
    for word in ("locate", "turn", "read", "share", "decode", "consumer", "time to first batch"):
        assert word in out


def test_bench_reports_each_rank(sets, call):
    status, out, _ = call("bench", "run", sets["datum"].folder, "--decoder", "datum", "--report")
    assert status == 0
    assert re.search(r"^  rank  node  records +seconds", out, re.MULTILINE)
    assert re.search(r"^  0 +0 +1,000 ", out, re.MULTILINE)
    assert "the slow" in out.splitlines()[-1]
    status, out, _ = call("bench", "run", sets["datum"].folder, "--report", "--json")
    assert [rank["records"] for rank in json.loads(out)["report"]["ranks"]] == [1000]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(sets, tmp_path) -> dict[str, Path]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "nil").write_bytes(b"")
    (tmp_path / "text").write_text("hello, this is not a database\n" * 1000)
    cut = copy(sets["datum"], tmp_path / "cut")
    os.truncate(cut, cut.stat().st_size // 2)
    return {
        "missing": tmp_path / "nothing" / "train.lmdb",
        "no data.mdb": tmp_path / "folder",
        "empty file": tmp_path / "nil",
        "text": tmp_path / "text",
        "truncated": cut,
        "empty database": sets["empty"].folder,
        "named": sets["named"].folder,
    }


SAYS = {
    "missing": "no such file or directory",
    "no data.mdb": "no data.mdb",
    "empty file": "the file is empty",
    "text": "not an LMDB",
    "truncated": "beyond the end of the file",
    "empty database": "no record",
    "named": "named database",
}


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.parametrize("command", [("bench", "run"), ("data", "index")], ids=["bench", "index"])
def test_bad_input_is_one_line(bad, call, command, what):
    status, out, err = call(*command, bad[what])
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert SAYS[what] in err
    assert str(bad[what]) in err


@pytest.mark.parametrize("what", [w for w in SAYS if w != "truncated"])
def test_head_refuses_the_same(bad, call, what):
    # A truncated file may still have its first records.
    status, _, err = call("data", "head", bad[what])
    assert status == 1
    assert SAYS[what] in err


@pytest.mark.full
def test_bench_knows_every_recipe(sets, call):
    for recipe in RECIPES:
        status, out, err = call("bench", "run", sets["datum"].folder, "--recipe", recipe, "--json")
        assert (status, err) == (0, "")
        told = json.loads(out)
        assert told["recipe"] == recipe
        assert told["epochs"][0]["records"] == told["records"]
    status, out, _ = call("bench", "run", sets["datum"].folder, "--recipe", "dio")
    assert status == 0
    assert "recipe dio" in out
    status, _, err = call("bench", "run", sets["datum"].folder, "--recipe", "magic")
    assert status == 2
    assert "magic" in err


def test_bad_arguments_of_bench(sets, call):
    status, _, err = call("bench", "run", sets["large"].folder, "--decoder", "datum")
    assert status == 1
    assert "record 0" in err
    assert "not a Caffe Datum" in err
    status, _, err = call("bench", "run", sets["named"].folder, "--db", "nope")
    assert status == 1
    assert "'train'" in err


def test_uncaught_in_a_real_process(bad):
    done = subprocess.run(
        [sys.executable, "-m", "pario", "data", "info", str(bad["missing"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no such file or directory")
    assert done.stderr.count("\n") == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_bench_on_two_ranks(sets):
    words = ("--decoder", "datum", "--shuffle", "global", "--json", "--report")
    done = job(2, "bench", "run", sets["datum"].folder, *words)
    assert done.status == 0, done.output
    found = json.loads(done.output)
    assert found["ranks"] == 2
    assert found["epochs"][0]["records"] == 1000
    assert sum(rank["records"] for rank in found["report"]["ranks"]) == 1000
    assert found["report"]["total"]["bytes_read"] == found["bytes_read"]
    assert found["report"]["sentence"]


@pytest.mark.parametrize("what", ["missing", pytest.param("truncated", marks=pytest.mark.full)])
def test_an_error_of_all_ranks_is_said_once(bad, what):
    done = job(2, "data", "index", bad[what])
    assert done.status not in (0, None), done.output
    assert done.output.count("error: ") == 1
    assert SAYS[what] in done.output
    assert "Traceback" not in done.output


def test_an_error_of_one_rank_is_said_once_and_ends_all(tmp_path):
    items = {b"%08d" % i: datum(bytes(64), 1) for i in range(600)}
    items[b"00000300"] = b"\x08\x01\x10\xff"
    write(tmp_path, items)
    done = job(2, "bench", "run", tmp_path, "--decoder", "datum", "-b", "10")
    assert done.status not in (0, None), done.output
    assert done.output.count("error: ") == 1
    assert "record 300, key b'00000300'" in done.output
    assert "Traceback" not in done.output


def test_ctrl_c_is_quiet(sets):
    process = subprocess.Popen(
        [sys.executable, "-m", "pario", "bench", "run", str(sets["datum"].folder), "--step-ms", "500"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(2)  # wherever it is by then: importing, opening or reading
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_tiers_copies_once(sets, call, tmp_path):
    file = sets["large"].folder
    status, out, _ = call("tiers", "stage", file, "--to", tmp_path / "disk", "--quota", "1GiB")
    assert status == 0
    assert "100.0% of" in out
    assert "(0.0% did before)" in out
    status, out, _ = call("tiers", "stage", file, "--to", tmp_path / "disk")
    assert "(100.0% did before)" in out
    assert re.search(r"^0 bytes read from the store", out, re.MULTILINE)
    status, out, _ = call("tiers", "stage", file, "--to", tmp_path / "small", "--quota", "1MiB")
    assert status == 0
    assert "no room" in out


def test_the_copies_on_a_disk(sets, call, tmp_path):
    disk = tmp_path / "disk"
    status, out, _ = call("tiers", "list", disk)
    assert (status, out) == (0, "no copies\n")
    call("tiers", "stage", sets["large"].folder, "--to", disk)
    status, out, _ = call("tiers", "list", disk)
    assert status == 0
    assert re.search(rf"{disk} .*large/data.mdb +\d+% of .* days ago", out), out
    assert call("tiers", "verify", disk)[:2] == (0, call("tiers", "verify", disk)[1])
    (copy,) = (path for path in disk.glob("pario-*/*/data"))
    with open(copy, "r+b") as file:
        file.seek(1 << 20)
        file.write(b"damage" * 100)
    status, out, _ = call("tiers", "verify", disk)
    assert status == 1
    assert "1 chunk damaged" in out
    status, out, _ = call("tiers", "clean", disk, "--older-than", "7")
    assert status == 0
    assert "kept: used 0.0 days ago" in out
    status, out, _ = call("tiers", "clean", disk)
    assert "removed" in out
    assert call("tiers", "list", disk)[1] == "no copies\n"
    assert call("tiers", "clean", disk, "--older-than", "-1")[0] == 2


def test_stage_to_memory_is_refused(sets, call):
    status, _, err = call("tiers", "stage", sets["large"].folder, "--to", "memory")
    assert status == 1
    assert "memory ends with this command" in err


def test_stage_names_what_is_wrong(sets, call, tmp_path):
    assert "no size: 'much'" in call("tiers", "stage", sets["large"].folder, "--to", tmp_path, "--quota", "much")[2]
    (tmp_path / "file").write_bytes(b"")
    status, _, err = call("tiers", "stage", sets["large"].folder, "--to", tmp_path / "file" / "x")
    assert status == 1
    assert "cannot be used" in err


def test_a_terminal_that_is_not_utf_8(tmp_path: Path) -> None:
    write(tmp_path / "x.lmdb", {"Ж".encode() * k: b"x" * k for k in range(1, 5)})
    env = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    for command in ("info", "head"):
        line = [sys.executable, "-m", "pario", command, str(tmp_path / "x.lmdb")]
        done = subprocess.run(line, env=env, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert rb"\u0416" in done.stdout
