"""Sizes and offsets of all layouts, as in mdb.c, and how a file is recognised."""

from __future__ import annotations

import pickle

import pytest

from pario.errors import InvalidError, VersionMismatchError
from pario.format.layout import MDB_MAGIC, Db, layout_of
from pario.format.meta import Snapshot, explain, page_size, sniff

#: (version, word) -> sizeof MDB_page, MDB_db, MDB_meta; offsets of mp_flags, mm_dbs[0], mm_dbs[1], mm_last_pg, mm_txnid
SIZES = {
    (1, 8): (16, 48, 136, 10, 24, 72, 120, 128),
    (1, 4): (12, 28, 80, 6, 16, 44, 72, 76),
    (2, 8): (24, 48, 136, 18, 24, 72, 120, 128),
    (2, 4): (16, 28, 80, 10, 16, 44, 72, 76),
    (3, 8): (24, 48, 136, 18, 24, 72, 120, 128),
    (3, 4): (16, 28, 80, 10, 16, 44, 72, 76),
}


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("kind", SIZES)
def test_sizes_and_offsets(kind: tuple[int, int], byteorder: str) -> None:
    version, word = kind
    layout = layout_of(version, word, byteorder)
    page, db, meta, flags, dbs0, dbs1, last_pg, txnid = SIZES[kind]
    assert (layout.page.itemsize, layout.db.itemsize, layout.meta.itemsize) == (page, db, meta)
    assert layout.node.itemsize == 8
    assert (layout.header, layout.base) == (page, 0 if version == 1 else page)
    assert layout.page.fields["mp_flags"][1] == flags
    assert layout.meta.fields["mm_dbs"][1] == dbs0
    assert layout.meta.fields["mm_dbs"][1] + db == dbs1
    assert layout.meta.fields["mm_last_pg"][1] == last_pg
    assert layout.meta.fields["mm_txnid"][1] == txnid
    assert layout.pages_at == layout.page.fields["mp_lower"][1]
    assert layout.page["mp_flags"].newbyteorder("=") == "u2"
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_where_data_starts() -> None:
    for version in (1, 2):
        assert [layout_of(version, 8, "little").data_after(k) for k in (1, 2, 3)] == [9, 10, 11]
    assert [layout_of(3, 8, "little").data_after(k) for k in (1, 2, 3)] == [10, 10, 12]


def _head(at: int, version: int, byteorder: str) -> bytes:
    return bytes(at) + MDB_MAGIC.to_bytes(4, byteorder) + version.to_bytes(4, byteorder) + bytes(160)  # type: ignore[arg-type]


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_sniff(byteorder: str) -> None:
    for version, word in SIZES:
        layout = layout_of(version, word, byteorder)
        found = sniff(_head(layout.header, version, byteorder))
        assert found is layout
    assert sniff(bytes(200)) is None
    assert sniff(b"") is None
    assert sniff(_head(16, 1, byteorder)[:18]) is None
    with pytest.raises(VersionMismatchError, match="data format 4"):
        sniff(_head(24, 4, byteorder))
    with pytest.raises(InvalidError, match="format 1 cannot"):
        sniff(_head(24, 1, byteorder))


@pytest.mark.parametrize(("version", "largest"), [(1, 32768), (3, 65536)])
def test_page_sizes(version: int, largest: int) -> None:
    layout = layout_of(version, 8, "little")
    at = layout.header + 24
    for size in (256, 512, 4096, largest):
        assert page_size(bytes(at) + size.to_bytes(4, "little"), layout) == size
    for size in (0, 128, 3000, 2 * largest, 1 << 31):
        with pytest.raises(InvalidError, match=f"got {size}"):
            page_size(bytes(at) + size.to_bytes(4, "little"), layout)
    with pytest.raises(InvalidError, match="ends inside"):
        page_size(bytes(at), layout)


def test_explain_other_files() -> None:
    assert "HDF" in str(explain(b"\x89HDF\r\n\x1a\n" + bytes(9000), 9008))
    assert "lock file" in str(explain(MDB_MAGIC.to_bytes(4, "big") + bytes(9000), 9004))


def test_snapshot_is_plain() -> None:
    db = Db(0, 0, 1, 0, 1, 0, 1, 2)
    snapshot = Snapshot(3, 8, "little", 4096, 4, 8, 1 << 20, 9, 7, 1, db, db._replace(md_root=-1), 40960, b"meta")
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert (snapshot.header, snapshot.base, snapshot.limit, snapshot.native) == (24, 24, 4092, True)
    assert snapshot.txnid_words == (24 + 128, 4096 + 24 + 128)
    with pytest.raises(AttributeError):
        snapshot.txnid = 8  # type: ignore[misc]
