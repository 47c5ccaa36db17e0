"""What the handlers of system calls share: where paths of programs lead, and descriptors of files and folders."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from pario.files.held import Held, HeldFiles
from pario.files.notify import Listener, Memory
from pario.files.outputs import Outputs
from pario.files.skeleton import Skeleton
from pario.files.spots import Escaped, Prefixes, Spot

__all__ = ["AT_FDCWD", "Call", "Limits", "Node", "Records", "View"]

AT_FDCWD = -100

#: id, thread, flags, number, architecture, instruction pointer, six arguments
Call = tuple[int, ...]


class Node(Protocol):
    """kind : "folder" or "file"; number : the same as long as the view lasts; mtime : seconds"""

    @property
    def kind(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mtime(self) -> float: ...


class Records(Protocol):
    """What appears under a prefix: pario.files.tree.Tree."""

    def find(self, path: str) -> Node: ...
    def names(self, path: str) -> Iterator[tuple[str, Node]]: ...
    def read_into(self, path: Any, out: memoryview) -> None: ...
    def close(self) -> None: ...


class Limits(NamedTuple):
    """held_bytes, held_files : of what is kept in memory after a program has opened it"""

    held_bytes: int = 1 << 30
    held_files: int = 4096


class _Listing(NamedTuple):
    names: Iterator[tuple[str, Node]]
    ahead: list[tuple[str, Node]]


class View:
    """
    roots : (prefix, records) of each
    outputs : where programs may write
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, Records]],
        listener: Listener,
        limits: Limits,
        outputs: Outputs | None = None,
    ) -> None:
        self.roots = roots
        self.outputs = outputs
        self.listener = listener
        self.memory = Memory()
        self.skeleton = Skeleton()
        self.held = HeldFiles(limits.held_bytes, limits.held_files)
        prefixes = [prefix for prefix, _ in roots]
        if outputs is not None:
            outputs.root = len(roots)
            prefixes.append(outputs.folder)
        self.prefixes = Prefixes(prefixes, self._is_folder)
        self.heads = self.prefixes.heads
        self.find = lru_cache(8192)(self._find)
        self._reported: set[type] = set()
        self._listings: OrderedDict[tuple[Spot, int], _Listing] = OrderedDict()

    def _find(self, spot: Spot) -> Node:
        node = self.roots[spot.root][1].find(spot.path)
        if spot.folder and node.kind != "folder":
            raise NotADirectoryError
        return node

    def _is_folder(self, spot: Spot) -> bool:
        if self.outputs is not None and spot.root == self.outputs.root:
            return self.outputs.is_folder(spot.path)
        return self.find(Spot(spot.root, spot.path)).kind == "folder"

    # -- where paths lead --

    def spot(self, thread: int, folder_fd: int, path: bytes) -> Spot | Escaped | None:
        """Where a path leads, None: outside, the kernel's business. Raises OSError for what cannot be in the view."""
        if path[:1] == b"/":
            if b"/." in path or b"//" in path:
                return self.prefixes.absolute(path)
            return self.prefixes.clean(path) if path.startswith(self.heads) else None
        if not path:
            return None
        base = self.link(thread, folder_fd)
        if base is None:
            return None
        here = self.standing(base)
        if here is not None:
            return self.prefixes.relative(here, path)
        return self.prefixes.absolute(base + b"/" + path)

    def standing(self, real: bytes) -> Spot | None:
        """Which folder of the view a real folder stands for."""
        found = self.skeleton.spot(real)
        if found is None and self.outputs is not None:
            below = self.outputs.below(real)
            return None if below is None else Spot(self.outputs.root, below)
        return found

    def link(self, thread: int, folder_fd: int) -> bytes | None:
        """The real path of a program's working directory (AT_FDCWD) or of one of its descriptors."""
        try:
            if folder_fd == AT_FDCWD:
                return os.readlink(b"/proc/%d/cwd" % thread)
            return os.readlink(b"/proc/%d/fd/%d" % (thread, folder_fd))
        except OSError:
            return None

    # -- files and folders --

    def file(self, spot: Spot, node: Node) -> Held:
        """Its inode, with or without the contents."""
        return self.held.get((spot.root, spot.path), node.size, node.mtime)

    def contents(self, spot: Spot, node: Node) -> Held:
        """Raises OSError, ParioError."""
        records = self.roots[spot.root][1]
        return self.held.filled(
            (spot.root, spot.path), node.size, node.mtime, lambda out: records.read_into(node, out)
        )

    def folder(self, spot: Spot, node: Node, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the folder that stands for it."""
        return os.open(self.skeleton.folder(spot, node.mtime), flags | os.O_DIRECTORY | os.O_CLOEXEC)

    def listing(self, spot: Spot, position: int) -> _Listing:
        """Names from a position on: one that was left there before, or a new one."""
        key = Spot(spot.root, spot.path), position
        found = self._listings.pop(key, None)
        if found is None:
            names = self.roots[spot.root][1].names(spot.path)
            for _ in range(position):
                if next(names, None) is None:
                    break
            found = _Listing(names, [])
        return found

    def leave(self, spot: Spot, position: int, listing: _Listing) -> None:
        """Keep a listing for the call that goes on from there."""
        self._listings[Spot(spot.root, spot.path), position] = listing
        while len(self._listings) > 64:
            self._listings.popitem(last=False)

    def report(self, error: BaseException) -> None:
        """Say once per kind of error what a program sees as an input/output error."""
        if type(error) not in self._reported:
            self._reported.add(type(error))
            with contextlib.suppress(OSError):  # if nobody reads stderr any more
                os.write(2, f"pario view: {type(error).__name__}: {error} (programs get EIO)\n".encode())

    def close(self) -> None:
        self.held.close()
        self.skeleton.close()
        for _, records in self.roots:
            records.close()
