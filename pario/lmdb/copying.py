"""Copies of an environment: page by page, or compacted."""

from __future__ import annotations

import os

import numpy as np

from pario.errors import CorruptedError, ParioError
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import F_BIGDATA, F_SUBDATA, MDB_INTEGERKEY, NUM_METAS, Db
from pario.format.page import OverflowRun, Page, check_overflow
from pario.format.tree import Tree
from pario.lmdb import errors
from pario.lmdb.store import Store

_PIECE_BYTES = 4 << 20
#: The transaction of everything in a compacted copy; it belongs to meta page 1.
_TXNID = 1


def copy_to(fd: int, store: Store, compact: bool) -> None:
    """Write a copy of the snapshot to an open file.

    Raises BadTxnError if a writer overtakes the copy, CorruptedError.
    """
    try:
        if compact:
            _Compacter(fd, store).run()
        else:
            _copy_pages(fd, store)
    except ParioError as e:
        raise errors.translated(e.at(path=store.file.path), "copy") from e  # type: ignore[arg-type]
    except OSError as e:
        cls = errors.DiskError if e.errno == errors.DiskError.code else errors.Error
        raise cls(f"copy: {e.strerror}", e.errno or 0) from e


def _copy_pages(fd: int, store: Store) -> None:
    snapshot = store.snapshot
    size = snapshot.page_size
    end = (snapshot.last_pgno + 1) * size
    first = bytearray(store.file.pread(0, NUM_METAS * size))
    # Page 1 may have been written again since the snapshot was taken.
    first[store.metas_at : store.metas_at + len(store.metas)] = store.metas
    _write(fd, first)
    at = NUM_METAS * size
    while at < end:
        piece = store.file.pread(at, min(_PIECE_BYTES, end - at))
        if not piece:
            break  # pages that were allocated and freed again may never have been written
        check_snapshot(store.file, snapshot)
        _write(fd, piece)
        at += len(piece)


class _Compacter:
    """Writes the trees' pages one after the other, those below before those above, under new numbers."""

    def __init__(self, fd: int, store: Store) -> None:
        self.fd = fd
        self.store = store
        self.snapshot = store.snapshot
        self.layout = store.snapshot.layout
        self.next = NUM_METAS

    def run(self) -> None:
        snapshot = self.snapshot
        if snapshot.sum_size:
            raise CorruptedError("pages with checksums cannot be renumbered", hint="Copy with compact=False")
        size = snapshot.page_size
        seekable = True
        try:
            start = os.lseek(self.fd, 0, os.SEEK_CUR)
        except OSError:
            seekable = False
        if not seekable:
            # The meta pages come first, but tell what the last page is: one walk to count, one to write.
            counter = _Compacter(-1, self.store)
            root = counter._tree(self.store.tree())
            _write(self.fd, counter._metas(root))
            self._tree(self.store.tree())
            return
        _write(self.fd, bytes(NUM_METAS * size))
        root = self._tree(self.store.tree())
        here = os.lseek(self.fd, 0, os.SEEK_CUR)
        os.lseek(self.fd, start, os.SEEK_SET)
        _write(self.fd, self._metas(root))
        os.lseek(self.fd, here, os.SEEK_SET)

    def _metas(self, root: int) -> bytearray:
        """Page 0 of the empty file, page 1 of what was written."""
        snapshot, layout = self.snapshot, self.layout
        size = snapshot.page_size
        pages = bytearray(self.store.file.pread(0, NUM_METAS * size))
        blob = self.store.metas
        meta_at = snapshot.meta * size + layout.header - self.store.metas_at
        own = np.frombuffer(blob[meta_at : meta_at + layout.meta.itemsize], layout.meta).copy()
        for number in range(NUM_METAS):
            meta = own.copy()
            free, main = meta["mm_dbs"][0]
            for field in ("md_depth", "md_branch_pages", "md_leaf_pages", "md_overflow_pages", "md_entries"):
                free[field] = 0
            free["md_root"] = layout.invalid
            free["md_flags"] |= MDB_INTEGERKEY
            if number == 0:
                for field in ("md_depth", "md_branch_pages", "md_leaf_pages", "md_overflow_pages", "md_entries"):
                    main[field] = 0
                main["md_root"] = layout.invalid
                meta["mm_last_pg"], meta["mm_txnid"] = NUM_METAS - 1, 0
            else:
                main["md_root"] = layout.invalid if root < 0 else root
                meta["mm_last_pg"], meta["mm_txnid"] = self.next - 1, _TXNID
            at = number * size + layout.header
            pages[at : at + layout.meta.itemsize] = meta.tobytes()
        return pages

    def _tree(self, tree: Tree) -> int:
        """Write a tree; returns its new root, -1 for an empty one."""
        return -1 if tree.db.md_root < 0 else self._page(tree, tree.db.md_root, 1)

    def _page(self, tree: Tree, pgno: int, level: int) -> int:
        page = tree.page(pgno, level)
        out = bytearray(page.buf)
        if page.kind == "branch":
            for i in range(page.n):
                self._patch_child(out, page, i, self._page(tree, page.child(i), level + 1))
        elif page.kind == "leaf" and not tree.is_dups:
            for i in range(page.n):
                node = page.node(i)
                if node.flags & F_BIGDATA:
                    self._patch_run(out, node.data_start, node.overflow())
                elif node.flags & F_SUBDATA:
                    below = tree.below(node)
                    self._patch_root(out, node.data_start, below.db, self._tree(below))
        return self._put(out)

    def _put(self, page: bytearray) -> int:
        """Write a branch or leaf page under the next number."""
        pgno = self._take(1)
        header = np.frombuffer(page, self.layout.page, 1)
        header["mp_pgno"] = pgno
        if self.layout.version > 1:
            header["mp_txnid"] = _TXNID
        if self.fd >= 0:
            _write(self.fd, page)
        return pgno

    def _take(self, pages: int) -> int:
        pgno = self.next
        self.next += pages
        if self.next > self.snapshot.last_pgno + 1:
            raise CorruptedError("the trees hold more pages than the file: some page is reached twice")
        return pgno

    def _patch_child(self, out: bytearray, page: Page, i: int, pgno: int) -> None:
        start, _ = page.key_span(i)
        node = np.frombuffer(out, self.layout.node, 1, start - self.layout.node.itemsize)
        node["mn_dsize"] = pgno & 0xFFFFFFFF
        if self.layout.word == 8:
            node["mn_flags"] = pgno >> 32

    def _patch_root(self, out: bytearray, at: int, db: Db, root: int) -> None:
        np.frombuffer(out, self.layout.db, 1, at)["md_root"] = self.layout.invalid if root < 0 else root

    def _patch_run(self, out: bytearray, at: int, run: OverflowRun) -> None:
        """Copy an overflow run, with the pages that it does not need (they are counted), and note its new place."""
        size, layout, file = self.snapshot.page_size, self.layout, self.store.file
        first = self.store.read_page(run.pgno)
        check_overflow(first, run, self.snapshot)
        pages = int(layout.unpack_u32(first, layout.pages_at)[0])
        if run.pgno + pages - 1 > self.snapshot.last_pgno:
            raise CorruptedError(f"an overflow run of {pages} pages passes the last page", page=run.pgno)
        pgno = self._take(pages)
        words = np.frombuffer(out, layout.page["mp_pgno"], 1 if layout.version == 1 else 3, at)
        words[0] = pgno
        if layout.version > 1:
            words[1], words[2] = _TXNID, pages
        if self.fd < 0:
            return
        done = 0
        while done < pages * size:
            start = run.pgno * size + done
            piece = bytearray(file.pread(start, min(_PIECE_BYTES, pages * size - done)))
            check_snapshot(file, self.snapshot)
            if not piece:
                if done < run.pages * size:
                    raise CorruptedError("an overflow run ends beyond the end of the file", page=run.pgno, offset=start)
                piece = bytearray(min(_PIECE_BYTES, pages * size - done))  # never written, never read
            if not done:
                header = np.frombuffer(piece, layout.page, 1)
                header["mp_pgno"] = pgno
                if layout.version > 1:
                    header["mp_txnid"] = _TXNID
            _write(self.fd, piece)
            done += len(piece)


def _write(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
