"""Whether ranks hold alike what they should, and what each rank has of its own.

An array that is no Shard is cut among the ranks, which is right only if it is the same on all of them. So every save
compares digests of the arrays and of everything else in the tree. What differs is written by rank 0 as a whole, and
named, or refused.

Every rank has to read all of each array for that, while it copies only its share. The first save of a structure reads
all, and so does every save where all of them together are small; otherwise later ones read every n-th page of an array,
other pages each time, so that the time hardly depends on the model's size. A difference in a few elements of a large
array that begins after the first save may therefore be found some saves later; with `raises` all is read each time.
Arrays below 128 KiB are always read whole: running statistics, counters, states of generators.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
from typing import Any

import numpy as np
import xxhash

from pario.checkpoint.manifest import sum_of
from pario.checkpoint.tree import PAGE, Flat, Leaves, Spec
from pario.comm.base import AnyWorld
from pario.errors import OptionError

_log = logging.getLogger("pario")

#: About this many bytes are read in a save; at least each 64th page, and at least this many bytes of an array.
_BYTES, _MOST_STEP, _LEAST = 32 << 20, 64, 4 * PAGE
_HINT = "pario.PerRank saves each rank's own value, pario.Shard its part of an array"


class Alike:
    """Of one rank. raises : refuse what differs; owners : array -> the rank that writes all of it, where one does"""

    def __init__(self, world: AnyWorld, leaves: Leaves, raises: bool) -> None:
        self._world, self._leaves, self._raises = world, leaves, raises
        self.owners: dict[int, int] = {}
        self._turn = 0
        self._told: set[str] = set()
        self._compared: list[int] = []  # arrays
        self._step = 1  # from one page that is read to the next
        self._joined = Flat(None, [], [], [], [])  # with the arrays that ranks have of their own
        self._first: list[list[int]] = []  # PerRank -> rank -> the number of its first array

    def check(self, step: int, flat: Flat, anew: bool) -> tuple[Flat, bool]:
        """(the tree with what all ranks have of their own, whether it has to be laid out anew). Collective; raises
        OptionError on all ranks.

        anew : the structure may be another one than that of the last call
        """
        if anew:
            self._begin(flat)
        anew = self._compare(step, flat, anew) or anew
        if flat.own:
            flat = self._with_own(flat, anew)
        return flat, anew

    def _begin(self, flat: Flat) -> None:
        self._joined = flat
        self.owners = {}
        self._compared = [number for number, spec in enumerate(flat.specs) if spec.kind != "shard"]
        nbytes = sum(flat.specs[number].nbytes for number in self._compared)
        self._step = min(_MOST_STEP, 1 if self._raises else max(1, -(-nbytes // _BYTES)))
        mine = flat.specs, [own.path for own in flat.own]
        if len(set(self._world.allgather(hashlib.sha256(repr(mine).encode()).hexdigest()))) > 1:
            everyones = self._world.allgather(mine)
            rank = next(rank for rank, each in enumerate(everyones) if each != everyones[0])
            what = _other_tree(everyones[0], everyones[rank], rank)
            raise self._world.raised_by_all(OptionError(f"{what}: keys, types and shapes must agree", hint=_HINT))

    def _compare(self, step: int, flat: Flat, whole: bool) -> bool:
        """Whether arrays were found that differ. whole : read all bytes"""
        world = self._world
        if world.size == 1:
            return False
        digests, total, error = np.empty(0, np.uint64), -1, None
        try:
            digests = self._digests(flat, 1 if whole else self._step)
            total = sum_of(marshal.dumps((step, flat.description, digests.tobytes()), 2)) >> 1
        except Exception as e:
            error = e
        least, most = world.allreduce_min(total), world.allreduce_max(total)
        if least < 0:
            world.agree(error, "comparing what ranks hold alike")
        if least == most:
            return False
        everyones = world.allgather((step, digests, _plain(flat.description, "", {})))
        steps = [each[0] for each in everyones]
        if len(set(steps)) > 1:
            raise world.raised_by_all(OptionError(f"step differs between ranks: {min(steps)} and {max(steps)}"))
        said: dict[str, str] = {}
        for rank, (_, theirs, plain) in reversed(list(enumerate(everyones))):
            for k in np.flatnonzero(theirs != everyones[0][1]).tolist():
                path = flat.specs[self._compared[k]].path or "the root"
                said[path] = f"{path!r} differs between ranks 0 and {rank}"
            for path in plain.keys() | everyones[0][2].keys():
                values = everyones[0][2].get(path), plain.get(path)
                if values[0] != values[1]:
                    said[path] = f"{path or 'the root'!r} differs between ranks 0 and {rank}"
                    if None in values:
                        has, lacks = (rank, 0) if values[0] is None else (0, rank)
                        said[path] = f"rank {has} has {path!r}, and rank {lacks} does not"
        if self._raises and said:
            more = f" (and {len(said) - 20} more)" if len(said) > 20 else ""
            raise world.raised_by_all(OptionError("; ".join(sorted(said.values())[:20]) + more, hint=_HINT))
        news = sorted(said.keys() - self._told)
        self._told.update(news)
        if news and world.rank == 0:
            what = "; ".join(said[path] for path in news)
            _log.warning("%s. What rank 0 has is saved (said once). %s", what, _HINT)
        differing = {int(k) for each in everyones for k in np.flatnonzero(each[1] != everyones[0][1])}
        self.owners |= {self._compared[k]: 0 for k in differing}
        self._compared = [number for number in self._compared if number not in self.owners]
        return bool(differing)

    def _digests(self, flat: Flat, step: int) -> np.ndarray:
        """u64 per compared array."""
        self._turn += 1
        found = np.empty(len(self._compared), np.uint64)
        for k, number in enumerate(self._compared):
            value, apart = flat.values[number], max(1, min(step, flat.specs[number].nbytes // _LEAST))
            if apart == 1 and type(value) is np.ndarray and value.dtype.kind in "biufc" and value.flags.c_contiguous:
                found[k] = sum_of(value)
                continue
            digest = xxhash.xxh3_64()
            pages, rest = self._leaves.held(value, self._turn % apart, apart)
            for data in pages if apart > 1 else [pages]:
                digest.update(data)
            digest.update(rest)
            found[k] = digest.intdigest()
        return found

    def _with_own(self, flat: Flat, anew: bool) -> Flat:
        """Collective."""
        everyones = self._world.allgather([(own.flat.description, own.flat.specs) for own in flat.own])
        if anew:
            before = self._joined.specs[: len(flat.values)]
            self._joined = flat._replace(specs=list(before), boxes=self._joined.boxes[: len(flat.values)])
            self._first = [[] for _ in flat.own]
            for k, own in enumerate(flat.own):
                for rank, each in enumerate(everyones):
                    self._first[k].append(len(self._joined.specs))
                    for spec in each[k][1]:
                        self.owners[len(self._joined.specs)] = rank
                        path = "/".join(filter(None, (own.path, f"[{rank}]", spec.path)))
                        self._joined.specs.append(spec._replace(path=path))
                        self._joined.boxes.append(((0,) * len(spec.shape), spec.shape))
        values = flat.values + [None] * (len(self._joined.specs) - len(flat.values))
        for k, own in enumerate(flat.own):
            begin = self._first[k][self._world.rank]
            values[begin : begin + len(own.flat.values)] = own.flat.values
            own.everyones[:] = [_moved(each[k][0], self._first[k][rank]) for rank, each in enumerate(everyones)]
        return flat._replace(specs=self._joined.specs, boxes=self._joined.boxes, values=values)


def check_same(world: AnyWorld, value: int, what: str) -> None:
    """Collective. Raises OptionError on all ranks if they have different values."""
    least, most = world.allreduce_min(value), world.allreduce_max(value)
    if least != most:
        raise world.raised_by_all(OptionError(f"{what} differs between ranks: {least} and {most}"))


def _moved(node: Any, by: int) -> Any:
    """A description whose arrays begin at number `by`."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "array":
        return {"array": value + by}
    if kind == "dict":
        return {"dict": [[key, _moved(each, by)] for key, each in value]}
    return {kind: [_moved(each, by) for each in value]} if kind in ("list", "tuple") else node


def _plain(node: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    """path -> what is there, of all that is no array; of containers which kind."""
    kind, value = next(iter(node.items())) if isinstance(node, dict) else ("", node)
    if kind in ("array", "ranks"):
        return found
    below = path + "/" if path else ""
    found[path] = kind, value
    if kind in ("dict", "list", "tuple"):
        found[path] = kind
        for key, each in value if kind == "dict" else enumerate(value):
            _plain(each, f"{below}{key}" if isinstance(key, str) else f"{below}[{key}]", found)
    return found


def _other_tree(first: tuple[list[Spec], list[str]], other: tuple[list[Spec], list[str]], rank: int) -> str:
    """What the tree of that rank has otherwise than that of rank 0."""
    both = [
        {spec.path: f"{spec.dtype}{list(spec.shape)}{' in shards' * (spec.kind == 'shard')}" for spec in specs}
        | dict.fromkeys(own, "a PerRank")
        for specs, own in (first, other)
    ]
    for path in [*both[0], *both[1]]:
        mine, theirs = both[0].get(path, "nothing"), both[1].get(path, "nothing")
        if mine != theirs:
            return f"{path or 'the root'!r} differs between ranks: rank 0 has {mine} there, rank {rank} {theirs}"
    return f"the keys of rank {rank} come in another order than those of rank 0"
