"""A tree, divided: `flatten` makes of it its arrays and a description of everything else, which goes into the manifest
as JSON, and `unflatten` puts both together again. `Alike` looks whether ranks hold alike what they should, and joins
what each rank has of its own.

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

import base64
import hashlib
import json
import logging
import marshal
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import xxhash

from pario.checkpoint.store import sum_of
from pario.checkpoint.tree import PAGE, Box, Leaves, PerRank, Shard, Spec, reaches_out
from pario.comm.base import AnyWorld
from pario.errors import CorruptedError, OptionError

_log = logging.getLogger("pario")

#: What `Leaves.opened` need not be asked for.
_BUILTIN = frozenset((np.ndarray, dict, list, tuple, type(None), str, bool, int, float, complex, bytes))
#: Containers in containers.
_DEEPEST = 100
_EXACT = 1 << 53  # JSON readers of other languages keep whole numbers up to here
#: About this many bytes are read in a save; at least each 64th page, and at least this many bytes of an array.
_BYTES, _MOST_STEP, _LEAST = 32 << 20, 64, 4 * PAGE
_HINT = "pario.PerRank saves each rank's own value, pario.Shard its part of an array"


class Flat(NamedTuple):
    """A tree, divided. description : what `unflatten` takes; the arrays are numbers in it. values, boxes : of each
    array, what this rank holds, and which part of the whole that is; own : each PerRank"""

    description: Any
    specs: list[Spec]
    values: list[Any]
    boxes: list[Box]
    own: list[Own]


class Own(NamedTuple):
    """A PerRank. flat : this rank's value; everyones : in the description, where those of all ranks go (`Alike`)"""

    path: str
    flat: Flat
    everyones: list[Any]


@lru_cache(maxsize=1 << 16)
def _step(key: str) -> str:
    """A key in a path: without "/", and not ".", ".." or empty, which mean something in HDF5."""
    escaped = quote(key, safe=" !#$&'()*+,:;=@^_`{|}~")
    return escaped.replace(".", "%2E") if not key.strip(".") else escaped


def flatten(tree: Any, leaves: Leaves) -> Flat:
    """Raises OptionError for what cannot be saved; it says where in the tree."""
    flat = Flat(None, [], [], [], [])
    return flat._replace(description=_flatten(tree, "", flat, leaves, 0))


def _flatten(node: Any, path: str, flat: Flat, leaves: Leaves, depth: int) -> Any:
    node = _stand_in(node, path, leaves)
    kind = type(node)
    if kind is not np.ndarray:
        if kind in (str, bool, type(None)) or (kind is int and -_EXACT < node < _EXACT):
            return node
        if kind in (int, float, complex, bytes):
            return _scalar(node)
        if isinstance(node, dict | list | tuple):
            if depth >= _DEEPEST:
                raise OptionError(f"{path!r} lies deeper than {_DEEPEST} containers: does the tree contain itself?")
            return _container(node, path, flat, leaves, depth + 1)
        if kind is PerRank:
            return _own(node, path, flat, leaves)
    try:
        return _leaf(node, path, flat, leaves)
    except OptionError as e:
        raise OptionError(f"at {path or 'the root'!r}: {e.what}", hint=e.hint) from None


def _stand_in(node: Any, path: str, leaves: Leaves) -> Any:
    """The node, or what stands for it."""
    if type(node) in _BUILTIN:
        return node
    try:
        opened = leaves.opened(node)
    except OptionError as e:
        raise OptionError(f"at {path or 'the root'!r}: {e.what}", hint=e.hint) from None
    return node if opened is None else opened[0]


def _own(node: PerRank, path: str, flat: Flat, leaves: Leaves) -> Any:
    mine = flatten(node.value, leaves)
    if mine.own or any(spec.kind == "shard" for spec in mine.specs):
        raise OptionError(f"the PerRank at {path or 'the root'!r} holds a Shard or a PerRank, which it cannot")
    flat.own.append(Own(path, mine, []))
    return {"ranks": flat.own[-1].everyones}


def structure_of(flat: Flat) -> Any:
    """What is compared between saves: of two trees with the same one, the same ranks write the same bytes."""
    return flat.specs, flat.boxes, [(own.path, own.flat.specs) for own in flat.own]


def _scalar(value: Any) -> Any:
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    return {"bytes": base64.b64encode(value).decode()}


def _container(node: Any, path: str, flat: Flat, leaves: Leaves, depth: int) -> Any:
    below = path + "/" if path else ""
    if isinstance(node, dict):
        items = []
        for key, value in node.items():
            if type(key) is str:
                step = _step(key)
            elif type(key) is int:
                step = f"[{key}]"
            else:
                raise OptionError(f"keys must be str or int, got {key!r} at {path or 'the root'!r}")
            items.append([key, _flatten(value, below + step, flat, leaves, depth)])
        return {"dict": items}
    found = [_flatten(value, f"{below}[{k}]", flat, leaves, depth) for k, value in enumerate(node)]
    return {"list" if isinstance(node, list) else "tuple": found}


def _leaf(node: Any, path: str, flat: Flat, leaves: Leaves) -> Any:
    shard = node if isinstance(node, Shard) else None
    value = node.array if shard is not None else node
    described = leaves.describe(value)
    if described is None:
        raise OptionError(
            f"{type(value).__module__}.{type(value).__qualname__} cannot be saved: a tree holds dict, list, tuple, "
            "arrays, Shard, numbers, str, bytes, bool and None",
            hint="For tensors of torch or JAX take the Checkpointer of pario.adapters.torch or pario.adapters.jax",
        )
    dtype, shape = described
    if shard is None:
        spec = Spec(path, dtype, shape, "scalar" if isinstance(value, np.generic) else "array")
        box: Box = ((0,) * len(shape), shape)
    else:
        if not len(shape) == len(shard.global_shape) == len(shard.offset):
            raise OptionError(f"{shard} has {len(shape)} axes in its array: all three must agree")
        if reaches_out((shard.offset, shape), shard.global_shape):
            raise OptionError(f"{shard} of shape {shape} reaches out of the whole array")
        spec, box = Spec(path, dtype, shard.global_shape, "shard"), (shard.offset, shape)
    flat.specs.append(spec)
    flat.values.append(value)
    flat.boxes.append(box)
    return {"array": len(flat.specs) - 1}


def unflatten(description: Any, array: Callable[[int], Any], arrays: int, rank: int | None = None) -> Any:
    """The tree. array(number) : the array with that number, below `arrays`; rank : whose PerRank, None: a list of all.
    Raises CorruptedError."""
    try:
        return _unflatten(description, array, arrays, rank, 0)
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise CorruptedError(f"the manifest describes no tree: {e}") from None


def _unflatten(node: Any, array: Callable[[int], Any], arrays: int, rank: int | None, depth: int) -> Any:
    if type(node) is dict and len(node) == 1 and "array" in node:  # nearly all of them
        number = node["array"]
        if type(number) is not int or not 0 <= number < arrays:
            raise ValueError(f"there is no array {number!r}")
        return array(number)
    if node is None or isinstance(node, str | bool | int):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"{str(node)[:80]!r} is no node")
    if depth > _DEEPEST:
        raise ValueError(f"it is deeper than {_DEEPEST} containers")
    ((kind, value),) = node.items()
    if kind == "ranks" and rank is not None:
        return _unflatten(value[rank], array, arrays, rank, depth + 1) if rank < len(value) else None
    if kind in ("list", "tuple", "ranks"):
        found = [_unflatten(each, array, arrays, rank, depth + 1) for each in _checked(value, list)]
        return tuple(found) if kind == "tuple" else found
    if kind == "dict":
        pairs = [_checked(each, list) for each in _checked(value, list)]
        return {_key(key): _unflatten(child, array, arrays, rank, depth + 1) for key, child in pairs}
    if kind == "complex":
        real, imaginary = _checked(value, list)
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind in _READ:
        return _READ[kind](_checked(value, str))
    raise ValueError(f"{kind[:80]!r} is no kind of node")


_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:80]!r} instead of a {kind.__name__}")
    return value


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{str(key)[:80]!r} is no key")
    return key


# -- on several ranks --------------------------------------------------------------------------------------------------


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
        arrays = {flat.specs[n].path: digest for n, digest in zip(self._compared, digests.tolist(), strict=True)}
        everyones = world.allgather((step, arrays, _plain(flat.description, "", {})))
        steps = [each[0] for each in everyones]
        if len(set(steps)) > 1:
            raise world.raised_by_all(OptionError(f"step differs between ranks: {min(steps)} and {max(steps)}"))
        said: dict[str, str] = {}
        # One path may be that of an array and of something else: slashes in keys are escaped in those of arrays alone.
        for rank, kind in product(reversed(range(world.size)), (1, 2)):
            first, theirs = everyones[0][kind], everyones[rank][kind]
            for path in theirs.keys() | first.keys():
                values = first.get(path), theirs.get(path)
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
        differing = [number for number in self._compared if flat.specs[number].path in said]
        self.owners |= dict.fromkeys(differing, 0)
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

    def moved(each: dict[str, Any]) -> Any:
        return {"array": each["array"] + by} if "array" in each else each

    return json.loads(json.dumps(node), object_hook=moved)


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
