"""`unpack`: a packed dataset becomes again what it was packed from. Collective."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from pario.codec.packing import Packing, inflated
from pario.comm.base import AnyWorld, on_root, together
from pario.errors import CorruptedError, OptionError, ParioError
from pario.machine import closing_fd
from pario.packing.flow import Crew
from pario.packing.folder import Restorer
from pario.packing.items import Items
from pario.packing.pack import Summary, Talk, make_lmdb
from pario.packing.partial import Partial, Target, exists, refused
from pario.packing.sources import Source, Subset, describe, own_names
from pario.packing.tars import TarRestorer, opener_for
from pario.packing.writer import Writer


def unpack(
    world: AnyWorld,
    path: str,
    dst: str,
    talk: Talk,
    *,
    in_folder: bool = False,
    force: bool = False,
    verify: bool = True,
) -> Summary:
    """Make again, as DST, what the packed LMDB `path` was packed from. Collective over `world`.

    in_folder, force : as for `pack`; only an LMDB or a tar is ever replaced
    verify : of an LMDB, read everything back and compare it with `path`. Values have checksums of their own in any case

    Raises, on all ranks, FileError and its children, OptionError.
    """
    source = on_root(world, "looking at the packed dataset", lambda: _packed_source(path))
    with closing(source.open(world, "")) as opened:
        items = opened.databases[0][1]
        packing: Packing | None = getattr(items, "packing", None)
        kind = packing.more.get("source", "lmdb") if packing is not None else "lmdb"
        if kind != "lmdb":
            assert packing is not None
            return _Restored(world, path, dst, talk, force).run(items, packing, kind)
        if world.rank == 0 and not any(getattr(items, "packing", None) for _, items in opened.databases):
            talk.say(f"no value of {path} is packed: it is copied")
    with together(world, "looking at DST"):
        target = Target(dst, in_folder=in_folder or source.in_folder, force=force)
        if world.rank == 0:
            target.check([path])
    return make_lmdb(world, source, target, talk, verify=verify)


def _packed_source(path: str) -> Source:
    source = describe([path])
    if source.kind != "lmdb":
        raise OptionError(f"{path} is a {source.kind}, not a packed LMDB")
    return source


class _Restored:
    """Folders, tars, and several sources."""

    def __init__(self, world: AnyWorld, path: str, dst: str, talk: Talk, force: bool) -> None:
        self.world = world
        self.path = path
        self.dst = os.path.abspath(os.path.expanduser(dst))
        self.talk = talk
        self.force = force
        self.partial = Partial(self.dst)
        self._root: tuple[Restorer, int] | None = None  # of a folder that is all of DST, with its descriptor

    def run(self, items: Items, packing: Packing, kind: str) -> Summary:
        world = self.world
        made = os.path.join(self.partial.path, "made")
        with ExitStack() as stack:
            stack.callback(self._end)
            with together(world, "opening the unfinished result"):
                if world.rank == 0:
                    self._check(kind)
                    # What a killed run has left is made again: files say not how far they are.
                    if self.partial.open({"unpack": os.path.abspath(self.path)}, self.talk.say):
                        self.partial.restart("a folder or a tar is unpacked in one go", self.talk.say)
            crew = stack.enter_context(closing(Crew(world)))
            moved = self.talk.progress("unpacking", items.nbytes)
            if kind == "several":
                self._several(crew, items, packing, made, moved)
            else:
                self._one(crew, items, packing.parts, kind, made, self.dst, moved)
            nbytes = world.bcast(os.path.getsize(made) if world.rank == 0 and os.path.isfile(made) else items.nbytes)
            if world.is_leader:
                os.sync()  # all files at once
            world.barrier()
            with together(world, "giving the result its name"):
                if world.rank == 0:
                    self.partial.finish("made", self.dst, replace=self.force)
                    if self._root is not None:
                        _writing(self.dst, self._root[0].finish_root, self._root[1])
            return Summary(items.n, items.nbytes, nbytes, self.dst)

    def _end(self) -> None:
        if self._root is not None:
            os.close(self._root[1])
        self.partial.close()

    def _check(self, kind: str) -> None:
        """DST may be an empty folder, or with --force a tar."""
        if not os.path.lexists(self.dst):
            return
        if os.path.isdir(self.dst):
            if kind == "tar" or os.listdir(self.dst):
                raise exists(self.dst, self.dst, "Choose another DST.")
        elif kind != "tar" or not self.force:
            raise exists(self.dst, self.dst, "Choose another DST, or remove it.")

    def _several(self, crew: Crew, items: Items, packing: Packing, made: str, moved: Any) -> None:
        with together(self.world, "making the folder"):
            told: Any = packing.more.get("sources")
            try:
                owners = np.frombuffer(inflated(packing.parts["owners"], 4 * items.n), "<u4")
                names = [str(one["file"]) for one in told]
                each = [(str(one["source"]), os.fsencode(one["prefix"]), bool(one["in_folder"])) for one in told]
                bad = any(name in ("", ".", "..") or {*os.fsencode(name)} & {*b"/\0"} for name in names)
            except (KeyError, ValueError, TypeError) as e:
                raise CorruptedError(f"the table of the sources is damaged: {e}", path=self.path) from e
            if len(owners) != items.n or bad:
                raise CorruptedError("the table of the sources does not fit the records", path=self.path)
            if self.world.rank == 0:
                os.mkdir(made, 0o777)
        # Each in what it has made itself: in that of another one a link could lead elsewhere.
        for number, (name, (kind, prefix, in_folder)) in enumerate(zip(own_names(names), each, strict=True)):
            subset = Subset(items, np.flatnonzero(owners == number), prefix)
            into = os.path.join(made, name)
            if kind == "lmdb":
                self._lmdb(crew, subset, into, in_folder, moved)
            else:
                first = f"{number}."
                parts = {k.removeprefix(first): v for k, v in packing.parts.items() if k.startswith(first)}
                self._one(crew, subset, parts, kind, into, name, moved)

    def _lmdb(self, crew: Crew, items: Items, into: str, in_folder: bool, moved: Any) -> None:
        """In a folder beside `made`, since LMDB opens what is there, and leaves a lock file."""
        beside = os.path.join(self.partial.path, "lmdb")
        writer: Writer | None = None
        with ExitStack() as stack:
            with together(self.world, "making an LMDB"):
                if self.world.rank == 0:
                    _writing(beside, os.mkdir, beside, 0o700)
                    writer = stack.enter_context(closing(Writer(crew.writer, beside, subdir=True, databases=0)))
                    writer.begin(None, 0, [])
            crew.pack(items, None, 0, writer, moved)
        on_root(self.world, "giving an LMDB its name", lambda: _writing(into, _move_lmdb, beside, into, in_folder))

    def _one(
        self, crew: Crew, items: Items, parts: dict[str, bytes], kind: str, into: str, name: str, moved: Any
    ) -> None:
        if kind == "folder":
            self._folder(crew, items, parts, into, moved)
        elif kind == "tar":
            on_root(self.world, "writing the tar", lambda: _writing(into, self._tar, items, parts, into, name))
            moved(items.nbytes)
        else:
            raise CorruptedError(
                f"packed from a source of a kind that this pario does not know: {kind}", path=self.path
            )

    def _tar(self, items: Items, parts: dict[str, bytes], into: str, name: str) -> None:
        restorer = TarRestorer(parts, items, self.path)
        with opener_for(name)(into, "xb") as file:
            restorer.write(file)

    def _folder(self, crew: Crew, items: Items, parts: dict[str, bytes], into: str, moved: Any) -> None:
        with together(self.world, "making the folders"):
            if "tree" not in parts:
                raise CorruptedError("the part with the names of the folder is missing", path=self.path)
            restorer = Restorer(into, parts["tree"], self.path, items.n)
            rows = restorer.files
            if len(rows) != items.n:
                raise CorruptedError(f"{items.n} records for {len(rows)} names of files", path=self.path)
            if self.world.rank == 0:
                _writing(into, os.mkdir, into, 0o700)
                _writing(into, restorer.folders)

        def write(begin: int, stop: int) -> None:
            for row, key, value in zip(
                rows[begin:stop], items.keys(begin, stop), items.read(np.arange(begin, stop)), strict=True
            ):
                if row.key != key:
                    raise CorruptedError("the names of the folder do not fit the keys", path=self.path, key=key)
                restorer.write(row, memoryview(value))

        crew.each(items, lambda begin, stop: _writing(into, write, begin, stop), moved, "writing the files")
        on_root(self.world, "giving modes and times", lambda: _writing(into, self._finish, restorer, into))

    def _finish(self, restorer: Restorer, into: str) -> None:
        """The folder itself at once, but for what has still to be renamed. Its descriptor: at DST might be something
        else by then."""
        restorer.finish()
        fd = os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if into == os.path.join(self.partial.path, "made"):
            self._root = restorer, fd
            return
        with closing_fd(fd):
            restorer.finish_root(fd)


def _move_lmdb(beside: str, into: str, in_folder: bool) -> None:
    if in_folder:
        os.mkdir(into)
    os.rename(os.path.join(beside, "data.mdb"), os.path.join(into, "data.mdb") if in_folder else into)
    shutil.rmtree(beside)


def _writing(path: str, work: Callable[..., Any], *arguments: Any) -> None:
    """Call it; what the system refuses becomes a FileError."""
    try:
        work(*arguments)
    except ParioError:
        raise
    except OSError as e:
        raise refused(e, path) from e
