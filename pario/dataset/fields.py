"""Samples of several records: what a user means by `fields=`, and which records that is, found by all ranks together.

    fields=      {"image": ("image-%09d", decoder), "label": (function of the number, None)}
    as_fields    checked on each rank: `FieldSet`, whose `mark` the ranks compare
    find         the keys of the first field say which samples there are; each rank looks up the other records of its
                 share of them -> `Samples` on all ranks

A sample exists if its first record does. What else it lacks is known from here on, and makes it a bad sample.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pario.comm.base import on_root, together
from pario.dataset.reader import Reader
from pario.dataset.select import Wanted, gathered, mark_of, picked, runs_with
from pario.dataset.template import Template
from pario.decode.base import Decoder
from pario.decode.fields import Fields, Lookup
from pario.decode.given import as_decoder
from pario.errors import OptionError
from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.format.tree import key_order
from pario.locate.base import Stretch
from pario.plan.samples import Samples, absent, digest_of_samples, sample_type
from pario.plan.schedule import even_split
from pario.plan.selection import Figures, expanded, id_type

_log = logging.getLogger("pario")

#: Keys that are looked at together.
_KEYS = 1 << 16
#: Keys are taken from a stretch of the database at once if it has at most this many records per key.
_SPREAD = 8
#: More fields than this are a mistake.
_MOST_FIELDS = 64


class Made:
    """Keys that a user's function makes of the number (or text) of a sample."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.mark = ("function", *mark_of(function))

    def __repr__(self) -> str:
        return f"function {self.mark[1]}"

    def make(self, name: int | bytes) -> bytes:
        key = self._function(name)
        if isinstance(key, str):
            key = key.encode()
        if not isinstance(key, (bytes, bytearray, memoryview)):
            raise OptionError(f"fields: the {self} returned {key!r} for {name!r}; a key is bytes")
        return bytes(key)


class FieldSet:
    """The fields of a sample: names, what makes their keys, and their decoders.

    mark : what all ranks must have alike
    """

    def __init__(
        self, names: list[str], makers: list[Template | Made], decoders: list[Decoder | None], optional: list[str]
    ) -> None:
        self.names = names
        self.makers = makers
        self._decoders = decoders
        self.optional = optional
        marks = [("template", str(one)) if isinstance(one, Template) else one.mark for one in makers]
        self.mark = (*zip(names, marks, strict=True), *optional)

    def decoder(self, samples: Lookup | None = None) -> Fields:
        """A new one, for these samples."""
        return Fields(dict(zip(self.names, self._decoders, strict=True)), samples, self.optional)


class Found(NamedTuple):
    """The samples, and what the decoder asks about them (`pario.decode.fields.Lookup`)."""

    samples: Samples
    fields: FieldSet
    reader: Reader

    def numbers(self, first: np.ndarray) -> np.ndarray:
        return self.samples.numbers_of(first)

    def missing(self, first: np.ndarray) -> list[tuple[int, int, bytes]]:
        holes = self.samples.missing(first)
        return [(i, j, self._key(int(first[i]), j)) for i, j in holes]

    def _key(self, first: int, field: int) -> bytes:
        """The key that a record of the sample would have."""
        lead = self.fields.makers[0]
        name: int | bytes | None = int(self.samples.numbers_of(np.array([first]))[0])
        if isinstance(lead, Template):
            name = lead.parse(self.reader.keys([first])[0])
        assert name is not None  # the template has found this key
        return self.fields.makers[field].make(name)


def as_fields(given: Any) -> FieldSet | None:
    """What `fields=` means. Raises OptionError for what it cannot be."""
    if given is None or isinstance(given, FieldSet):
        return given
    if not isinstance(given, Mapping) or not 1 <= len(given) <= _MOST_FIELDS:
        raise OptionError(f"fields must be a dict, field -> (template or function, decoder), got {given!r}", hint=_LIKE)
    makers: list[Template | Made] = []
    decoders: list[Decoder | None] = []
    optional: list[str] = []
    for name, pair in given.items():
        if not isinstance(name, str) or not name or "." in name or "\0" in name:
            raise OptionError(f"fields: a name is a text without a dot, got {name!r}")
        if not isinstance(pair, (tuple, list)) or not (len(pair) == 2 or (len(pair) == 3 and pair[2] == "optional")):
            raise OptionError(f"field {name!r} must be (template or function, decoder), got {pair!r}", hint=_LIKE)
        keys, decoder = pair[:2]
        if len(pair) == 3:
            if not makers:
                raise OptionError(f"field {name!r}, the first one, says which samples there are: it is not optional")
            optional.append(name)
        if isinstance(keys, (str, bytes)):
            makers.append(Template(keys))
        elif callable(keys):
            makers.append(Made(keys))
        else:
            raise OptionError(f"field {name!r}: a template or a function of the number makes its keys, got {keys!r}")
        try:
            decoders.append(None if decoder is None else as_decoder(decoder))
        except OptionError as e:
            e.what = f"field {name!r}: {e.what}"
            raise
    return FieldSet(list(given), makers, decoders, optional)


_LIKE = 'As fields={"image": ("image-%09d", pario.decode.Image(224)), "label": ("label-%09d", pario.decode.Text())}.'


def find(fields: FieldSet, wanted: Wanted, reader: Reader, *, file_order: bool) -> Found:
    """The samples of an epoch. Collective; raises OptionError on all ranks.

    wanted : which of them; numbers are those of samples, and prefixes and the like go by the first record
    file_order : an order by file position is wanted, too
    """
    world, index = reader.world, reader.index
    with together(world, "looking at the keys (fields)"):
        if len(index.files) > 1 and not isinstance(fields.makers[0], Template):
            raise OptionError(
                f"fields= with a function for the first field's keys needs one file, and {len(index.files.paths)} were "
                "given",
                path=reader.path,
                hint="Put a field with a template first, or make a Loader for each of them.",
            )
        for stretch in index.files.stretches:
            if stretch.record.md_flags & MDB_DUPSORT:
                path = stretch.database.path
                raise OptionError("fields= needs one record per key, and this database has several", path=path)
    first, numbers = _first_records(fields, wanted, reader)
    there = len(first)
    first, numbers = _wanted(fields, wanted, reader, first, numbers)
    kind = sample_type(len(reader))
    shared = world.share_array(first.astype(kind) if world.rank == 0 else None)
    called = None if _named_by_texts(fields) else world.share_array(numbers if world.rank == 0 else None)
    rest = _other_records(fields, reader, shared, called)
    told = by_place = None
    with together(world, "finding the samples (fields)"):
        if world.rank == 0:
            _say_missing(fields, reader, numbers, rest)
            if len(first) == there:
                _say_left_over(fields, reader, rest)
            rest = [np.where(ids < 0, absent(kind), ids).astype(kind) for ids in rest]
            figures, by_place = _measured(index.extents, [shared, *rest], file_order)
            told = digest_of_samples([shared, *rest], called, len(reader)), figures, by_place is not None
    digest, figures, has_order = world.bcast(told)
    columns = [shared, *(world.share_array(ids) for ids in rest)]
    by_place = world.share_array(by_place) if has_order else None
    samples = Samples(len(reader), digest, columns, numbers=called, by_place=by_place, figures=figures)
    return Found(samples, fields, reader)


def _named_by_texts(fields: FieldSet) -> bool:
    """Whether there are no numbers in the keys: then the samples are counted."""
    lead = fields.makers[0]
    return isinstance(lead, Template) and lead.digits is None


# -- which samples there are -------------------------------------------------------------------------------------------


def _first_records(fields: FieldSet, wanted: Wanted, reader: Reader) -> tuple[np.ndarray, np.ndarray]:
    """On rank 0 (first record i64[n], ascending, number i64[n]) of all samples; of texts the numbers count them."""
    lead, name, world = fields.makers[0], fields.names[0], reader.world
    if not isinstance(lead, Template):
        return _made_records(fields, wanted, reader)
    ids: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    runs = on_root(world, "looking for the first field's keys (fields)", lambda: runs_with(lead.prefix, reader.index))
    with together(world, "finding the samples by their keys (fields)"):
        wanted_ids = expanded(np.array(runs, np.int64).reshape(-1, 2), np.dtype(np.int64))
        for these in _parts(wanted_ids[slice(*even_split(len(wanted_ids), world.size, world.rank))]):
            names = list(map(lead.parse, reader.index.keys(these)))
            good = np.array([one is not None for one in names], bool)
            ids.append(these[good])
            if lead.digits is not None:
                numbers.append(np.array([one for one in names if one is not None], np.int64))
    first = gathered(reader, ids)
    called = gathered(reader, numbers)
    with together(world, "finding the samples by their keys (fields)"):
        if world.rank == 0 and not len(first):
            raise OptionError(
                f"no key fits {lead}, the template of field {name!r}",
                path=reader.path,
                hint="pario data head shows keys; %09d is a number of nine digits, %d one without leading zeros.",
            )
    return first, called if lead.digits is not None else np.arange(len(first))


def _made_records(fields: FieldSet, wanted: Wanted, reader: Reader) -> tuple[np.ndarray, np.ndarray]:
    world, name = reader.world, fields.names[0]
    numbers = wanted.numbers()
    if numbers is None or not len(numbers):
        raise world.raised_by_all(
            OptionError(
                f"field {name!r}, the first one, has a function for its keys: which numbers are there?",
                hint="select=range(n), or a list of numbers, says so; or put a field with a template first.",
            )
        )
    found = []
    with together(world, "finding the samples by their keys (fields)"):
        begin, stop = even_split(len(numbers), world.size, world.rank)
        for mine in _parts(numbers[begin:stop]):
            (stretch,) = reader.index.files.stretches  # of one file, which `find` has seen to
            ids = _find(list(map(fields.makers[0].make, mine.tolist())), stretch, reader)
            if int(ids.min()) < 0:
                number = int(mine[ids < 0][0])
                key = fields.makers[0].make(number)
                raise OptionError(
                    f"select names sample {number}, whose first record {_text(key)} (field {name!r}) is not there",
                    path=reader.path,
                    key=key,
                )
            found.append(ids)
    first = gathered(reader, found)
    with together(world, "finding the samples by their keys (fields)"):
        if world.rank == 0:
            order = np.argsort(first, kind="stable")
            first, numbers = first[order], numbers[order]
            twice = np.flatnonzero(first[1:] == first[:-1])
            if len(twice):
                one, other = numbers[twice[0] : twice[0] + 2].tolist()
                what = f"samples {one} and {other} have the same first record (field {name!r})"
                raise OptionError(what, path=reader.path)
    return first, numbers


def _wanted(
    fields: FieldSet, wanted: Wanted, reader: Reader, first: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The samples that are selected, on rank 0."""
    world = reader.world
    chosen: np.ndarray | None = None
    with together(world, "choosing samples (select)"):
        chosen = wanted.among(numbers) if world.rank == 0 else None
    if not world.bcast(chosen is not None):
        runs = picked(wanted, reader)
        if world.rank == 0:
            run = np.searchsorted(runs[:, 0], first, side="right") - 1
            chosen = (run >= 0) & (first < runs[np.maximum(run, 0), 1])
    with together(world, "choosing samples (select)"):
        if chosen is not None:  # on rank 0
            if not chosen.any():
                raise OptionError(
                    f"{wanted!r} picks none of the {len(first):,} samples",
                    path=reader.path,
                    hint=f"Numbers are those of samples; keys are those of the first field, {fields.names[0]!r}.",
                )
            if not chosen.all():
                return first[chosen], numbers[chosen]
    return first, numbers


# -- their other records -----------------------------------------------------------------------------------------------


def _other_records(
    fields: FieldSet, reader: Reader, first: np.ndarray, numbers: np.ndarray | None
) -> list[np.ndarray]:
    """On rank 0, for every field but the first one, record ids i64[n], -1 for a missing one; elsewhere as many arrays.

    first, numbers : of all samples, on all ranks; numbers is None where keys have texts
    """
    world, lead = reader.world, fields.makers[0]
    found: list[list[np.ndarray]] = [[] for _ in fields.makers[1:]]
    with together(world, "finding the records of the samples (fields)"):
        for mine in _parts(np.arange(*even_split(len(first), world.size, world.rank)) if found else np.arange(0)):
            names: list[Any]
            if numbers is not None:
                names = numbers[mine].tolist()
            else:
                assert isinstance(lead, Template)
                names = list(map(lead.parse, reader.index.keys(first[mine].astype(np.int64))))
            files = reader.index.files.of(first[mine])
            for maker, ids in zip(fields.makers[1:], found, strict=True):
                keys = list(map(maker.make, names))
                for number in np.unique(files).tolist():  # a sample lies in one file; `files` ascends
                    low, high = np.searchsorted(files, [number, number + 1]).tolist()
                    ids.append(_find(keys[low:high], reader.index.files.stretches[number], reader))
    return [gathered(reader, ids) for ids in found]


def _find(keys: list[bytes], stretch: Stretch, reader: Reader) -> np.ndarray:
    """i64[m]: the ids of the records of a file with these keys; -1 where there is none. Not collective."""
    index, flags = reader.index, stretch.record.md_flags
    order: Callable[[bytes], Any] = key_order(flags, stretch.database.snapshot.layout)
    if flags & MDB_INTEGERKEY and not flags & MDB_REVERSEKEY:
        width = len(index.keys([stretch.start])[0])
        keys = [key if len(key) == width else b"" for key in keys]  # others would pass for equal numbers
    found = np.full(len(keys), -1, np.int64)
    by_key = sorted(range(len(keys)), key=lambda i: order(keys[i]))

    def at(record: int) -> Any:
        return order(index.keys([record])[0])

    # Stretches of keys, and of the records among which they are.
    todo = [(0, len(by_key), stretch.start, stretch.stop)]
    while todo:
        begin, stop, low, high = todo.pop()
        if begin == stop or low == high:
            continue
        low = bisect_left(range(high), order(keys[by_key[begin]]), lo=low, key=at)
        high = bisect_right(range(high), order(keys[by_key[stop - 1]]), lo=low, key=at)
        if high - low <= _SPREAD * (stop - begin):
            there = dict(zip(index.keys(np.arange(low, high)), range(low, high), strict=True))
            for i in by_key[begin:stop]:
                found[i] = there.get(keys[i], -1)
        else:
            middle = (begin + stop) // 2
            todo += [(begin, middle, low, high), (middle, stop, low, high)]
    return found


def _say_missing(fields: FieldSet, reader: Reader, numbers: np.ndarray, rest: list[np.ndarray]) -> None:
    """Say in one line what the samples lack: the error comes when such a sample does. On rank 0."""
    for name, ids in zip(fields.names[1:], rest, strict=True):
        lacks = np.flatnonzero(ids < 0)
        if len(lacks) and name not in fields.optional:
            _log.warning(
                "%s: %d of %d samples have no record of field %r; the first of them is sample %d",
                *(reader.path, len(lacks), len(ids), name, int(numbers[lacks[0]])),
            )


def _say_left_over(fields: FieldSet, reader: Reader, rest: list[np.ndarray]) -> None:
    """Say in one line that there are records of a later field without a first one, where their keys begin with a name
    of their own. On rank 0, if all samples are selected."""
    stretches = reader.index.files.stretches
    templates = [one for one in fields.makers if isinstance(one, Template)]
    if len(templates) < len(fields.makers) or not all(one.in_byte_order for one in stretches):
        return
    for j, ids in enumerate(rest, 1):
        mine = templates[j].prefix
        others = [one.prefix for one in templates[:j] + templates[j + 1 :]]
        if not mine or any(one.startswith(mine) or mine.startswith(one) for one in others):
            continue
        there = sum(high - low for low, high in runs_with(mine, reader.index))
        over = there - int((ids >= 0).sum())
        if over:
            _log.warning(
                "%s: %d records whose keys begin with %s are in no sample: the first field, %r, has none for them",
                *(reader.path, over, _text(mine), fields.names[0]),
            )


def _measured(extents: np.ndarray, columns: list[np.ndarray], file_order: bool) -> tuple[Figures, np.ndarray | None]:
    """Sizes of the samples, and their ordinals by the first record's position in the file, if that is another order."""
    total = largest = 0
    for ids in columns:
        for part in _parts(ids):
            nbytes = extents["nbytes"][part[part != absent(ids.dtype)]]
            total, largest = total + int(nbytes.sum()), max(largest, int(nbytes.max(initial=0)))
    by_place = None
    if file_order:
        at = extents["offset"][columns[0]]
        if not bool((at[1:] > at[:-1]).all()):
            by_place = np.argsort(at, kind="stable").astype(id_type(len(at)))
    return Figures(max(1, total) / len(columns[0]), largest), by_place


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[at : at + _KEYS] for at in range(0, len(rows), _KEYS)]


def _text(key: bytes) -> str:
    return repr(key.decode(errors="backslashreplace"))
