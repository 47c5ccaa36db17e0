"""`pack`: sources become a packed LMDB. Collective; also the copying that `unpack` of an LMDB is."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pario.codec import registry
from pario.codec.base import Codec
from pario.codec.packing import MOST_VALUE, Packing, reserved_key
from pario.codec.registry import parse
from pario.codec.trial import selection_for
from pario.codec.zstd import train
from pario.comm.base import AnyWorld, on_root, together
from pario.errors import ChecksumError, CorruptedError, FileError, OptionError
from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.kernels.coded import MOST
from pario.locate.meta import NAMES
from pario.packing.flow import Crew, Progress, entry_sizes
from pario.packing.items import Items, databases_of, open_items
from pario.packing.partial import Partial, Target
from pario.packing.sources import Opened, Source, describe
from pario.packing.writer import Writer
from pario.records import Records
from pario.text import counted, decimal_bytes
from pario.threads import Workers

#: the packing for the records of a database; if the second argument says so, none of them shares an entry with others
Choose = Callable[[Items, bool], Packing]

_VERSION = 1
#: Bytes of an automatic dictionary: 419 B JSON 3.66 with 32 KiB; four times as many digest longer than they save.
_DICTIONARY = 32 << 10
#: What is read to train and to judge: a hundred times the dictionary is the usual advice, and as much again to judge.
_SAMPLE_BYTES, _SAMPLES = 200 * _DICTIONARY, 20_000
#: Larger values hold themselves what a dictionary could tell; they are neither trained on nor judged by.
_SMALL = 64 << 10
#: For `auto`: samples in bytes, records of a batch, and the store's bytes per second, as of `choose`.
_CHOICE_BYTES, _BATCH, _STORE = 16 << 20, 256, 200e6
#: It must save this share of what is stored without it, since decoding looks it up.
_PAYS = 0.03
#: Blocks of `auto`, in bytes of values; it looks for some if records have at most this size on average, takes the
#: smallest whose pages are at most this share more than the fewest, and some only if they save this share. (JSON of
#: 0.2 KB: between 2 and 8 KiB it is the waste at the ends of pages that differs, up to a tenth.)
_BLOCKS, _SMALL_MEAN, _NEARLY, _BLOCK_PAYS = (2048, 3072, 4096, 6144, 8192), 1024, 0.03, 0.15
#: Runs of neighbours that are sampled.
_RUNS = 48
#: What a page of LMDB's has for nodes, and a node takes beside its key and value.
_PAGE, _NODE = 4080, 10


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    codec : name, or name:level, or "auto": as `choose` says (docs/packing.md)
    aim : of "auto": "capacity" takes the highest ratio that keeps up, "speed" what is read and unpacked soonest
    dictionary : "auto", "no", or a size: "32k"
    block : small records that are neighbours share an entry of about this many bytes: "auto", "no", or a size: "4k"
    links : of a folder that lead out of it: "follow" packs what they lead to in their place, "keep" keeps them
    keys : "hash": paths that are too long for a key are none, their names are kept beside the records; "path": an error
    dbs : the named databases to pack; (): all, and the records of the main one
    prefix : with several sources, keys begin with the name of their source and a slash
    in_folder : DST is a folder with data.mdb; else it is one if the only SRC is such an LMDB, or if DST is a folder
    force : replace DST when the new one is complete
    verify : read everything back and compare it with the source before DST gets its name
    """

    codec: str = "zstd:3"
    aim: str = "capacity"
    dictionary: str = "auto"
    block: str = "auto"
    links: str = "follow"
    keys: str = "path"
    dbs: Sequence[str] = ()
    prefix: bool = True
    in_folder: bool = False
    force: bool = False
    verify: bool = True


@dataclass(frozen=True)
class Talk:
    """How the work speaks to its user.

    say : a line, on rank 0; progress : progress(what, bytes in all) -> moved(bytes done since)
    """

    say: Callable[[str], None]
    progress: Callable[[str, int], Progress]


@dataclass(frozen=True)
class Summary:
    """What was made. records, raw_bytes : of all databases; stored_bytes : of the data file; file : its path"""

    records: int
    raw_bytes: int
    stored_bytes: int
    file: str


def pack(world: AnyWorld, paths: Sequence[str], dst: str, options: PackOptions, talk: Talk) -> Summary:
    """Pack SRC... into DST. Collective over `world`.

    Raises, on all ranks, FileError and its children, OptionError. What is done until then stays in DST.part, from where
    the same call goes on.
    """
    source, target = None, Target(dst, force=options.force)
    with together(world, "looking at the sources"):
        size = _bytes_of(options.dictionary, 64 << 20, "dictionary is auto, no, or 256 bytes to 64 MiB such as 32k")
        block = _bytes_of(options.block, 64 << 10, "block is auto, no, or 256 bytes to 64 KiB such as 4k")
        if options.codec != "auto":
            parse(options.codec)
            if options.aim != "capacity":
                raise OptionError("--for says what a codec is chosen for", hint="Write --codec auto, or leave it out.")
        if world.rank == 0:
            follow, hashed = options.links == "follow", options.keys == "hash"
            source = describe(paths, prefix=options.prefix, follow=follow, hashed=hashed, dbs=options.dbs)
            in_folder = options.in_folder or source.in_folder
            target = Target(dst, in_folder=in_folder, force=options.force)
            target.check(list(paths))
            for line in source.warnings():
                talk.say(line)
    source, target = world.bcast((source, target))
    assert source is not None  # rank 0 has it
    how = {"codec": options.codec, "aim": options.aim, "dictionary": options.dictionary, "block": options.block}
    job = _Job(world, target, talk, options.verify)

    def choose(items: Items, alone: bool) -> Packing:
        packing = packing_for(items, options.codec, size, talk.say, options.aim == "speed")
        if not alone and (nbytes := chosen_block(items, packing, block, talk.say)):
            packing.more["block"] = nbytes
        return packing

    return job.run(source, {"version": _VERSION, "source": source.identity} | how, choose)


def make_lmdb(world: AnyWorld, source: Source, target: Target, talk: Talk, *, verify: bool) -> Summary:
    """Copy the databases of an LMDB, their values unpacked, into a new one. Collective; as `pack`."""
    state = {"version": _VERSION, "source": source.identity, "unpack": True}
    return _Job(world, target, talk, verify).run(source, state, None)


class _Job:
    """One run."""

    def __init__(self, world: AnyWorld, target: Target, talk: Talk, verify: bool) -> None:
        self.world = world
        self.target = target
        self.talk = talk
        self.verify = verify
        self.partial = Partial(target.path)
        self.file = os.path.join(self.partial.path, "data.mdb")

    def run(self, source: Source, state: dict[str, Any], choose: Choose | None) -> Summary:
        """choose : the packing for a database; None: values are stored as they are"""
        world = self.world
        with ExitStack() as stack:
            stack.callback(self.partial.close)
            on_root(world, "opening the unfinished dataset", lambda: self.partial.open(state, self.talk.say))
            opened = stack.enter_context(closing(source.open(world, self.partial.path)))
            crew = stack.enter_context(closing(Crew(world)))
            self._fill(crew, opened, choose)
            if self.verify:
                self._verify(crew, opened)
            summary = Summary(
                sum(items.n for _, items in opened.databases),
                sum(items.nbytes for _, items in opened.databases),
                world.bcast(os.path.getsize(self.file) if world.rank == 0 else None),
                self.target.file,
            )
            with together(world, "giving the dataset its name"):
                if world.rank == 0:
                    self.partial.finish("data.mdb", self.target.file, replace=self.target.force)
            return summary

    # -- filling -------------------------------------------------------------------------------------------------------

    def _fill(self, crew: Crew, opened: Opened, choose: Choose | None) -> None:
        world = self.world
        with together(world, "looking at the values"):
            for _, items in opened.databases:
                if choose is not None and not items.flags & MDB_DUPSORT:
                    _check_sizes(items)
        moved = self.talk.progress("packing" if choose else "unpacking", sum(i.nbytes for _, i in opened.databases))
        wanted = [
            number
            for number, (name, items) in enumerate(opened.databases)
            if name is not None or items.n or opened.parts or opened.more
        ]
        whole = False
        while not whole:
            writer: Writer | None = None
            with ExitStack() as stack:
                with together(world, "opening the unfinished dataset"):
                    if world.rank == 0:
                        writer = stack.enter_context(closing(self._writer(crew.writer, len(opened.databases))))
                whole = all(self._fill_one(crew, opened, number, choose, writer, moved) for number in wanted)
                with together(world, "writing"):
                    if writer is not None:
                        writer.flush()
            with together(world, "starting anew"):
                if world.rank == 0 and not whole:
                    self.partial.restart("how its values are packed is lost", self.talk.say)

    def _writer(self, thread: Workers, databases: int) -> Writer:
        try:
            return Writer(thread, self.partial.path, subdir=True, databases=databases)
        except CorruptedError as e:
            self.partial.restart(str(e), self.talk.say)
            return Writer(thread, self.partial.path, subdir=True, databases=databases)

    def _fill_one(
        self,
        crew: Crew,
        opened: Opened,
        number: int,
        choose: Choose | None,
        writer: Writer | None,
        moved: Progress,
    ) -> bool:
        """False if what is there already was packed in a way that nobody knows."""
        world = self.world
        name, items = opened.databases[number]
        names = [other for other, _ in opened.databases if other is not None] if name is None else []
        packs = choose is not None and not items.flags & MDB_DUPSORT and (items.n > 0 or name is None)
        packing: Packing | None = None
        done, key = 0, b""
        with together(world, "looking how far it is"):
            if writer is not None:
                done = writer.begin(name, items.flags, names)
                if packs:
                    key = _key_for(items, names, writer.longest_key)
                if packs and done <= items.n:
                    assert choose is not None
                    packing = self._packing(number, items, choose, done, alone=bool(names))
        packing, done, known = world.bcast((packing, done, packing is not None or not packs or done > items.n))
        if not known:
            return False
        sizes = entry_sizes(items, packing)
        moved(int(sizes[:done].sum()))
        if done <= len(sizes):
            crew.pack(items, packing, done, writer, moved)
        with together(world, "writing the last entry"):
            if writer is not None and packing is not None and done <= len(sizes):  # else it is there
                packing.sizes = items.sizes
                if number == 0:
                    packing.more |= opened.more
                    packing.parts = opened.parts
                writer.put(key, packing.entry())
                writer.flush()
        return True

    def _packing(
        self, number: int, items: Items, choose: Choose, done: int, *, alone: bool
    ) -> Packing | None:
        """The one that this database was begun with, else a new one; None if it was begun with one that is lost. Rank
        0.

        alone : no record shares an entry with others
        """
        packing, kept = None, self.partial.kept(f"packing-{number}")
        if kept is not None:
            with suppress(FileError):
                packing = Packing.from_entry(kept)
        if packing is None and done:
            return None
        if packing is None:
            packing = choose(items, alone)
            self.partial.keep(f"packing-{number}", packing.entry())
        if (nbytes := packing.more.get("block")) is not None:
            counts = block_counts(items, int(nbytes))
            packing.counts = counts if counts.max(initial=1) > 1 else None
        return packing

    # -- verifying -----------------------------------------------------------------------------------------------------

    def _verify(self, crew: Crew, opened: Opened) -> None:
        world = self.world
        moved = self.talk.progress("verifying", sum(items.nbytes for _, items in opened.databases))
        names = [name for name, _ in opened.databases if name is not None]
        databases = on_root(world, "opening the new dataset", lambda: databases_of(self.file, names)[1])
        found = {database.name: database for database in databases}
        try:
            for name, items in opened.databases:
                if name is None and not items.n:
                    continue
                with closing(open_items(found[name], world)) as others:
                    with together(world, "verifying"):
                        if others.n != items.n or others.flags != items.flags:
                            raise ChecksumError(
                                f"database {name!r} has {others.n} records and flags {others.flags}, its source "
                                f"{items.n} and {items.flags}",
                                path=self.file,
                            )
                    crew.compare(items, others, self.file, moved)
        except CorruptedError as e:
            if world.rank == 0 and e.path == self.file:  # going on from here would end here again
                self.partial.remove()
            raise


def _check_sizes(items: Items) -> None:
    if items.n and int(items.sizes.max()) > MOST:
        record = int(items.sizes.argmax())
        (key,) = items.keys(record, record + 1)
        told = f"a value has {int(items.sizes[record]):,} bytes, and packed ones have at most {MOST:,}"
        raise OptionError(told, record=record, key=key, hint="Cut it into several records.")


def _key_for(items: Items, names: Sequence[bytes], longest: int) -> bytes:
    """The key of the reserved entry, behind those of the records and of named databases."""
    last = items.keys(items.n - 1, items.n)[0] if items.n else None
    if names:
        last = max([*names, *([last] if last is not None else [])])
    reverse = bool(items.flags & MDB_REVERSEKEY)  # overrides INTEGERKEY
    integer = len(last or b"") if items.flags & MDB_INTEGERKEY and not reverse else 0
    return reserved_key(last, integer=integer, reverse=reverse, longest=longest)


# -- how the values are packed: the codec, and a dictionary and blocks if they pay -------------------------------------


def _bytes_of(text: str, most: int, expected: str) -> int | None:
    """What an option means: None for "auto", 0 for "no", else bytes: 32768, 32k, 1M. Raises OptionError."""
    if text in ("auto", "no"):
        return None if text == "auto" else 0
    number, unit = text.lower().removesuffix("ib").removesuffix("b"), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1024 if number[-1] == "k" else 1024**2
    if not number.isdigit() or not 256 <= int(number) * unit <= most:
        raise OptionError(f"{expected}, got {text!r}")
    return int(number) * unit


def block_counts(items: Items, nbytes: int) -> np.ndarray:
    """i64[entries]: how many neighbours share each entry, by sizes and keys alone: values of at most `nbytes` together,
    each with 16 bytes for its key. What is larger than half of that, or a meta record (locate/meta.py), stands alone.
    """
    return _cut(items.sizes, nbytes, _meta_ids(items))


def _cut(sizes: np.ndarray, nbytes: int, alone: list[int]) -> np.ndarray:
    """`block_counts`. alone : records that share no entry"""
    n, through, counts, at = len(sizes), np.cumsum(np.minimum(sizes, nbytes) + 16), list[int](), 0
    large = sizes > min(nbytes // 2, MOST_VALUE)
    large[alone] = True
    for wall in [*np.flatnonzero(large).tolist(), n]:
        while at < wall:
            before = int(through[at - 1]) if at else 0
            stop = min(max(int(np.searchsorted(through, before + nbytes, side="right")), at + 1), wall)
            counts.append(stop - at)
            at = stop
        if wall < n:
            counts.append(1)
            at = wall + 1
    return np.array(counts, np.int64)


def _meta_ids(items: Items) -> list[int]:
    """Of records that have the names of meta records: a Loader looks for them among the keys of entries."""
    if items.flags & MDB_INTEGERKEY and not items.flags & MDB_REVERSEKEY:
        return []
    turn = -1 if items.flags & MDB_REVERSEKEY else 1

    def order(i: int) -> bytes:
        return items.keys(i, i + 1)[0][::turn]

    places = [(name, bisect_left(range(items.n), name[::turn], key=order)) for name in NAMES]
    return [i for name, i in places if i < items.n and items.keys(i, i + 1) == [name]]


def chosen_block(items: Items, packing: Packing, nbytes: int | None, say: Callable[[str], None]) -> int:
    """Bytes of values in a block; 0: there are to be none. Reads samples. nbytes : None: automatic; 0: none"""
    if nbytes is not None or items.n < 16 or items.nbytes > _SMALL_MEAN * items.n:
        return nbytes or 0
    run = max(4, int(4 * _BLOCKS[-1] * items.n / max(1, items.nbytes)))
    begins = np.unique(np.random.default_rng(0).integers(0, max(1, items.n - run), _RUNS)).tolist()
    runs = [(items.read(np.arange(a, b)), items.keys(a, b)) for a in begins for b in [min(a + run, items.n)]]
    pages = {size: _pages(packing, runs, size) for size in (0, *_BLOCKS)}
    least = min(pages.values())
    if least >= (1 - _BLOCK_PAYS) * pages[0]:
        return 0
    size = next(size for size in _BLOCKS if pages[size] <= (1 + _NEARLY) * least)
    say(f"blocks of {size:,} bytes: about {pages[size] / pages[0]:.0%} of the pages that each record by itself takes")
    return size


def _pages(packing: Packing, runs: Sequence[tuple[Records, list[bytes]]], nbytes: int) -> int:
    """The pages of an LMDB that these neighbours take in blocks; nbytes : 0: each by itself."""
    pages = room = 0
    for records, keys in runs:
        counts = _cut(records.nbytes, nbytes, []) if nbytes else np.ones(len(records), np.int64)
        names, _, sizes = packing.pack_entries(records, keys, counts)
        for key, size in zip(names, sizes.tolist(), strict=True):
            node = _NODE + len(key) + size
            if node > _PAGE // 2:  # a value beside the leaves
                pages, node = pages - (-(size + _NODE) // _PAGE), 2 * _NODE + len(key)
            if node > room:
                pages, room = pages + 1, _PAGE
            room -= node
    return pages


def packing_for(
    items: Items, spec: str, dictionary: int | None, say: Callable[[str], None], speed: bool = False
) -> Packing:
    """The packing for these records; reads samples of them. Local. Raises OptionError.

    spec : as `registry.parse` takes it, or "auto"
    dictionary : bytes; None: automatic, 0: none
    speed : "auto" takes the fastest codec, not the highest ratio
    """
    more: dict[str, Any] = {}
    if spec == "auto":
        samples = [value.tobytes() for value in _samples(items, np.arange(items.n), _CHOICE_BYTES)[0]]
        chosen = selection_for(
            samples, batch=_BATCH, store=_STORE, seconds=0.1, dictionaries=dictionary != 0, speed=speed
        )
        spec, more["prediction"] = chosen.chosen.candidate.name, chosen.prediction()
        aim = more["prediction"]["for"]
        say(f"codec {spec}, chosen for {aim} by samples of {counted(items.n, 'record')}; `pario data choose` says why")
    codec = registry.parse(spec)
    if dictionary and not codec.takes_dictionary:
        raise OptionError(f"codec {codec.name} takes no dictionary", hint="Use --dictionary no, or --codec zstd:3.")
    trained = b""
    if dictionary != 0 and codec.takes_dictionary:
        trained = _dictionary(items, codec, dictionary, say)
    return Packing([registry.parse(spec, trained)], more=more)


def _dictionary(items: Items, codec: Codec, nbytes: int | None, say: Callable[[str], None]) -> bytes:
    """A trained dictionary if it pays, else b"".

    nbytes : None: automatic
    """
    small = np.flatnonzero(items.sizes < _SMALL)
    if len(small) < 16:
        return b""
    train_on, judge_on = _samples(items, small, 200 * nbytes if nbytes else _SAMPLE_BYTES)
    trained = train([value.tobytes() for value in train_on], nbytes or _DICTIONARY, codec.level or 3)
    if not trained:
        return b""
    raw = max(1, int(judge_on.nbytes.sum()))
    scale = int(items.sizes[small].sum()) / raw  # from the judged records to all that it is for
    packings = (Packing([registry.parse(str(codec), known)]) for known in (b"", trained))
    without, with_it = (scale * int(packing.pack_many(judge_on)[2].sum()) for packing in packings)
    if with_it + len(trained) >= (1 - _PAYS) * without:
        return b""
    say(
        f"a dictionary of {decimal_bytes(len(trained))}, from {counted(len(train_on), 'sample')}: about "
        f"{decimal_bytes(with_it + len(trained))} instead of {decimal_bytes(without)}"
    )
    return trained


def _samples(items: Items, ids: np.ndarray, nbytes: int) -> tuple[Records, Records]:
    """Some of these records, from all over the database: those to train on, and those to judge by; about `nbytes`."""
    count = min(len(ids), _SAMPLES, max(16, int(nbytes * len(ids) / max(1, items.sizes[ids].sum()))))
    if count < len(ids):  # a step of a whole number could meet a pattern of the keys, such as every tenth record
        ids = ids[np.unique(np.random.default_rng(0).integers(0, len(ids), count))]
    chosen = items.read(ids)
    halves = [np.arange(len(ids)) % 2 == half for half in (0, 1)]
    train_on, judge_on = (Records(ids[half], chosen.data, chosen.starts[half], chosen.nbytes[half]) for half in halves)
    return train_on, judge_on
