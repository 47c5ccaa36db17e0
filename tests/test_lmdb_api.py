"""pario.lmdb beside py-lmdb: arguments, errors, lifetimes; and what is different on purpose."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb as real
import pytest
from lmdb_cases import FORMATS, make, opened, oracle
from pairwise import pairwise

import pario.lmdb as ours
from pario.lmdb import native
from pario.lmdb import store as store_module

BOTH = [real, ours]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmdb")


@pytest.fixture(params=FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Five records and two named databases."""
    with opened(tmp_path, request.param) as env:
        plain, dups = env.open_db(b"plain"), env.open_db(b"dups", dupsort=True)
        with env.begin(write=True) as txn:
            for i in range(5):
                txn.put(b"key%d" % i, b"value%d" % i * 1000)
                txn.put(b"%d" % i, b"x", db=plain)
                txn.put(b"k", b"%d" % i, db=dups)
    return tmp_path


def answer(call: Callable[[], Any]) -> Any:
    """A value, or the names of the error and its code."""
    try:
        return call()
    except Exception as e:
        # The number of "read-only" differs between LMDB 0.9 and 1.0.
        return type(e).__name__, None if isinstance(e, real.ReadonlyError) else getattr(e, "code", None)


def read(module: Any, path: Path | str, **more: Any) -> Any:
    return module.open(os.fspath(path), **{"readonly": True, "lock": False, "max_dbs": 4, **more})


def test_surface() -> None:
    """Every public name of py-lmdb and of its classes is there, with the same parameters."""
    for name in real.__all__:
        assert hasattr(ours, name), name
    for cls in ("Environment", "Transaction", "Cursor", "_Database"):
        for name, member in vars(getattr(real, cls)).items():
            if name.startswith("_") and name not in ("__enter__", "__exit__", "__iter__", "_iter_from"):
                continue
            mine = getattr(getattr(ours, cls), name)
            if callable(member):
                assert callable(mine), f"{cls}.{name}"
    for name in ours.__all__:
        getattr(ours, name)
    assert ours.open is ours.Environment
    parameters = list(inspect.signature(ours.Environment).parameters)
    assert parameters[:17] == [
        "path", "map_size", "subdir", "readonly", "metasync", "sync", "map_async", "mode", "create", "readahead",
        "writemap", "meminit", "max_readers", "max_dbs", "max_spare_txns", "lock", "lib_version",
    ]  # fmt: skip


def test_exceptions() -> None:
    for name, cls in vars(real).items():
        if isinstance(cls, type) and issubclass(cls, Exception):
            mine = getattr(ours, name)
            assert issubclass(mine, cls)
            assert issubclass(mine, ours.Error)
    error = ours.CorruptedError("what", path="/p", page=3)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.page, again.code, type(again)) == (3, -30796, ours.CorruptedError)
    # PyTorch's DataLoader makes the worker's exception anew from its text.
    assert str(ours.CorruptedError("some text")).startswith("some text")


def test_open(directory: Path, tmp_path: Path) -> None:
    data = directory / "data.mdb"
    for arguments in (
        {},
        {"map_size": -1},
        {"max_readers": 0},
        {"max_readers": -1},
        {"lib_version": -2},
        {"lib_version": 7},
        {"map_size": 1 << 40, "max_readers": 1, "meminit": False, "readahead": False, "writemap": False},
    ):
        for path, subdir in ((directory, True), (data, False)):
            found = []
            for module in BOTH:
                env = answer(lambda m=module, p=path, s=subdir, a=arguments: read(m, p, subdir=s, **a))
                found.append(env if isinstance(env, tuple) else (env.stat(), env.flags(), env.path()))
                if not isinstance(env, tuple):
                    env.close()
            assert found[1] == found[0], (arguments, subdir)
    for path, subdir in ((data, True), (directory, False), (directory / "none", True), (directory / "none", False)):
        names = [answer(lambda m=m, p=path, s=subdir: read(m, p, subdir=s))[0] for m in BOTH]
        assert names[1] == names[0] == "Error", (path, subdir)
    with pytest.raises(ours.Error, match="No such file"):
        read(ours, directory / "none")
    for path in (os.fsencode(directory), directory):
        with ours.open(path, readonly=True) as env:
            assert env.path() == os.fspath(directory)


def test_lib_version(directory: Path) -> None:
    with read(ours, directory) as env:
        own = env.lib_version()[0]
    assert read(ours, directory, lib_version=own).lib_version()[0] == own
    with pytest.raises(ours.InvalidError):
        read(ours, directory, lib_version=1 - own)


def test_databases(directory: Path) -> None:
    found = []
    for module in BOTH:
        env = read(module, directory)
        calls: list[Callable[[Any], Any]] = [
            lambda e: sorted(e.dbs()),
            lambda e: e.open_db(b"plain").flags(),
            lambda e: e.open_db(b"dups", reverse_key=True).flags(),
            lambda e: e.open_db(None).flags(),
            lambda e: e.open_db(),
            lambda e: e.open_db(b"none"),
            lambda e: e.open_db(b"none", create=False),
            lambda e: e.open_db(b""),
            lambda e: e.open_db("plain"),
            lambda e: e.open_db(None, dupsort=True),
            lambda e: e.begin(write=True),
            lambda e: e.max_key_size(),
            lambda e: e.readers(),
            lambda e: e.reader_check(),
        ]
        found.append([answer(lambda c=call, e=env: c(e)) for call in calls])
        found[-1][4] = None  # the handles themselves
        env.close()
        few = read(module, directory, max_dbs=1)
        few.open_db(b"plain")
        found[-1] += [answer(lambda e=few: e.open_db(b"dups")), few.dbs()]
        few.close()
        none = read(module, directory, max_dbs=0)
        found[-1].append(answer(lambda e=none: e.open_db(b"dups")))
        none.close()
    assert found[1] == found[0]


def test_plain_key_is_no_database(directory: Path) -> None:
    names = []
    for module in BOTH:
        with read(module, directory) as env:
            names.append(answer(lambda e=env: e.open_db(b"key1", create=False))[0])
    assert names[1] == names[0]


def test_transactions(directory: Path) -> None:
    found = []
    for module in BOTH:
        env = read(module, directory)
        dups = env.open_db(b"dups")
        txn = env.begin()
        calls: list[Callable[[Any], Any]] = [
            lambda t: t.get(b"key1"),
            lambda t: t.get(b"none"),
            lambda t: t.get(b"none", 7),
            lambda t: t.get(b"none", default=b"d"),
            lambda t: t.get(bytearray(b"key2")),
            lambda t: t.get(memoryview(b"key2")),
            lambda t: t.get("key1"),
            lambda t: t.get(None),
            lambda t: t.get(1),
            lambda t: t.get(b""),
            lambda t: t.get(b"x" * 3000),
            lambda t, db=dups: t.get(b"k", db=db),
            lambda t, db=dups: t.stat(db),
            lambda t: t.get(b"k", db="dups"),
            lambda t: t.stat(),
            lambda t: t.id(),
            lambda t: t.put(b"a", b"b"),
            lambda t: t.delete(b"a"),
            lambda t: t.replace(b"a", b"b"),
            lambda t, db=dups: t.drop(db),
            lambda t: t.cursor().put(b"a", b"b"),
            lambda t: t.cursor().set_key("a"),
            lambda t: t.cursor().set_key(b""),
            lambda t: t.cursor().set_range(b"") and t.cursor().item(),
            lambda t: t.cursor().set_key_dup(b"key1", b"v"),
            lambda t: t.cursor().first_dup(),
            lambda t: t.cursor().count(),
        ]
        found.append([answer(lambda c=call, t=txn: c(t)) for call in calls])
        cursor = txn.cursor()
        cursor.first()
        txn.commit()
        dead: list[Callable[[], Any]] = [
            txn.commit, txn.abort, txn.id, txn.stat, txn.cursor, lambda t=txn: t.get(b"key1"), cursor.key, cursor.next,
            cursor.item, lambda c=cursor: c.set_key(b"key1"), lambda c=cursor: list(c),
        ]  # fmt: skip
        found[-1] += [answer(call) for call in dead]
        other = env.begin()
        env.close()
        dead = [other.abort, lambda t=other: t.get(b"key1"), env.stat, env.begin, env.path, env.close]
        found[-1] += [answer(call) for call in dead]
    assert found[1] == found[0]


def test_get_is_a_compiled_method(directory: Path) -> None:
    """After the first call, once it is compiled; it hands over to the one in Python whatever is not a key alone."""
    native.compile_now()
    with read(ours, directory) as env, env.begin() as txn:
        before = txn.get  # bound to whatever is there now
        assert txn.get(b"key1") == before(b"key1") == b"value1" * 1000
        assert type(ours.Transaction.get).__name__ == "method_descriptor"
        assert list(inspect.signature(txn.get).parameters) == ["key", "default", "db"]
        assert txn.get(key=b"none", default=7) == txn.get(b"none", 7) == before(b"none", 7) == 7
        nothing = txn.get(b"none")
        assert nothing is None
        for wrong in ((), (b"key1", 1, None, 4), tuple(range(99))):
            with pytest.raises(TypeError, match=r"Transaction\.get\(\)"):
                txn.get(*wrong)
        with pytest.raises(TypeError, match="colour"):
            txn.get(b"key1", colour=1)
        with pytest.raises(TypeError):
            ours.Transaction.get(env, b"key1")

        class Mine(ours.Transaction):
            def get(self, key: Any, *more: Any, **named: Any) -> Any:
                return key, super().get(key, *more, **named)

        assert Mine(env).get(b"key1") == (b"key1", b"value1" * 1000)
        counts = [sys.getrefcount(x) for x in (None, False, b"key1")]
        for _ in range(1000):
            txn.get(b"key1"), txn.get(b"none"), txn.get(b"key1", None)
        assert [sys.getrefcount(x) for x in (None, False, b"key1")] == pytest.approx(counts, abs=100)


def test_buffers(directory: Path) -> None:
    with read(ours, directory) as env, env.begin(buffers=True) as txn:
        value = txn.get(b"key1")
        assert isinstance(value, memoryview)
        assert value.readonly
        assert bytes(value) == b"value1" * 1000
        cursor = txn.cursor()
        assert all(isinstance(part, memoryview) for pair in cursor for part in pair)
        assert all(isinstance(part, memoryview) for part in cursor.item())
        assert isinstance(cursor.getmulti([b"key1"])[0][1], memoryview)


def test_writing_says_what_to_use(directory: Path) -> None:
    with ours.open(os.fspath(directory)) as env:
        for call in (lambda: env.begin(write=True), lambda: env.begin().put(b"a", b"b"), env.sync):
            with pytest.raises(ours.ReadonlyError, match="import lmdb"):
                call()
    with pytest.raises(ours.ReadonlyError, match="import lmdb"):
        ours.open(os.fspath(directory / "new"))


@pytest.mark.parametrize("module", [ours, real], ids=["ours", "py-lmdb"])
def test_writing_takes_the_arguments_that_writers_take(directory: Path, module: Any) -> None:
    with read(module, directory) as env, env.begin() as txn:
        for put, most in ((txn.put, 6), (txn.cursor().put, 5)):
            for wrong, named in ((tuple(range(most + 1)), {}), ((b"a", b"b"), {"colour": 1})):
                with pytest.raises(TypeError):
                    put(*wrong, **named)
            with pytest.raises(module.ReadonlyError):
                put(key=b"a", value=b"b", dupdata=True, overwrite=True, append=False)
    assert module.Transaction.put.__name__ == module.Cursor.put.__name__ == "put"


def test_open_twice_and_handles_everywhere(directory: Path) -> None:
    with read(ours, directory) as one, read(ours, directory) as two, one.begin() as older:
        handle = one.open_db(b"plain")
        assert older.get(b"1", db=handle) == b"x"
        assert two.begin().get(b"key1") == older.get(b"key1")
        with pytest.raises(ours.Error, match="another environment"):
            two.begin().get(b"1", db=handle)


@pytest.mark.parametrize("kind", [k for k in ("fork", "spawn") if k in multiprocessing.get_all_start_methods()])
def test_other_processes(directory: Path, kind: str) -> None:
    """A pickled environment works in a spawned process, a used one in a forked one."""
    env = read(ours, directory)
    txn = env.begin()
    assert txn.get(b"key1")
    with multiprocessing.get_context(kind).Pool(2) as pool:
        assert pool.map(_value_of_key, [(env, b"key%d" % i) for i in range(5)]) == [
            b"value%d" % i * 1000 for i in range(5)
        ]
    assert txn.get(b"key2")
    for thing in (txn, txn.cursor(), env.open_db(b"plain")):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(thing)


def _value_of_key(job: tuple[Any, bytes]) -> bytes:
    env, key = job
    with env.begin() as txn:
        found: bytes = txn.get(key)
    return found


def test_fork_in_use(directory: Path) -> None:
    """A transaction and a running iterator go on in the child."""
    env = read(ours, directory)
    cursor = env.begin().cursor()
    running = cursor.iternext(values=False)
    next(running)
    pid = os.fork()
    if not pid:
        good = list(running)[:2] == [b"key0", b"key1"] or next(iter(cursor)) is not None
        os._exit(0 if good and env.begin().get(b"key4") == b"value4" * 1000 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(running)) > 3


def test_threads(made: Path) -> None:
    """One transaction, a small cache and many threads: every value right."""
    path, _ = make(made, "shuffled_small", 1)
    pairs = oracle(path)
    env = ours.open(path, subdir=False, readonly=True, cache_bytes=0)
    txn = env.begin()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            cursor = txn.cursor()
            for i in range(3000):
                key, value = pairs[(i * 7919 + seed * 31) % len(pairs)]
                if txn.get(key) != value or (i % 50 == 0 and cursor.get(key) != value):
                    wrong.append(key)
            if list(cursor.iternext(values=False)) == []:
                wrong.append("nothing")
            if cursor.getmulti([key for key, _ in pairs]) != pairs:
                wrong.append("many")
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("version", FORMATS)
def test_writer_beside_reader(tmp_path: Path, version: int) -> None:
    """A new transaction sees what was committed; one that was overtaken raises, and never gives wrong bytes."""
    writer = opened(tmp_path, version)

    def commit(n: int) -> None:
        with writer.begin(write=True) as txn:
            for i in range(300):
                txn.put(b"%04d" % i, b"%08d" % n * 500)

    commit(0)
    env = read(ours, tmp_path, cache_bytes=0)
    old = env.begin()
    assert old.get(b"0001") == b"%08d" % 0 * 500
    commit(1)
    # One commit later nothing of the snapshot can be overwritten yet.
    assert old.get(b"0100") == b"%08d" % 0 * 500
    assert env.begin().get(b"0100") == b"%08d" % 1 * 500
    raised = 0
    for n in range(2, 12):
        txn = env.begin()
        for step in range(5):
            keys = [b"%04d" % ((n * 31 + step * 77 + i) % 300) for i in range(20)]
            try:
                values = {txn.get(key) for key in keys} | {value for _, value in txn.cursor().getmulti(keys)}
                assert values == {b"%08d" % (n - 1) * 500}
            except ours.BadTxnError as e:
                raised += "writers committed" in str(e) and step >= 2
            commit(n)
        with env.begin() as now:
            assert now.get(b"0000") == b"%08d" % n * 500
    assert raised
    with pytest.raises(ours.BadTxnError):
        old.get(b"0200")
    writer.close()


def test_looks_at_a_slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a look at the meta page takes long, few transactions look; each sees what is older than 0.1 s."""
    writer = opened(tmp_path, 1)

    def commit(value: bytes) -> None:
        with writer.begin(write=True) as txn:
            txn.put(b"key", value * 1000)

    commit(b"old")
    env = read(ours, tmp_path)
    env.begin()  # compiles
    look, seconds, looks, clock = store_module._is_newest, [0.0], [0], [0.0]
    clocked = types.SimpleNamespace(perf_counter=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr(store_module, "time", clocked)

    def slowly(store_at: int) -> bool:
        looks[0] += 1
        clock[0] += seconds[0]
        return look(store_at)

    monkeypatch.setattr(store_module, "_is_newest", slowly)

    def looks_of(transactions: int) -> int:
        looks[0] = 0
        for _ in range(transactions):
            clock[0] += 1e-3
            env.begin()
        return looks[0]

    assert looks_of(30) == 30
    seconds[0] = 0.02
    began = clock[0]
    assert 2 <= looks_of(300) <= 3 + (clock[0] - began) / 0.1
    commit(b"new")
    clock[0] += 0.1
    assert env.begin().get(b"key") == b"new" * 1000
    # One that was overtaken makes the next one look, however little time has passed.
    monkeypatch.setattr(store_module, "_SEEN_S", 600)
    monkeypatch.setattr(store_module, "_LOOKING", 1e-6)
    for _ in range(3):
        old = env.begin()
    for value in (b"newer", b"newest"):
        commit(value)
    assert env.begin().id() == old.id()
    with pytest.raises(ours.BadTxnError):
        old.get(b"key")
    assert env.begin().get(b"key") == b"newest" * 1000
    writer.close()


@pytest.mark.parametrize(
    ("name", "version", "compact"),
    pairwise(["caffe", "shuffled_small", "duplicates", "dupfixed_3", "integer_keys", "shrunk"], FORMATS, [False, True]),
)
def test_copy(made: Path, tmp_path: Path, name: str, version: int, compact: bool) -> None:
    path, db = make(made, name, version)
    pairs = oracle(path, db)
    (tmp_path / "copy").mkdir()
    with ours.open(os.path.dirname(path), readonly=True) as env:
        env.copy(tmp_path / "copy", compact=compact)
        with pytest.raises(ours.Error):
            env.copy(tmp_path / "copy")
        with open(tmp_path / "fd", "wb") as file:
            env.copyfd(file.fileno(), compact=compact)
    copied = os.fspath(tmp_path / "copy" / "data.mdb")
    assert oracle(copied, db) == pairs
    assert Path(copied).read_bytes() == (tmp_path / "fd").read_bytes()
    with real.open(os.path.dirname(copied), max_dbs=2) as env:
        before = env.open_db(db) if db else None
        with env.begin(write=True, db=before) as txn:
            assert txn.put(b"new\0" + b"1234", b"1")


def test_truncated(made: Path, tmp_path: Path) -> None:
    """An exception with path, page and offset, where py-lmdb dies of SIGBUS."""
    path, _ = make(made, "caffe", 1)
    raw = Path(path).read_bytes()
    cut = tmp_path / "cut.mdb"
    # Its tree is whole, the last values are not.
    cut.write_bytes(raw[: len(raw) - 400 * 4096 + 100])
    env = ours.open(os.fspath(cut), subdir=False, readonly=True)
    errors = []
    with env.begin() as txn:
        for i in range(2500):
            try:
                assert txn.get(b"%08d" % i)
            except ours.Error as e:
                errors.append(e)
    assert errors
    assert isinstance(errors[0], ours.CorruptedError)
    assert (errors[0].path, errors[0].offset) == (os.fspath(cut), errors[0].page * 4096)
    assert "cut off" in str(errors[0])


def test_pathological_words(tmp_path: Path, made: Path) -> None:
    """A value of 4 GB minus one in a small file asks for no memory."""
    path, _ = make(made, "one_record", 1)
    raw = bytearray(Path(path).read_bytes())
    page = next(p for p in range(2, len(raw) // 4096) if raw[p * 4096 + 10] == 2)
    node = page * 4096 + struct.unpack_from("<H", raw, page * 4096 + 16)[0]
    struct.pack_into("<IH", raw, node, 0xFFFFFFFF, 1)
    place = tmp_path / "large.mdb"
    place.write_bytes(raw)
    env = ours.open(os.fspath(place), subdir=False, readonly=True)
    with env.begin() as txn, pytest.raises(ours.CorruptedError):
        txn.get(b"only")


def test_no_real_lmdb_needed() -> None:
    """Without it, the classes stand alone."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['lmdb'] = None\n"
        "import pario.lmdb as l\n"
        "assert l.Error.__bases__ == (Exception,), l.Error.__bases__\n"
        "l.install()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
