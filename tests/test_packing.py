"""pack, then unpack: what comes back is what was there, told by py-lmdb, the system and the standard library."""

from __future__ import annotations

import glob
import gzip
import hashlib
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import lz4.frame
import numpy as np
import pytest
import zstandard
from datasets import MAKERS, Made
from layouts import LAYOUTS, write
from pack_sources import FOLDERS, LMDBS, TARS, lmdb_truth, packed, tree_truth, unpacked

from pario import Loader, Reader
from pario.codec import trial
from pario.comm.base import AnyWorld
from pario.errors import DatabaseError, FileError, InvalidError, OptionError, SnapshotError
from pario.files.tree import Tree
from pario.packing import sources
from pario.packing.folder import read_tree
from pario.packing.items import Database, Items, open_items

ROOT = Path(__file__).resolve().parent.parent


def keys_of(path: str) -> list[bytes]:
    (found,) = lmdb_truth(path).values()
    return [key for key, _ in found[1]]


@pytest.mark.parametrize("block", ["no", "1k"])
@pytest.mark.parametrize("kind", LMDBS)
def test_an_lmdb_comes_back(kind: str, block: str, tmp_path: Path) -> None:
    source, middle, back = (str(tmp_path / name) for name in ("source", "packed.lmdb", "back"))
    LMDBS[kind](source)
    truth = lmdb_truth(source)
    made = packed([source], middle, block=block)
    assert made.records == sum(len(records) for _, records in truth.values())
    assert sorted(os.listdir(middle)) == ["data.mdb"], "a folder, as the source is, and nothing beside it"
    stored = lmdb_truth(middle)
    assert stored.keys() == truth.keys()
    for name, (flags, records) in truth.items():
        assert stored[name][0] == flags
        raw = bool(flags.get("dupsort")) or (name is not None and not records)
        if raw:
            assert stored[name][1] == records
        elif block == "no":
            assert [key for key, _ in stored[name][1]][: len(records)] == [key for key, _ in records]
            assert len(stored[name][1]) - len(records) == (0 if kind == "no_record" else 1)
    unpacked(middle, back)
    assert lmdb_truth(back) == truth
    assert sorted(os.listdir(tmp_path)) == ["back", "packed.lmdb", "source"], "nothing is left behind"


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_comes_back(kind: str, tmp_path: Path) -> None:
    source, middle, back = (str(tmp_path / name) for name in ("source", "packed.lmdb", "back"))
    FOLDERS[kind](source)
    truth = tree_truth(source)
    packed([source], middle)
    assert os.path.isfile(middle), "one file"
    files = sorted(os.fsencode(name) for name, (_, _, content) in truth.items() if isinstance(content, tuple))
    assert keys_of(middle)[:-1] == files
    unpacked(middle, back)
    assert tree_truth(back) == truth


@pytest.mark.parametrize("kind", ["pax", "squeezed", *(pytest.param(k, marks=pytest.mark.full) for k in ("gnu", "xz"))])
def test_a_tar_comes_back_byte_by_byte(kind: str, tmp_path: Path) -> None:
    TARS[kind](str(tmp_path / "source"))
    (source,) = glob.glob(str(tmp_path / "source*"))
    middle, back = str(tmp_path / "packed.lmdb"), str(tmp_path / "back.tar")
    packed([source], middle)
    with tarfile.open(source) as tar:
        members = {m.name.removeprefix("./").encode(): tar.extractfile(m) for m in tar if m.isreg() or m.islnk()}
        truth = {name: file.read() for name, file in members.items() if file is not None}
    assert keys_of(middle)[:-1] == sorted(truth)
    unpacked(middle, back)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(source)[1], open)
    with opener(source, "rb") as file:
        assert Path(back).read_bytes() == file.read()
    with lmdb.open(middle, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        assert bytes(txn.get(b"twice")[5:]) == b"the second"  # too short to compress: behind slot and checksum


@pytest.mark.parametrize("ending", ["zst", "lz4", "two.zst"])
def test_a_tar_of_a_newer_kind_comes_back(ending: str, tmp_path: Path) -> None:
    """Compressed by the tools' libraries; also in two frames, of which zstd's own reader sees the first one only."""
    TARS["gnu"](str(tmp_path / "source"))
    raw = (tmp_path / "source.tar").read_bytes()
    halves = (raw[:40_000], raw[40_000:]) if ending == "two.zst" else (raw,)
    squeeze = lz4.frame.compress if ending == "lz4" else zstandard.compress
    source, middle, back = (str(tmp_path / name) for name in (f"a.tar.{ending}", "packed.lmdb", "back.tar"))
    whole = b"".join(map(squeeze, halves))
    Path(source).write_bytes(whole)
    packed([source], middle)
    for target, opener in ((back, open), (f"{back}.zst", zstandard.open), (f"{back}.lz4", lz4.frame.open)):
        unpacked(middle, target)
        with opener(target, "rb") as file:
            assert file.read() == raw
    Path(source).write_bytes(whole[:-5])
    with pytest.raises(InvalidError, match="compressed tar is damaged" if ending == "two.zst" else "damaged|neither"):
        packed([source], middle, force=True)


def test_a_tar_that_is_damaged_names_the_member(tmp_path: Path) -> None:
    TARS["gnu"](str(tmp_path / "source"))
    source = tmp_path / "source.tar"
    raw = source.read_bytes()
    with tarfile.open(source) as tar:
        inside, behind = tar.getmember("folder/7.json"), tar.getmember("folder/8.json")
    source.write_bytes(raw[: inside.offset_data + 10])
    with pytest.raises(InvalidError, match=r"folder/7\.json"):
        packed([str(source)], str(tmp_path / "packed"))
    source.write_bytes(raw[: behind.offset] + b"\xff" * 512 + raw[behind.offset + 512 :])
    with pytest.raises(InvalidError, match=r"behind the member b'folder/7\.json'"):
        packed([str(source)], str(tmp_path / "packed"))


def test_chosen_databases(tmp_path: Path) -> None:
    source, middle, back = (str(tmp_path / name) for name in ("source", "packed.lmdb", "back"))
    LMDBS["all_kinds"](source)
    truth = lmdb_truth(source)
    packed([source], middle, dbs=["int", "dup"])
    unpacked(middle, back)
    assert lmdb_truth(back) == {None: ({}, []), b"int": truth[b"int"], b"dup": truth[b"dup"]}
    with pytest.raises(DatabaseError, match="there is no database 'more'"):
        packed([source], str(tmp_path / "other"), dbs=["more"])


def test_a_database_that_cannot_be_packed_stops_no_other(tmp_path: Path) -> None:
    """One whose duplicates are compared from the end: py-lmdb reads the flag, and cannot set it."""
    source, middle, said = str(tmp_path / "source"), str(tmp_path / "packed.lmdb"), list[str]()
    LMDBS["all_kinds"](source)
    truth = lmdb_truth(source)
    file = tmp_path / "source" / "data.mdb"
    raw = file.read_bytes()
    flags = re.compile(rb"(dupfixed(?:.{4}))\x14\0", re.DOTALL)  # DUPSORT, DUPFIXED
    assert flags.search(raw)
    file.write_bytes(flags.sub(lambda found: found[1] + b"\x54\0", raw))
    packed([source], middle, said)
    (left_out,) = (line for line in said if "left out" in line)
    assert "'dupfixed', whose duplicates are compared from the end" in left_out
    unpacked(middle, str(tmp_path / "back"))
    del truth[b"dupfixed"]
    assert lmdb_truth(str(tmp_path / "back")) == truth
    with pytest.raises(OptionError, match="'dupfixed', whose duplicates are compared from the end, which py-lmdb"):
        packed([source], str(tmp_path / "none"), dbs=["dupfixed"])


def test_several_sources(tmp_path: Path) -> None:
    """Their names are prefixes; each comes back as it was."""
    FOLDERS["tree"](str(tmp_path / "images"))
    LMDBS["plain"](str(tmp_path / "labels.lmdb"))
    TARS["gnu"](str(tmp_path / "more"))
    given = [str(tmp_path / name) for name in ("labels.lmdb", "images", "more.tar")]
    middle, back = str(tmp_path / "packed.lmdb"), tmp_path / "back"
    packed(given, middle)
    keys = keys_of(middle)[:-1]
    assert keys == sorted(keys)
    assert {key.split(b"/")[0] for key in keys} == {b"images", b"labels", b"more"}
    unpacked(middle, str(back))
    assert tree_truth(str(back / "images")) == tree_truth(given[1])
    assert lmdb_truth(str(back / "labels.lmdb")) == lmdb_truth(given[0])
    assert os.listdir(back / "labels.lmdb") == ["data.mdb"], "without LMDB's lock file"
    assert (back / "more.tar").read_bytes() == Path(given[2]).read_bytes()


def test_several_sources_without_a_prefix(tmp_path: Path) -> None:
    for number, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        for i in range(20):
            (tmp_path / folder / f"{2 * i + number:03d}").write_bytes(b"%d" % i * 50)
    given = [str(tmp_path / "a"), str(tmp_path / "b")]
    packed(given, str(tmp_path / "packed"), prefix=False)
    assert keys_of(str(tmp_path / "packed"))[:-1] == [b"%03d" % i for i in range(40)]
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert tree_truth(str(tmp_path / "back/b")) == tree_truth(given[1])
    (tmp_path / "b" / "006").write_bytes(b"twice")
    with pytest.raises(OptionError, match=r"1 key is in two sources: b'006' is in \S*/a and in \S*/b"):
        packed(given, str(tmp_path / "other"), prefix=False)


def test_a_packed_database_can_be_packed_again(tmp_path: Path) -> None:
    LMDBS["plain"](str(tmp_path / "source"))
    packed([str(tmp_path / "source")], str(tmp_path / "one"), codec="raw")
    packed([str(tmp_path / "one")], str(tmp_path / "two"), codec="zstd:12")
    unpacked(str(tmp_path / "two"), str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(str(tmp_path / "source"))


@pytest.mark.parametrize("kind", ["folder", pytest.param("several", marks=pytest.mark.full)])
def test_a_packed_folder_can_be_packed_again(kind: str, tmp_path: Path) -> None:
    """And is a folder when it is unpacked."""
    given = [str(tmp_path / "source"), str(tmp_path / "tar.tar")][: 1 + (kind == "several")]
    FOLDERS["tree"](given[0])
    TARS["gnu"](str(tmp_path / "tar"))
    packed(given, str(tmp_path / "one"), codec="raw", verify=False)
    packed([str(tmp_path / "one")], str(tmp_path / "two"), codec="lz4", dictionary="no", verify=False)
    unpacked(str(tmp_path / "two"), str(tmp_path / "back"))
    assert tree_truth(str(tmp_path / "back" / ("source" if kind == "several" else ""))) == tree_truth(given[0])
    if kind == "several":
        assert (tmp_path / "back/tar.tar").read_bytes() == (tmp_path / "tar.tar").read_bytes()
    with pytest.raises(OptionError, match=f"packed from {kind}, .* cannot be one of several"):
        packed([str(tmp_path / "one"), str(tmp_path / "tar.tar")], str(tmp_path / "three"))


def test_an_lmdb_that_is_written_to_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its databases are opened one by one, and would be of two states."""
    source = str(tmp_path / "source")
    with lmdb.open(source, map_size=1 << 20, max_dbs=2) as env:
        handles = [env.open_db(name) for name in (b"one", b"two")]

        def write(value: bytes) -> None:
            with env.begin(write=True) as txn:
                for db in handles:
                    for key in (b"a", b"b"):
                        txn.put(key, value, db=db)

        def opened(database: Database, world: AnyWorld) -> Items:
            try:
                return open_items(database, world)
            finally:
                if database.name == b"one":
                    write(b"new")

        write(b"old")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "open_items", opened)
            with pytest.raises(SnapshotError, match="written to while it was opened"):
                packed([source], str(tmp_path / "packed"), codec="raw")
        packed([source], str(tmp_path / "packed"), codec="raw")


def test_values_that_are_too_large_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LMDBS["plain"](str(tmp_path / "source"))
    monkeypatch.setattr("pario.packing.pack.MOST", 299_999)
    with pytest.raises(OptionError, match=r"a value has 300,000 bytes, .* at most 299,999 .*key b'large'"):
        packed([str(tmp_path / "source")], str(tmp_path / "packed"))
    monkeypatch.setattr("pario.packing.pack.MOST", 300_000)
    packed([str(tmp_path / "source")], str(tmp_path / "packed"), codec="raw", verify=False)


@pytest.mark.parametrize("codec", ["lz4hc", pytest.param("auto", marks=pytest.mark.full)])
def test_other_codecs(codec: str, tmp_path: Path) -> None:
    LMDBS["plain"](str(tmp_path / "source"))
    said: list[str] = []
    packed([str(tmp_path / "source")], str(tmp_path / "packed"), said, codec=codec)
    assert (codec == "auto") == any("choose" in line for line in said), said
    with Reader(str(tmp_path / "packed")) as reader:
        assert reader.packing is not None
        assert (codec == "auto") == ("prediction" in reader.packing.more)
    with Loader(str(tmp_path / "packed"), 16) as loader:
        assert sum(len(batch.ids) for batch in loader) == 603
        assert (codec == "auto") == ("the prediction for" in str(loader.report()))
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(str(tmp_path / "source"))
    with pytest.raises(OptionError, match="no codec is called"):
        packed([str(tmp_path / "source")], str(tmp_path / "other"), codec="zip")


@pytest.mark.parametrize("aim", ["capacity", "speed"])
def test_the_choice_says_what_it_was_made_for(aim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CANDIDATES", ("raw", "zstd:1"))
    monkeypatch.setattr(trial, "DICTIONARIES", ())
    source, said = str(tmp_path / "source"), list[str]()
    LMDBS["plain"](source)
    packed([source], str(tmp_path / "packed"), said, codec="auto", aim=aim)
    assert any(f"chosen for {aim} by samples" in line for line in said), said
    with Reader(str(tmp_path / "packed")) as reader:
        assert reader.packing is not None
        assert reader.packing.more["prediction"]["for"] == aim
    with pytest.raises(OptionError, match="--for says what a codec is chosen for"):
        packed([source], str(tmp_path / "other"), codec="zstd:3", aim="speed")


def test_what_exists_is_not_replaced(tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), tmp_path / "target"
    LMDBS["one_record"](source)
    target.write_bytes(b"precious")
    with pytest.raises(FileError, match="exists already"):
        packed([source], str(target))
    assert target.read_bytes() == b"precious"
    packed([source], str(tmp_path / "packed"))
    with pytest.raises(FileError, match="exists already"):
        packed([source], str(tmp_path / "packed"))
    packed([source], str(tmp_path / "packed"), force=True)
    with pytest.raises(OptionError, match="SRC itself"):
        packed([source], source, force=True)
    with pytest.raises(OptionError, match="lies in it"):
        packed([str(tmp_path)], str(tmp_path / "inside"))
    with pytest.raises(FileError, match="neither an LMDB nor a tar"):
        packed([str(target)], str(tmp_path / "other"))


def test_a_path_that_is_no_key_is_named(tmp_path: Path) -> None:
    deep = tmp_path / "source" / "/".join(["d" * 100] * 6)
    deep.mkdir(parents=True)
    packed([str(tmp_path / "source")], str(tmp_path / "folders only"))
    (deep / "file").write_bytes(b"content")
    with pytest.raises(OptionError, match="has 610 bytes, and keys of an LMDB have at most 511"):
        packed([str(tmp_path / "source")], str(tmp_path / "packed"))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "source", arcname="")
    with pytest.raises(OptionError, match="has 610 bytes, and keys of an LMDB have at most 511"):
        packed([str(tmp_path / "a.tar")], str(tmp_path / "packed"), dictionary="no")


def test_a_path_that_is_too_long_may_have_a_key_that_is_not_it(tmp_path: Path) -> None:
    """Of a folder and a tar; of several sources the prefix leaves no room. Its digest is that of hashlib."""
    source = tmp_path / "source"
    deep = source / "/".join(["d" * 100] * 6)
    deep.mkdir(parents=True)
    for name in ("b", "a"):
        (deep / name).write_bytes(name.encode())
    (source / ("d" * 100) / "short").write_bytes(b"short")
    truth = tree_truth(str(source))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(source, arcname="")
    long = [os.fsencode((deep / name).relative_to(source)) for name in "ab"]
    keys = [path[:477] + b"%~" + hashlib.blake2b(path, digest_size=16).hexdigest().encode() for path in long]
    target = str(tmp_path / "packed")
    for given in (source, tmp_path / "a.tar"):
        packed([str(given)], target, keys="hash", force=True)
        assert keys_of(target)[:-1] == sorted([*keys, b"d" * 100 + b"/short"])
        with Tree({"": target}) as tree:
            assert [tree.read(os.fsdecode(path)) for path in long] == [b"a", b"b"]
            assert [name for name, _ in tree.names("/".join(["d" * 100] * 6))] == ["a", "b"]
        unpacked(target, str(tmp_path / "back"), force=True)
        if given == source:
            assert tree_truth(str(tmp_path / "back")) == truth
            shutil.rmtree(tmp_path / "back")
        else:
            assert (tmp_path / "back").read_bytes() == (tmp_path / "a.tar").read_bytes()
    with pytest.raises(FileError, match="longer than the 511 bytes"):
        packed([str(source), str(tmp_path / "a.tar")], str(tmp_path / "both"), keys="hash", dictionary="no")


def snapshot(top: Path) -> Path:
    """As Hugging Face keeps files, a subset of folders, links round and round, and one into what a link led to."""
    (top / "blobs/deep").mkdir(parents=True)
    for i in range(3):
        (top / f"blobs/deep/{i}").write_bytes(b"blob %d" % i)
    os.link(top / "blobs/deep/1", top / "blobs/deep/same")
    (top / "blobs/inside").symlink_to("deep/0")
    (top / "blobs/back").symlink_to("..")
    source = top / "here/snapshot"
    source.mkdir(parents=True)
    (source / "own").write_bytes(b"own")
    for name, target in (
        *(("a", "../../blobs/deep/1"), ("b", str(top / "blobs/deep/same")), ("folder", "../../blobs")),
        *(("mine", "own"), ("up", "../.."), ("nowhere", "x"), ("fixed", str(source / "own"))),
    ):
        (source / name).symlink_to(target)
    return source


def test_links_that_lead_out_are_followed(tmp_path: Path) -> None:
    source, said = snapshot(tmp_path), list[str]()
    packed([str(source)], str(tmp_path / "packed"), said)
    followed, kept, fixed = said
    assert "followed, and what they lead to is packed in their place: a, b, folder" in followed
    assert kept.endswith("what they lead to is not packed: up, folder/back")
    assert fixed.endswith("lead where they led before: fixed")
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    found, truth = tree_truth(str(tmp_path / "back")), tree_truth(str(source))
    whole = tree_truth(str(tmp_path / "blobs"))
    for name in ("own", "mine", "up", "nowhere", "fixed", "."):
        assert found[name] == truth[name]
    for name, there in (("a", "deep/1"), ("b", "deep/1"), ("folder/deep/0", "deep/0"), ("folder/deep/2", "deep/2")):
        mode, mtime, content = whole[there]
        assert found[name] == (mode, mtime, (content[0], name))  # type: ignore[index]
    assert found["folder/inside"] == whole["inside"]
    assert found["folder/deep/same"][2] == (b"blob 1", "folder/deep/1"), "names of one file stay that"
    assert len(found) == len(truth) + len(whole) - 1


def test_links_that_lead_out_are_kept(tmp_path: Path) -> None:
    source, said = snapshot(tmp_path), list[str]()
    truth = tree_truth(str(source))
    packed([str(source)], str(tmp_path / "packed"), said, links="keep")
    assert said[0].endswith("what they lead to is not packed: a, b, folder, up")
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert tree_truth(str(tmp_path / "back")) == truth
    (source / "own").unlink()
    said.clear()
    packed([str(source)], str(tmp_path / "none"), said, links="keep")
    assert any("no record is packed: the folder holds no file, 7 symbolic links" in line for line in said)


def test_links_to_pipes_and_devices_stay_links(tmp_path: Path) -> None:
    source, said = tmp_path / "source", list[str]()
    source.mkdir()
    (source / "own").write_bytes(b"own")
    os.mkfifo(tmp_path / "pipe")
    (source / "pipe").symlink_to("../pipe")
    (source / "null").symlink_to("/dev/null")
    truth = tree_truth(str(source))
    packed([str(source)], str(tmp_path / "packed"), said)
    assert said[0].endswith("what they lead to is not packed: null, pipe")
    assert not any("followed" in line or "left out" in line for line in said)
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert tree_truth(str(tmp_path / "back")) == truth


def test_folders_that_link_to_each_other_are_packed_once(tmp_path: Path) -> None:
    """Of 8 folders each with 7 links, every way through them would be a name of its own: 7! times e, 13,700."""
    (tmp_path / "source").mkdir()
    for i in range(8):
        (tmp_path / f"d{i}").mkdir()
        (tmp_path / f"d{i}/file").write_bytes(b"content")
        for k in range(8):
            if k != i:
                (tmp_path / f"d{i}/to{k}").symlink_to(tmp_path / f"d{k}")
    (tmp_path / "source/first").symlink_to("../d0")
    tree = read_tree(str(tmp_path / "source"))
    assert len(tree.followed) == 8
    assert [len(tree.kept), len(tree.sizes), len(tree.rows)] == [8 * 7 - 7, 8, 1 + 8 + 8 + 49]
    with pytest.raises(OptionError, match=r"more than 63 names.*--links keep"):
        read_tree(str(tmp_path / "source"), most=63)
    assert read_tree(str(tmp_path / "source"), most=64) == tree


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "source/sub").mkdir(parents=True)
    really = os.open

    def late(path: bytes, *more: int) -> int:
        if path.endswith(b"/sub"):
            (tmp_path / "source/sub").rmdir()
            (tmp_path / "source/sub").symlink_to("../outside")
        return really(path, *more)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(FileError, match="cannot read it"):
        read_tree(str(tmp_path / "source"))


def test_two_paths_of_one_key_are_named(tmp_path: Path) -> None:
    long = "/".join(letter * 200 for letter in "abc")
    short = long[:477] + "%~" + hashlib.blake2b(long.encode(), digest_size=16).hexdigest()
    for name in (long, short):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "source" / long).write_bytes(b"long")
    (tmp_path / "source" / short).write_bytes(b"short")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "source", arcname="")
    for given in ("source", "a.tar"):
        with pytest.raises(OptionError, match=f"(?s)(?=.*{long}')(?=.*{short}').*the same key"):
            packed([str(tmp_path / given)], str(tmp_path / given) + ".lmdb", keys="hash", dictionary="no")


def test_only_an_lmdb_has_named_databases(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "source", arcname="")
    for given, kind in (("source", "folder"), ("a.tar", "tar")):
        with pytest.raises(OptionError, match=f"this is a {kind}"):
            packed([str(tmp_path / given)], str(tmp_path / "packed"), dbs=("train",))
    LMDBS["all_kinds"](str(tmp_path / "lmdb"))
    packed([str(tmp_path / "lmdb")], str(tmp_path / "packed"), dbs=("int", "int"), dictionary="no")
    assert set(lmdb_truth(str(tmp_path / "packed"))) == {None, b"int"}


def test_py_lmdb_alone_reads_it(tmp_path: Path) -> None:
    """By the script that docs/packing.md shows, which knows nothing of pario."""
    script = ROOT / "examples" / "read_packed.py"
    page = (ROOT / "docs" / "packing.md").read_text()
    (shown,) = re.findall(r"(?ms)^\[examples/read_packed\.py\][^\n]*\n\n```python\n(.*?)^```$", page)
    assert shown == script.read_text()
    assert "pario" not in re.sub(r'"""(.*?)"""', "", shown)
    source, target = str(tmp_path / "source"), str(tmp_path / "packed")
    LMDBS["plain"](source)
    truth = dict(lmdb_truth(source)[None][1])
    for block in ("no", "auto"):
        packed([source], target, block=block, force=True)
        assert len(lmdb_truth(target)[None][1]) == len(truth) + 1 or block == "auto"
        given = [sys.executable, "-I", str(script), target, "000321"]
        assert subprocess.run(given, capture_output=True, check=True, timeout=60).stdout == truth[b"000321"]


@pytest.mark.parametrize("kind", ["folder", "tar.gz"])
def test_the_error_of_a_loader_names_the_line_that_helps(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "my data"
    source.mkdir()
    for name in "ab":
        (source / name).write_bytes(name.encode() * 3000)
    given = str(source)
    if kind != "folder":
        given = f"{tmp_path}/x.{kind}"
        with tarfile.open(given, "w:gz") as tar:
            tar.add(source, arcname="")
    with pytest.raises(FileError) as caught:
        Loader(given, 1, comm="self")
    words = shlex.split(re.findall(r"of (?:it|them): (python .*)", str(caught.value))[0])
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, timeout=60)
    with Reader(words[-1], comm="self") as reader:
        assert [value.tobytes() for value in reader.read(np.arange(2))] == [b"a" * 3000, b"b" * 3000]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_kind_of_lmdb_comes_back(name: str, dataset: Callable[[str], Made], tmp_path: Path) -> None:
    source = dataset(name).path
    packed([source], str(tmp_path / "packed"), codec="lz4hc" if name < "f" else "zstd:3")
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(source)


@pytest.mark.full
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_published_layouts_come_back(layout: str, tmp_path: Path) -> None:
    """Each of their LMDBs; a layout may be several."""
    write(LAYOUTS[layout], tmp_path / "sets")
    found = {path.parent if path.name == "data.mdb" else path for path in (tmp_path / "sets").rglob("*")}
    for number, path in enumerate(sorted(p for p in found if p.is_file() or (p / "data.mdb").exists())):
        if path.name.endswith("lock") or path.name == "lock.mdb":
            continue
        middle, back = str(tmp_path / f"packed{number}"), str(tmp_path / f"back{number}")
        packed([str(path)], middle)
        unpacked(middle, back)
        assert lmdb_truth(back) == lmdb_truth(str(path))


@pytest.mark.full
def test_a_million_records_come_back(tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    rng = np.random.default_rng(8)
    numbers = rng.integers(0, 1000, 8_000_000)
    with lmdb.open(source, map_size=1 << 30, sync=False) as env, env.begin(write=True) as txn:
        values = (b"%d " * 8 % tuple(numbers[8 * i : 8 * i + 8].tolist()) for i in range(1_000_000))
        txn.cursor().putmulti(((b"%08d" % i, value) for i, value in enumerate(values)), append=True)
    made = packed([source], str(tmp_path / "packed"))
    assert made.records == 1_000_000
    unpacked(str(tmp_path / "packed"), str(tmp_path / "back"))
    assert lmdb_truth(str(tmp_path / "back")) == lmdb_truth(source)
