"""What a user means by `select=`, and which records that is, found by all ranks together.

    select=      None  "all"  ids  range  slice  b"prefix"  re.compile(rb"...")  function  part of a split
    as_wanted    checked on each rank: a `Wanted`, whose `mark` the ranks compare
    choose       rank 0 has the runs of ids -> a `Selection` on all ranks; None stands for all records
"""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pario.comm.base import together
from pario.dataset.reader import Reader
from pario.errors import OptionError
from pario.locate.base import Index
from pario.plan import selection
from pario.plan.mixture import Mixture
from pario.plan.schedule import even_split
from pario.plan.selection import FEW_RUNS, Figures, Selection

_log = logging.getLogger("pario")

#: Keys that are looked at together.
_KEYS = 1 << 16
#: Of a function's or a pattern's words in a message.
_SHOWN = 60


class Wanted(ABC):
    """Which records a user wants.

    mark : what all ranks must have alike; None for all that is usual
    grows : whether its records are known without an index of all
    parts : selections that are drawn by weight; of most there are none
    """

    mark: tuple[Any, ...] | None
    grows = False
    parts: Sequence[Wanted] = ()

    @abstractmethod
    def runs(self, reader: Reader) -> np.ndarray:
        """On rank 0 i64[r, 2], ascending runs of ids; elsewhere anything. Collective; all ranks raise alike."""

    def mixture(self, reader: Reader, units: tuple[int, ...]) -> Mixture | None:
        """Of its parts in these shares, after `runs`; None if it has none. Collective."""
        return None

    def numbers(self) -> np.ndarray | None:
        """i64[k], ascending: the numbers that the user has named; None if no numbers were."""
        return None

    def among(self, numbers: np.ndarray) -> np.ndarray | None:
        """bool[n]: which of the samples with these numbers (i64[n]) are wanted; None: it goes by records. Raises
        OptionError for a wanted number that no sample has."""
        wanted = self.numbers()
        if wanted is None:
            return None
        missing = wanted[~np.isin(wanted, numbers)]
        if len(missing):
            raise OptionError(
                f"select has numbers that no sample has: {_few(missing)}; there are {len(numbers):,} samples, of "
                f"numbers {int(numbers.min())} to {int(numbers.max())}"
            )
        return np.isin(numbers, wanted)

    def __repr__(self) -> str:
        return "select (" + " ".join(map(str, self.mark or ())) + ")"


class Usual(Wanted):
    """All records; without a mark, which is select=None, all but the meta records."""

    grows = True

    def __init__(self, *mark: str) -> None:
        self.mark = mark or None

    def runs(self, reader: Reader) -> np.ndarray:
        return selection.all_but([] if self.mark else list(reader.index.meta), len(reader))


class Ids(Wanted):
    """Ids in an array or a list."""

    def __init__(self, given: Any) -> None:
        try:
            ids = np.asarray(list(given) if isinstance(given, (set, frozenset)) else given)
        except (ValueError, TypeError) as e:
            raise _not_understood(given) from e
        if ids.dtype == bool:
            raise OptionError("select is an array of booleans", hint="np.flatnonzero(mask) makes ids of it.")
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise _not_understood(given)
        if not len(ids):
            raise OptionError("select is empty: it picks no record")
        if (ids.dtype == np.uint64 and int(ids.max()) >= 1 << 63) or int(ids.min()) < 0:
            wrong = ids[(ids < 0) | (ids > np.iinfo(np.int64).max)]
            raise OptionError(f"select has ids out of range: {_few(wrong)}", hint="Record ids begin at 0.")
        self._ids = np.sort(ids.astype(np.int64, copy=False))
        twice = self._ids[1:][self._ids[1:] == self._ids[:-1]]
        if len(twice):
            raise OptionError(
                f"select names records more than once: {_few(np.unique(twice))}",
                hint="An epoch has each record once; np.unique(ids) drops what is repeated.",
            )
        digest = hashlib.blake2b(self._ids.data, digest_size=8).hexdigest()
        self.mark = ("ids", len(self._ids), f"hash {digest}")

    def numbers(self) -> np.ndarray:
        return self._ids

    def runs(self, reader: Reader) -> np.ndarray:
        if int(self._ids[-1]) >= len(reader):
            raise _out_of_range(_few(self._ids[self._ids >= len(reader)]), reader)
        return selection.runs_of(self._ids if reader.world.rank == 0 else self._ids[:0])


class Span(Wanted):
    """A range, whose numbers must all be ids, or a slice, as of a list of all records."""

    def __init__(self, given: range | slice) -> None:
        self._given = given
        try:
            slice(given.start, given.stop, given.step).indices(0)
        except (TypeError, ValueError) as e:
            raise _not_understood(given) from e
        self.mark = (type(given).__name__, given.start, given.stop, given.step)

    def numbers(self) -> np.ndarray | None:
        return None if isinstance(self._given, slice) else np.sort(np.asarray(self._given, np.int64))

    def among(self, numbers: np.ndarray) -> np.ndarray | None:
        if not isinstance(self._given, slice):
            return super().among(numbers)
        chosen = np.zeros(len(numbers), bool)
        chosen[self._given] = True
        return chosen

    def runs(self, reader: Reader) -> np.ndarray:
        n, given = len(reader), self._given
        numbers = range(*given.indices(n)) if isinstance(given, slice) else given
        if not numbers:
            return np.empty((0, 2), np.int64)
        low, high = min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])
        if low < 0 or high >= n:
            raise _out_of_range(f"{low if low < 0 else high}", reader)
        step = abs(numbers.step)
        if step == 1:
            return np.array([(low, high + 1)], np.int64)
        first = np.arange(low, high + 1, step, dtype=np.int64)
        return np.stack([first, first + 1], axis=1)


class Keys(Wanted):
    """Records whose keys a function likes; the ranks divide the keys."""

    def __init__(self, likes: Callable[[bytes], Any], *mark: Any) -> None:
        self._likes = likes
        self.mark = mark

    def runs(self, reader: Reader) -> np.ndarray:
        world, index = reader.world, reader.index
        found = []
        with together(world, "choosing records by their keys (select)"):
            start, stop = even_split(len(reader), world.size, world.rank)
            for first in range(start, stop, _KEYS):
                ids = np.arange(first, min(first + _KEYS, stop))
                likes = np.fromiter(map(bool, map(self._likes, index.keys(ids))), bool, len(ids))
                found.append(selection.runs_of(ids[likes]))
        return selection.joined(gathered(reader, [runs.reshape(-1) for runs in found]).reshape(-1, 2))


class Prefix(Wanted):
    """Records whose keys begin with these bytes: neighbours, where keys are ordered as bytes."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self.mark = ("prefix", prefix)

    def runs(self, reader: Reader) -> np.ndarray:
        prefix, index, world = self._prefix, reader.index, reader.world
        if not all(stretch.in_byte_order for stretch in index.files.stretches):
            return Keys(lambda key: key.startswith(prefix)).runs(reader)
        runs: list[tuple[int, int]] = []
        with together(world, "looking for a prefix (select)"):
            if world.rank == 0:
                runs = runs_with(prefix, index)
        return selection.joined(np.array(runs, np.int64).reshape(-1, 2))


def runs_with(prefix: bytes, index: Index) -> list[tuple[int, int]]:
    """[low, high) of the records of each file whose keys begin so, if it has any; all records of one whose keys are not
    ordered as bytes. Not collective."""

    def begin(i: int) -> bytes:
        return index.keys([i])[0][: len(prefix)]

    runs = []
    for stretch in index.files.stretches:
        low, high = stretch.start, stretch.stop
        if prefix and stretch.in_byte_order:
            low = bisect_left(range(high), prefix, low, key=begin)
            high = bisect_right(range(high), prefix, low, key=begin)
        runs += [(low, high)] if low < high else []
    return runs


class Sources(Wanted):
    """Several selections, which are drawn by weight: no record is in two of them."""

    def __init__(self, parts: Sequence[Wanted]) -> None:
        self.parts = parts
        self.mark = ("sources", *(part.mark for part in parts))

    def runs(self, reader: Reader) -> np.ndarray:
        self._runs = [picked(part, reader) for part in self.parts]
        runs = np.concatenate(self._runs)
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
        twice = runs[1:, 0][runs[1:, 0] < runs[:-1, 1]]
        with together(reader.world, "choosing records (select)"):
            if reader.world.rank == 0 and len(twice):
                raise OptionError(
                    f"select has records in more than one source: {_few(twice)}",
                    path=reader.path,
                    hint="Each source is drawn with a weight of its own; a record belongs to one of them.",
                )
        return selection.joined(runs)

    def mixture(self, reader: Reader, units: tuple[int, ...]) -> Mixture | None:
        world, told, places = reader.world, None, None
        if world.rank == 0:
            runs = np.concatenate(self._runs)
            lengths, order = runs[:, 1] - runs[:, 0], np.argsort(runs[:, 0], kind="stable")
            begins = np.empty_like(lengths)  # of each run among all that are selected, which have no gaps
            begins[order] = np.cumsum(lengths[order]) - lengths[order]
            places = selection.expanded(np.stack([begins, begins + lengths], axis=1), selection.id_type(len(reader)))
            sizes = tuple(int((part[:, 1] - part[:, 0]).sum()) for part in self._runs)
            told = sizes, selection.digest_of(runs, len(reader))
        sizes, digest = world.bcast(told)
        return Mixture(units, sizes, world.share_array(places), digest)


def as_wanted(select: Any, *, sources: bool = False) -> Wanted:
    """What `select=` means. Raises OptionError for what it cannot be.

    sources : a list that has more than numbers is one of selections
    """
    if isinstance(select, Wanted):
        return select
    if sources and isinstance(select, (list, tuple)) and not all(isinstance(k, (int, np.integer)) for k in select):
        return Sources([as_wanted(each) for each in select])
    if select is None:
        return Usual()
    if isinstance(select, str):
        if select == "all":
            return Usual("all")
        raise OptionError(
            f'select is a text, {select[:_SHOWN]!r}; the only one that it can be is "all"',
            hint="Keys are bytes: b'...' for those that begin with a prefix, re.compile(rb'...') for a pattern.",
        )
    if isinstance(select, (range, slice)):
        return Span(select)
    if isinstance(select, (bytes, bytearray, memoryview)):
        return Prefix(bytes(select))
    if isinstance(select, re.Pattern):
        if isinstance(select.pattern, str):
            raise OptionError("select is a pattern for text, and keys are bytes", hint="Compile rb'...' instead.")
        return Keys(select.match, "pattern", select.pattern, select.flags)
    if callable(select):
        return Keys(select, "function", getattr(select, "__module__", ""), *mark_of(select))
    return Ids(select)


def mark_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The name of a user's function, and a hash of its code."""
    code = getattr(getattr(function, "__code__", None), "co_code", b"")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name, hashlib.blake2b(code, digest_size=4).hexdigest()


def choose(wanted: Wanted, reader: Reader, *, file_order: bool) -> Selection | None:
    """The records that belong to an epoch; None: all of them. Collective; raises OptionError on all ranks.

    file_order : an order by file position is wanted, too
    """
    index = reader.index
    if wanted.mark is None:
        if not index.meta:
            return None
        if reader.world.rank == 0:
            names = Counter(key.decode(errors="backslashreplace") for _, key in sorted(index.meta.items()))
            _log.warning(
                "%s: left out of the epochs: %s, which %s about the dataset; select=\"all\" keeps %s",
                reader.path,
                ", ".join(repr(name) + (f" ({count} times)" if count > 1 else "") for name, count in names.items()),
                *(("is a record", "it") if len(index.meta) == 1 else ("are records", "them")),
            )
    world, n = reader.world, len(reader)
    runs = picked(wanted, reader)
    whole = digest = by_place = figures = None
    with together(world, "choosing records"):
        if world.rank == 0:
            whole = len(runs) == 1 and int(runs[0, 1] - runs[0, 0]) == n
            as_runs = selection.prefers_runs(runs, n)
            digest = selection.digest_of(runs, n)
            if not whole and index.is_complete:
                figures = _figures(runs, index.extents["nbytes"])
            if not whole and file_order and index.by_offset is not None:
                by_place = _in_file_order(runs, index.by_offset, n)
    told = (whole, digest, as_runs, len(runs), by_place is not None, figures) if world.rank == 0 else None
    whole, digest, as_runs, count, has_order, figures = world.bcast(told)
    if whole:
        return None
    table = None
    if not as_runs:
        table = world.share_array(selection.expanded(runs, selection.id_type(n)) if world.rank == 0 else None)
    elif count <= FEW_RUNS:
        runs = world.bcast(runs)
    else:
        runs = world.share_array(runs)
    if has_order:
        by_place = world.share_array(by_place)
    return Selection(n, digest, runs=runs if as_runs else None, table=table, by_place=by_place, figures=figures)


def gathered(reader: Reader, parts: list[np.ndarray]) -> np.ndarray:
    """The ranks' numbers one after the other, on rank 0. Collective."""
    mine = np.concatenate([np.empty(0, np.int64), *parts])
    everyones = reader.world.gather_array(mine)
    return mine if everyones is None else everyones


def picked(wanted: Wanted, reader: Reader) -> np.ndarray:
    """On rank 0 the runs of what is wanted, at least one. Collective; raises OptionError on all ranks."""
    world = reader.world
    runs = wanted.runs(reader)
    with together(world, "choosing records (select)"):
        if world.rank == 0 and not len(runs):
            raise OptionError(
                f"{wanted!r} picks none of the {len(reader):,} records",
                path=reader.path,
                hint="python -m pario data head shows keys; a pattern must match from the beginning of a key.",
            )
    return runs


def _figures(runs: np.ndarray, nbytes: np.ndarray) -> Figures:
    edges = runs.reshape(-1)  # every second stretch between them is a run
    edges = edges[edges < len(nbytes)]
    total, largest = int(np.add.reduceat(nbytes, edges)[::2].sum()), int(np.maximum.reduceat(nbytes, edges)[::2].max())
    return Figures(total / int((runs[:, 1] - runs[:, 0]).sum()), largest)


def _in_file_order(runs: np.ndarray, by_offset: np.ndarray, n: int) -> np.ndarray:
    edges = np.concatenate([[0], runs.reshape(-1), [n]])
    mask = np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))
    return by_offset[mask[by_offset]].astype(selection.id_type(n))


def _few(ids: np.ndarray) -> str:
    shown = ", ".join(str(i) for i in ids[:5].tolist())
    return shown + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")


def _out_of_range(ids: str, reader: Reader) -> BaseException:
    """Raised on all ranks, which were given the same ids."""
    what = f"select has ids out of range: {ids}; the records have 0..{len(reader) - 1}"
    return reader.world.raised_by_all(OptionError(what, path=reader.path))


def _not_understood(given: Any) -> OptionError:
    return OptionError(
        f"select cannot be {str(given)[:_SHOWN]!r}",
        hint='It is None, "all", ids (integers in an array or a list), a range, a slice, a prefix (bytes), a compiled '
        "pattern of bytes, a function of a key, or a part of pario.split.",
    )
