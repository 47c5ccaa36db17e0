"""Interrupted packing: what is there is used, never trusted blindly, and never shown under the final name."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from pack_sources import FOLDERS, LMDBS, lmdb_truth, packed, unpacked

from pario.codec.packing import Packing
from pario.errors import ChecksumError, CorruptedError, FileError, InvalidError, ParioError
from pario.packing import flow, folder, partial, tars, writer
from pario.threads import Workers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few records, and a commit after each."""
    monkeypatch.setattr(flow, "_CHUNK", 16 << 10)
    monkeypatch.setattr(flow, "_LEAST_CHUNK", 16 << 10)
    monkeypatch.setattr(writer, "COMMIT_BYTES", 1)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "source")
    LMDBS["plain"](path)
    return path


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """stops(n): the writer fails at its n-th batch. Returns the list to which it adds the records of each batch."""
    append = writer.Writer._append

    def make(n: int) -> list[int]:
        written: list[int] = []

        def counted(self: Any, batches: list[writer.Batch]) -> None:
            if len(written) == n:
                raise OSError(5, "Input/output error")
            written.append(sum(len(batch.keys) for batch in batches))
            append(self, batches)

        monkeypatch.setattr(writer.Writer, "_append", counted)
        return written

    return make


@pytest.mark.parametrize("block", ["no", "auto"])
def test_it_goes_on_where_it_stopped(
    source: str, tmp_path: Path, stops: Callable[[int], list[int]], block: str
) -> None:
    packed([source], str(tmp_path / "whole"), block=block)
    stored = len(lmdb_truth(str(tmp_path / "whole"))[None][1])
    assert (stored < 200) == (block == "auto"), "blocks of several records"
    target, said = str(tmp_path / "packed"), []
    before = stops(3)
    with pytest.raises(FileError, match="Input/output error"):
        packed([source], target, block=block)
    assert sorted(os.listdir(tmp_path)) == ["packed.part", "source", "whole"]
    after = stops(-1)
    packed([source], target, said, block=block)
    assert said[0].startswith("going on with"), said
    assert sum(before) + sum(after) == stored
    assert sum(before) > 0
    assert sum(after) > 1
    assert lmdb_truth(target) == lmdb_truth(str(tmp_path / "whole")), "with the dictionary it was begun with"
    assert sorted(os.listdir(tmp_path)) == ["packed", "source", "whole"]


@pytest.mark.parametrize("block", ["no", "auto"])
def test_what_was_stopped_while_it_verified_is_verified(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str
) -> None:
    """All entries are there, the reserved one, too, which is written once: of blocks they are fewer than the records.
    """

    def stopped(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    target = str(tmp_path / "packed")
    with monkeypatch.context() as patch:
        patch.setattr(flow.Crew, "compare", stopped)
        with pytest.raises(OSError, match="Input/output"):
            packed([source], target, block=block)
    packed([source], target, block=block)
    unpacked(target, str(tmp_path / "again"))
    assert lmdb_truth(str(tmp_path / "again")) == lmdb_truth(source)


def test_a_failed_batch_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait behind it are not written: there would be a hole, and the next run would count them as done."""
    (tmp_path / "made").mkdir()
    made = writer.Writer(Workers("write", 1), str(tmp_path / "made"), subdir=True, databases=0)
    assert made.begin(None, 0, []) == 0
    append, reached, go_on, calls = writer.Writer._append, threading.Event(), threading.Event(), []

    def failing(self: Any, batches: list[writer.Batch]) -> None:
        append(self, batches)
        calls.append(len(batches))
        if len(calls) == 2:
            reached.set()
            assert go_on.wait(60)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer.Writer, "_append", failing)
    value = np.frombuffer(b"value", np.uint8)
    batches = [[writer.Batch([b"%d" % i], np.array([5]), value)] for i in range(4)]
    made.append(batches[0])
    made.append(batches[1])
    assert reached.wait(60)
    made.append(batches[2])  # waits in the queue
    go_on.set()
    with pytest.raises(FileError, match="Input/output error"):
        made.flush()
    for again in (lambda: made.begin(None, 0, []), lambda: made._do(made._append, batches[3]), made.flush):
        with pytest.raises(FileError, match="Input/output error"):
            again()
    made.close()
    assert [key for key, _ in lmdb_truth(str(tmp_path / "made"))[None][1]] == [b"0", b"1"]


@pytest.mark.parametrize("change", ["source", "codec"])
def test_what_has_changed_starts_anew(
    change: str, source: str, tmp_path: Path, stops: Callable[[int], list[int]]
) -> None:
    target, said = str(tmp_path / "packed"), []
    stops(2)
    with pytest.raises(FileError):
        packed([source], target)
    stops(-1)
    if change == "source":
        with lmdb.open(source, map_size=64 << 20) as env, env.begin(write=True) as txn:
            txn.put(b"000000", b"another value")
        packed([source], target, said)
    else:
        packed([source], target, said, codec="zstd:7")
    assert f"starts anew: it was begun for another {change}" in said[0]
    unpacked(target, str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(source)


def test_a_damaged_partial_file_starts_anew(source: str, tmp_path: Path, stops: Callable[[int], list[int]]) -> None:
    target, said = str(tmp_path / "packed"), []
    stops(2)
    with pytest.raises(FileError):
        packed([source], target)
    stops(-1)
    (tmp_path / "packed.part/data.mdb").write_bytes(b"nothing" * 4096)
    packed([source], target, said)
    assert any("starts anew" in line for line in said), said
    unpacked(target, str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(source)


@pytest.mark.parametrize("lost", [None, pytest.param(b"damaged", marks=pytest.mark.full)])
def test_a_packing_that_is_lost_is_not_replaced(
    lost: bytes | None, source: str, tmp_path: Path, stops: Callable[[int], list[int]]
) -> None:
    """A new dictionary would not fit the values that are there."""
    target, said = str(tmp_path / "packed"), []
    stops(2)
    with pytest.raises(FileError):
        packed([source], target, codec="raw")
    after = stops(-1)
    (tmp_path / "packed.part/packing-0").unlink()
    if lost is not None:
        (tmp_path / "packed.part/packing-0").write_bytes(lost)
    packed([source], target, said, codec="raw", verify=False)
    assert any("how its values are packed is lost" in line for line in said), said
    assert sum(after) == len(lmdb_truth(source)[None][1]) + 1, "all of it"


def test_the_state_is_thrown_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that is killed then leaves what the next one goes on with."""
    begun = partial.Partial(str(tmp_path / "x"))
    begun.open({"one": 1}, lambda line: None)
    for name in ("a", "data.mdb", "z"):
        begun.keep(name, b"")
    begun.close()
    gone, unlink = [], os.unlink
    monkeypatch.setattr(os, "listdir", lambda _: ["a", "data.mdb", "state.json", "z"])
    monkeypatch.setattr(os, "unlink", lambda path: (gone.append(os.path.basename(path)), unlink(path)))
    begun.open({"one": 2}, lambda line: None)
    begun.close()
    assert gone[0] == "state.json"
    assert sorted(gone) == ["a", "data.mdb", "state.json", "z"]


def test_nobody_elses_partial_file_is_used(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / "packed.part"
    part.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: part.stat().st_uid + 1)
        with pytest.raises(FileError, match="is not yours"):
            packed([source], str(tmp_path / "packed"))
    part.rmdir()
    part.symlink_to(tmp_path)
    with pytest.raises(FileError, match="is not yours"):
        packed([source], str(tmp_path / "packed"))
    part.unlink()
    part.mkdir()
    part.chmod(0o777)
    (part / "data.mdb").write_bytes(b"planted")
    said: list[str] = []
    packed([source], str(tmp_path / "packed"), said)
    assert "others could write to it" in said[0]


@pytest.mark.parametrize("left", ["all", "state", "nothing"])
def test_what_was_killed_after_the_name_was_given_is_tidied_up(
    left: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, part = str(tmp_path / "target"), tmp_path / "target.part"
    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "remove", partial.Partial.close)
        packed([source], target)
    before = lmdb_truth(target)
    assert (part / "data.mdb").samefile(os.path.join(target, "data.mdb"))
    for name in {"all": [], "state": ["data.mdb"], "nothing": os.listdir(part)}[left]:
        (part / name).unlink()
    with pytest.raises(FileError, match="it exists already"):
        packed([source], target)
    assert not part.exists()
    assert lmdb_truth(target) == before


def test_a_refusal_leaves_what_is_not_pario_s_or_not_done(
    source: str, tmp_path: Path, stops: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, part = tmp_path / "target", tmp_path / "target.part"
    target.mkdir()
    (target / "data.mdb").write_bytes(b"precious")
    stops(2)
    with pytest.raises(FileError, match="Input/output error"):
        packed([source], str(target), force=True)
    monkeypatch.undo()
    kept = sorted(os.listdir(part))
    with pytest.raises(FileError, match="it exists already"):
        packed([source], str(target))
    assert sorted(os.listdir(part)) == kept
    for name in kept:
        (part / name).unlink()
    (part / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match="it exists already"):
        packed([source], str(target))
    assert os.listdir(part) == ["notes.txt"]


def test_two_at_once_are_refused(source: str, tmp_path: Path) -> None:
    part = tmp_path / "packed.part"
    part.mkdir(mode=0o700)
    fd = os.open(part, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(FileError, match="another process"):
        packed([source], str(tmp_path / "packed"))
    os.close(fd)


def test_a_wrong_value_never_gets_the_final_name(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose checksum is right: it is compared with the source."""
    pack_many = Packing.pack_many

    def swapped(self: Packing, records: Any) -> Any:
        data = records.data.copy()
        data[records.starts[0] + 3] ^= 1
        return pack_many(self, type(records)(records.ids, data, records.starts, records.nbytes))

    monkeypatch.setattr(Packing, "pack_many", swapped)
    with pytest.raises(ChecksumError, match="not that of its source"):
        packed([source], str(tmp_path / "packed"), dictionary="no", block="no")
    assert os.listdir(tmp_path) == ["source"]


def test_only_what_is_wrong_is_thrown_away(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged source, or an error of the store, while all is read back costs no work that is done."""

    def failing(*_: object) -> None:
        raise CorruptedError("a packed value is damaged", path=source + "/data.mdb")

    monkeypatch.setattr(flow, "_compare", failing)
    with pytest.raises(CorruptedError, match="value is damaged"):
        packed([source], str(tmp_path / "packed"), codec="raw")
    assert (tmp_path / "packed.part/data.mdb").exists()


def test_a_damaged_new_file_is_not_gone_on_with(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a damaged value is that of the unfinished file."""
    compare = flow.Crew.compare

    def damaged(self: Any, items: Any, others: Any, path: str, moved: Any) -> None:
        others.packing.unpack = lambda *_: [(0, "made up")]
        compare(self, items, others, path, moved)

    monkeypatch.setattr(flow.Crew, "compare", damaged)
    with pytest.raises(CorruptedError, match="made up"):
        packed([source], str(tmp_path / "packed"), codec="raw")
    assert os.listdir(tmp_path) == ["source"]


def entry_of(path: str) -> tuple[bytes, bytes]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn, txn.cursor() as cursor:
        assert cursor.last()
        return bytes(cursor.key()), bytes(cursor.value())


def rewrite(path: str, key: bytes, value: bytes) -> None:
    with lmdb.open(path, map_size=1 << 30) as env, env.begin(write=True) as txn:
        txn.put(key, value)


def test_damage_is_named(source: str, tmp_path: Path) -> None:
    target, back = str(tmp_path / "packed"), str(tmp_path / "back")
    packed([source], target, block="no")
    key, entry = entry_of(target)
    length = int.from_bytes(entry[8:12], "little")
    said = json.loads(entry[12 : 12 + length])
    begin, size = said["codecs"][0]["dictionary"]
    assert size > 1000, "these records get a dictionary"
    for at in (9, 20, 12 + length + begin + size // 2, len(entry) - 1):
        rewrite(target, key, entry[:at] + bytes([entry[at] ^ 4]) + entry[at + 1 :])
        with pytest.raises(CorruptedError, match=rf"reserved entry.*damaged.*{target}"):
            unpacked(target, back)
    rewrite(target, key, entry)
    value = dict(lmdb_truth(target)[None][1])[b"000123"]
    rewrite(target, b"000123", value[:-1] + bytes([value[-1] ^ 1]))
    with pytest.raises(CorruptedError, match=r"record 123, key b'000123'"):
        unpacked(target, back)
    rewrite(target, b"000123", value)
    unpacked(target, back)
    assert lmdb_truth(back) == lmdb_truth(source)


def test_a_compressed_tar_that_is_damaged_and_one_without_room(tmp_path: Path) -> None:
    """The message names the file that is to be looked at."""
    whole = gzip.compress(np.random.default_rng(1).bytes(100_000))
    (tmp_path / "cut.tar.gz").write_bytes(whole[:5000])
    (tmp_path / "whole.tar.gz").write_bytes(whole)
    with pytest.raises(InvalidError, match=r"compressed tar is damaged.*cut\.tar\.gz"):
        tars.inflate(str(tmp_path / "cut.tar.gz"), str(tmp_path / "made"))
    with pytest.raises(FileError, match=r"No space left.*/dev/full.*Make room"):
        tars.inflate(str(tmp_path / "whole.tar.gz"), "/dev/full")


def test_names_never_lead_out_of_the_folder(tmp_path: Path) -> None:
    def part(*rows: tuple[Any, ...]) -> bytes:
        whole = [("", 0o40755, 0, 0, 0, None), *rows]
        return zlib.compress(json.dumps({"rows": whole, "users": {}, "groups": {}}).encode())

    good = part(("a", 0o40755, 0, 0, 0, None), ("a/b", 0o100644, 0, 0, 0, None))
    assert len(folder.Restorer(str(tmp_path), good, "x").files) == 1
    for bad in ("../b", "/etc/b", "a/../../b", "a//b", "a/./b", "c/b", "a\0b", "a"):
        with pytest.raises(CorruptedError, match="leads elsewhere"):
            folder.Restorer(
                str(tmp_path), part(("a", 0o40755, 0, 0, 0, None), (bad, 0o100644, 0, 0, 0, None)), "x"
            )
    with pytest.raises(CorruptedError, match="leads elsewhere"):  # through a link
        folder.Restorer(str(tmp_path), part(("a", 0o120777, 0, 0, 0, "/etc"), ("a/b", 0o100644, 0, 0, 0, None)), "x")
    with pytest.raises(CorruptedError, match="leads to no file"):
        folder.Restorer(str(tmp_path), part(("a", 0o100644, 0, 0, 0, "../../etc/passwd")), "x")
    for junk in (b"", b"junk", zlib.compress(b"{}"), zlib.compress(b"[]"), zlib.compress(b'{"rows": [[1]]}')):
        with pytest.raises(CorruptedError, match="damaged"):
            folder.Restorer(str(tmp_path), junk, "x")


def test_a_file_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    FOLDERS["tree"](str(source))
    read = folder.FileItems.read

    def changed(self: Any, ids: np.ndarray) -> Any:
        (source / "deep/7.txt").write_bytes(b"something else")
        return read(self, ids)

    monkeypatch.setattr(folder.FileItems, "read", changed)
    with pytest.raises(ParioError, match=r"changed while the folder was packed.*deep/7\.txt"):
        packed([str(source)], str(tmp_path / "packed"))
    assert not (tmp_path / "packed").exists()


# -- killed ------------------------------------------------------------------------------------------------------------

#: as `python -m pario`, in small steps
SLOW = """
import sys
from pario.packing import flow, writer
flow._CHUNK = flow._LEAST_CHUNK = 64 << 10
writer.COMMIT_BYTES = 32 << 10
from pario.cli import main
sys.exit(main(sys.argv[1:]))
"""


def large(path: str) -> None:
    rng = np.random.default_rng(9)
    with lmdb.open(path, map_size=256 << 20, max_dbs=4, sync=False) as env:
        for name, n in ((None, 3000), (b"a", 2000), (b"b", 10)):
            handle = env.open_db(name)
            with env.begin(write=True, db=handle) as txn:
                for i in range(n):
                    txn.put(b"%06d" % i, rng.bytes(2000) + bytes(1500))


@pytest.mark.full
@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_killed_at_random_moments(command: str, tmp_path: Path) -> None:
    """Afterwards there is no DST, or all of it, and the next run goes on. PARIO_KILLS : how many kills."""
    wanted = int(os.environ.get("PARIO_KILLS", "12"))
    source, middle = tmp_path / "source", tmp_path / "middle"
    large(str(source))
    truth = lmdb_truth(str(source))
    given = source
    if command == "unpack":
        packed([str(source)], str(middle))
        given = middle
    moments, kills, targets, lasts, fresh = random.Random(5), 0, 0, 60.0, True
    whole = truth if command == "unpack" else {}
    while kills < wanted:
        target = tmp_path / f"target{targets}"
        # The first run takes as long as it takes; later ones are killed at any time after the imports.
        limit = None if targets == 0 else moments.uniform(0.4, 1.0) * lasts
        begin, done = time.monotonic(), _run(command, given, target, limit)
        kills += not done
        if done and fresh:
            lasts = time.monotonic() - begin
        if target.exists():
            found = lmdb_truth(str(target))
            whole = whole or found
            assert found == whole, f"after {kills} kills"
        else:
            assert not done
        # It may have been killed after the end of its work.
        fresh = done and target.exists()
        targets += fresh
        assert targets < 4 * wanted, f"{kills} kills only"
    _run(command, given, target, None)
    assert sorted(name.name for name in tmp_path.iterdir() if name.suffix == ".part") == []
    if command == "pack":
        unpacked(str(target), str(tmp_path / "back"))
        assert lmdb_truth(str(tmp_path / "back")) == truth


def _run(command: str, given: Path, target: Path, limit: float | None) -> bool:
    """Run it, and kill it after `limit` seconds; returns whether it came to its end."""
    argv = [sys.executable, "-c", SLOW, command, str(given), str(target)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    existed = target.exists()  # the last kill came after the end of the work: this run only tidies up
    limit = None if existed else limit
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        output.seek(0)
        said = output.read().decode()
        assert "it exists already" in said if existed else status == 0, said
    return True
