"""Files read what the node's service has of an LMDB. The oracle is a file whose bytes are wrong by then."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from packed_sets import pack_copy, write

import pario
from pario.comm.solo import Solo
from pario.dataset.host import Host
from pario.files.tree import Tree
from pario.tiers import asking

LARGE = b"L" * 3_000_000
ITEMS = [(b"a/%03d" % k, bytes([k]) * (k * 97)) for k in range(200)] + [(b"large", LARGE)]


def spoil(path: Path) -> None:
    """Every byte behind the two meta pages."""
    with open(path / "data.mdb", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        status = os.stat(path / "data.mdb")
        file.seek(8192)
        file.write(b"\xee" * (size - 8192))
    os.utime(path / "data.mdb", ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_come_out_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    path = (pack_copy if packed else write)(tmp_path / "set.lmdb", ITEMS)
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "service"))
    host = Host(str(tmp_path / "service"), pario.Options(tiers=(pario.Tier("memory", "64MiB"),)), Solo())
    try:
        with Tree({"": path}) as tree:
            end = time.monotonic() + 30
            while not (state := host.state()) or any(each["held_bytes"] < each["file_bytes"] for each in state):
                assert time.monotonic() < end
                time.sleep(0.01)
            spoil(Path(path))
            for key, value in ITEMS:
                node = tree.find(key.decode())
                out = bytearray(node.size)
                tree.read_into(node, out)
                assert out == value == tree.read(node)
                assert tree.read(node, 5, 1000) == value[5:1005]
                fd = os.memfd_create("file")
                if tree.send(node, fd):
                    assert not packed
                    assert os.pread(fd, len(value) + 1, 0) == value
                os.close(fd)
            assert len(list(tree.names("a"))) == 200
    finally:
        host.close()


def test_without_a_service_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "set.lmdb", ITEMS)
    monkeypatch.setattr(asking, "START_S", 0.1)
    monkeypatch.setenv("PARIO_SERVICE", str(tmp_path / "nowhere"))
    with Tree({"": path}) as tree:
        assert tree.read("large") == LARGE
    assert "no service runs there" in caplog.text
