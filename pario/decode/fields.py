"""The decoder of samples of several records: each field by its own decoder.

    records   image 1, label 1, image 2, label 2, ...      those of a sample follow each other
    inside    images by one decoder, labels by another     every this many records
    outside   one row per sample in every array
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures
from pario.errors import DecodeError, OptionError
from pario.records import Records

#: Between the name of a field and that of a column of its decoder, until the batch is finished.
_MARK = "\0"
#: What decoders call the arrays beside "data".
_BESIDE = ("offsets", "lengths", "there")


class Lookup(Protocol):
    """What a first record says about its sample."""

    def numbers(self, first: np.ndarray) -> np.ndarray:
        """i64[k]: what the samples with these first records (i64[k]) are called."""

    def missing(self, first: np.ndarray) -> list[tuple[int, int, bytes]]:
        """(index into `first`, field, key) of the records that these samples lack."""


class Verbatims(Decoder):
    """{"data": object[b]}: the bytes of each record."""

    spec: Any = True

    def __repr__(self) -> str:
        return "bytes"

    def learn(self, record: np.ndarray) -> bool:
        return True

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        return {"data": ((len(records),), np.dtype(object))}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        out["data"][:] = [records[i].tobytes() for i in range(len(records))]
        return []


class Fields(Decoder):
    """Samples of several records. The inner decoders see a sample's number as the id of its records, so that all fields
    of a sample get the same random numbers.

    decoders : field -> decoder of its records; None: the bytes, one object per record
    lookup : knows the samples; None: nothing is decoded yet
    optional : fields that samples may lack. Beside such a field x comes x_there, bool[b]
    """

    def __init__(
        self, decoders: Mapping[str, Decoder | None], lookup: Lookup | None = None, optional: Collection[str] = ()
    ) -> None:
        # Copies: what they learn belongs to this decoder.
        self.inner = {name: Verbatims() if one is None else copy.copy(one) for name, one in decoders.items()}
        self._lookup = lookup
        self._optional = [j for j, name in enumerate(self.inner) if name in optional]
        self._known: set[str] = set()  # fields whose decoders have seen a record
        self.records_per_row, self.lead = len(self.inner), max((one.lead for one in self.inner.values()), default=0)
        for name, decoder in self.inner.items():
            if not decoder.by_rows:
                raise OptionError(
                    f"field {name!r}: {decoder!r} puts the bytes of a whole batch in one array, of which no sample can "
                    "be left out",
                    hint="None instead of a decoder gives each record's bytes; so does Text(), Npy(), ...(ragged=...).",
                )

    @property
    def lookup(self) -> Lookup:
        assert self._lookup is not None
        return self._lookup

    def __repr__(self) -> str:
        return f"Fields({', '.join(f'{name}={one!r}' for name, one in self.inner.items())})"

    @property
    def parallel(self) -> bool:  # type: ignore[override]
        return any(one.parallel for one in self.inner.values())

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return [one.spec for one in self.inner.values()]

    @spec.setter
    def spec(self, specs: Any) -> None:
        for one, spec in zip(self.inner.values(), specs, strict=True):
            one.spec = spec

    @property
    def is_open(self) -> bool:
        return any(one.is_open or self._unseen(name) for name, one in self.inner.items())

    def _unseen(self, name: str) -> bool:
        return bool(self._known) and name not in self._known and self.inner[name].spec is None

    def settle(self, seen: int) -> None:
        for name, one in self.inner.items():
            if self._unseen(name):
                raise OptionError(
                    f"none of the {seen} samples that were looked at has the optional field {name!r}",
                    hint="A decoder that knows the shape without a record, as Raw(dtype, shape) does, needs none.",
                )
            if one.is_open:
                one.settle(seen)

    def learn(self, record: np.ndarray) -> Any:
        raise NotImplementedError("a sample has several records: learn_from")

    def learn_from(self, records: Records, draw: Draw) -> Any:
        numbers = self.lookup.numbers(records.ids[:: self.records_per_row])
        lacks = {field: key for _, field, key in self.lookup.missing(records.ids[:: self.records_per_row])}
        for field in lacks.keys() - set(self._optional):
            raise DecodeError(self._lack(int(numbers[0]), field, lacks[field]))
        for j, (name, one) in enumerate(self.inner.items()):
            if j in lacks or (name in self._known and not one.is_open):
                continue
            try:
                one.learn_at(records[j], int(numbers[0]), self._draw(draw, records.ids[j : j + 1], numbers))
            except DecodeError as error:
                error.what = f"sample {numbers[0]}, field {name!r}: {error.what}"
                raise error.at() from None
            self._known.add(name)
        return self.spec

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        arrays: dict[str, ArraySpec] = {}
        for j, (name, one) in enumerate(self.inner.items()):
            for column, spec in one.shapes(self._field(records, j, records.ids[j :: self.records_per_row])).items():
                arrays[f"{name}{_MARK}{column}"] = spec
            if j in self._optional:
                arrays[f"{name}{_MARK}{_MARK}"] = ((len(records) // self.records_per_row,), np.dtype(bool))
        return arrays

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        first = np.array(records.ids[:: self.records_per_row])
        numbers = self.lookup.numbers(first)
        lacks: list[set[int]] = [set() for _ in self.inner]
        failed: dict[int, str] = {}
        for row, field, key in self.lookup.missing(first):
            if field in self._optional:
                lacks[field].add(row)
            else:
                failed[row] = self._lack(int(numbers[row]), field, key)
        broken = set(failed)
        for j, (name, one) in enumerate(self.inner.items()):
            # No decoder sees the record that stands in for a missing one: only the stretches between such samples.
            edges = [-1, *sorted(broken | lacks[j]), len(first)]
            stretches = [slice(before + 1, after) for before, after in pairwise(edges) if before + 1 < after]
            begin = f"{name}{_MARK}"
            mine = {whole[len(begin) :]: array for whole, array in out.items() if whole.startswith(begin)}
            if j in self._optional:
                there = mine.pop(_MARK)
                there[:] = True
                for row in lacks[j]:
                    there[row] = False
                    one.blank(mine, row)
            whole_field = self._field(records, j, numbers)
            drawn = self._draw(draw, records.ids[j :: self.records_per_row], numbers)
            for rows in stretches:
                arrays = {column: array[rows] for column, array in mine.items()}
                for row, why in one.decode(whole_field.part(rows.start, rows.stop), arrays, drawn):
                    number = int(numbers[rows.start + row])
                    failed.setdefault(rows.start + row, f"sample {number}, field {name!r}: {why}")
        return sorted(failed.items())

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole: dict[str, np.ndarray] = {}
        for name, one in self.inner.items():
            begin = f"{name}{_MARK}"
            mine = {full[len(begin) :]: array for full, array in arrays.items() if full.startswith(begin)}
            there = {"there": mine.pop(_MARK)} if _MARK in mine else {}
            for column, array in (*one.finish(mine).items(), *there.items()):
                called = _called(name, column)
                if called in whole:
                    raise OptionError(f"two arrays of a batch would have the name {called!r}", hint="Rename a field.")
                whole[called] = array
        return whole

    def row_ids(self, ids: np.ndarray) -> np.ndarray:
        return self.lookup.numbers(ids)

    def _field(self, records: Records, j: int, ids: np.ndarray) -> Records:
        width = self.records_per_row
        return Records(ids, records.data, records.starts[j::width], records.nbytes[j::width])

    def _draw(self, draw: Draw, ids: np.ndarray, numbers: np.ndarray) -> Draw:
        """For a decoder that asks for keys by what it takes for record ids."""
        look = draw.keys
        if look is None:
            return draw

        def keys(asked: np.ndarray) -> list[bytes]:
            record_of = dict(zip(numbers.tolist(), ids.tolist(), strict=True))
            return look(np.array([record_of[number] for number in asked.tolist()]))

        return replace(draw, keys=keys)

    def _lack(self, number: int, field: int, key: bytes) -> str:
        name = list(self.inner)[field]
        return f"sample {number} has no record {key.decode(errors='backslashreplace')!r} (field {name!r})"


def _called(field: str, column: str) -> str:
    if column == "data":
        return field
    return f"{field}_{column}" if column in _BESIDE else f"{field}.{column}"
