"""What is saved: a tree of dicts, lists and tuples with arrays, numbers, strings, bytes and None as leaves.

`flatten` divides a tree into its arrays and a description of everything else, which goes into the manifest as JSON;
`unflatten` puts both together again. What is an array, and of what type, `Leaves` decides: the one here knows NumPy,
those of pario/adapters know the tensors of a framework.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from pario.checkpoint.dtypes import FOREIGN, dtype_name, dtype_of, item_bytes, named
from pario.errors import CorruptedError, OptionError

#: A rectangular part of an array: (offset of its first element per axis, shape)
Box = tuple[tuple[int, ...], tuple[int, ...]]

#: What `Leaves.opened` need not be asked for.
_BUILTIN = frozenset((np.ndarray, dict, list, tuple, type(None), str, bool, int, float, complex, bytes))
#: Containers in containers.
_DEEPEST = 100
#: Bytes of what `Leaves.held` calls a page: long enough that a loop over them costs little.
PAGE = 16 << 10
_EXACT = 1 << 53  # JSON readers of other languages keep whole numbers up to here


class Shard:
    """This rank's part of an array that is divided among ranks.

    array : the part; in `like` anything with its shape and dtype
    global_shape : shape of the whole array
    offset : where the part's first element lies in it, one number per axis

    Together the parts of all ranks must make up the array. Parts that several ranks hold alike are written once.
    """

    __slots__ = ("array", "global_shape", "offset")

    def __init__(self, array: Any, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        self.array = array
        self.global_shape = tuple(int(n) for n in global_shape)
        self.offset = tuple(int(n) for n in offset)

    def __repr__(self) -> str:
        return f"Shard(global_shape={self.global_shape}, offset={self.offset})"


class PerRank:
    """What every rank has for itself: the state of a random generator, of a loader of its own.

    value : a tree without Shard and PerRank; its keys, types and shapes may differ between ranks

    `restore` gives each rank what the rank of the same number has saved, without the PerRank around it. On more ranks
    than have saved, those beyond get None; on fewer, what the others have saved is left out. Rank 0 warns of both.
    In `like` it may stand around what is wanted.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Bits:
    """The bits of an array whose type NumPy does not know, in an array of unsigned integers of that size.

    array : u8[...] or u16[...]; dtype : "bfloat16", "float8_e4m3fn", ...
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        if FOREIGN.get(dtype) != array.dtype.itemsize or array.dtype.kind not in "ui":
            raise OptionError(f"Bits need an integer array of a size that fits {dtype!r}, got {array.dtype}")
        self.array = array
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Bits({self.array.shape}, {self.dtype})"


class Spec(NamedTuple):
    """One array of a tree, the same on all ranks.

    path : its keys from the root, escaped, with "/" between them
    dtype : see `dtype_of`; shape : of the whole array; kind : "array", "shard" or "scalar" (a NumPy scalar)
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


class Flat(NamedTuple):
    """A tree, divided. description : what `unflatten` takes; the arrays are numbers in it. values, boxes : of each
    array, what this rank holds, and which part of the whole that is; own : each PerRank"""

    description: Any
    specs: list[Spec]
    values: list[Any]
    boxes: list[Box]
    own: list[Own]


class Own(NamedTuple):
    """A PerRank. flat : this rank's value; everyones : in the description, where those of all ranks go (alike.py)"""

    path: str
    flat: Flat
    everyones: list[Any]


def reaches_out(box: Box, shape: tuple[int, ...]) -> bool:
    """Of an array of that shape."""
    return any(o < 0 or n < 0 or o + n > m for o, n, m in zip(*box, shape, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """The part that both have; None if that is empty."""
    first = tuple(map(max, a[0], b[0]))
    shape = tuple(min(p + m, q + n) - f for p, m, q, n, f in zip(a[0], a[1], b[0], b[1], first, strict=True))
    return None if any(n <= 0 for n in shape) else (first, shape)


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of `box` in an array whose first element lies at `origin`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(box[0], box[1], origin, strict=True))


def runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of an array in C order, as at most 2 * ndim - 1 boxes, each one piece of the order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # both ends in one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, inner in runs(shape[1:], start, stop):
        yield (row, *offset), (1, *inner)


class Leaves:
    """NumPy's arrays. An adapter derives from it for the tensors of a framework; all methods are local."""

    def opened(self, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        """What stands for a node of a framework's own, a dict of its children or a Shard; and what makes such a node of
        what was restored for that. None for any other. Raises OptionError for one that cannot be saved."""
        return None

    def wanted(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        """As `describe`, of a leaf of `like`, which may lack its data."""
        return self.describe(leaf)

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        """(name of the dtype, shape); None if it is no array. Raises OptionError for one that cannot be saved."""
        if isinstance(leaf, np.ndarray | np.generic):
            kind = type(leaf)
            if isinstance(leaf, np.ndarray) and (isinstance(leaf, np.ma.MaskedArray) or not _is_numpys(kind)):
                raise OptionError(
                    f"a {kind.__module__}.{kind.__qualname__} would come back as a plain array, without what it adds",
                    hint="Save its parts, of a masked array data and mask, or numpy.asarray(it) where that is enough",
                )
            return dtype_name(leaf.dtype), leaf.shape
        if isinstance(leaf, Bits):
            return leaf.dtype, leaf.array.shape
        return None

    def target(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
        """`memory`, u8[bytes], as what `copy` writes into."""
        return memory.view(dtype_of(dtype)).reshape(shape)

    def copy(self, leaf: Any, target: Any) -> None:
        """Copy the whole leaf."""
        np.copyto(target, _array(leaf, target.dtype))

    def copy_run(self, leaf: Any, start: int, stop: int, target: Any) -> None:
        """Copy elements [start, stop) in C order; `target` has one axis."""
        np.copyto(target, _array(leaf, target.dtype).reshape(-1)[start:stop])

    def held(self, leaf: Any, begin: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of its bytes in C order, u8: every `step`-th page from number `begin` on, and what is no whole page."""
        flat = np.ascontiguousarray(leaf.array if isinstance(leaf, Bits) else leaf).reshape(-1).view(np.uint8)
        whole = flat.size // PAGE * PAGE
        return flat[:whole].reshape(-1, PAGE)[begin::step], flat[whole:]

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        """The array that lies in `memory`, u8[bytes], which it may keep. like : this leaf of the user's tree or None"""
        array = memory.view(dtype_of(dtype)).reshape(shape)
        if dtype in FOREIGN:
            known = named(dtype)
            return Bits(array, dtype) if known is None or isinstance(like, Bits) else array.view(known)
        return array


def _is_numpys(kind: type) -> bool:
    return kind is np.ndarray or kind.__module__.partition(".")[0] == "numpy"


def _array(leaf: Any, dtype: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(leaf.array if isinstance(leaf, Bits) else leaf)
    return array if array.dtype == dtype else array.view(dtype)


# -- trees -------------------------------------------------------------------------------------------------------------


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


class Template:
    """A tree that was flattened before: another one of the same structure is flattened in a fraction of the time.

    specs, boxes : of its arrays; their order is that of the tree
    """

    def __init__(self, tree: Any, flat: Flat, leaves: Leaves) -> None:
        self.specs = flat.specs
        self.boxes = flat.boxes
        self._own = [own.flat.specs for own in flat.own]
        self._leaves = leaves
        self._root = self._of(tree, flat.description, flat)

    def _of(self, node: Any, description: Any, flat: Flat) -> Any:
        """(type, what must agree, children or None, description)"""
        kind, node = type(node), _stand_in(node, "", self._leaves)
        if isinstance(node, dict | list | tuple):
            values = list(node.values()) if isinstance(node, dict) else node
            below = next(iter(description.values()))
            inner = [each[1] for each in below] if isinstance(node, dict) else below
            children = [self._of(value, each, flat) for value, each in zip(values, inner, strict=True)]
            return kind, list(node) if isinstance(node, dict) else len(children), children, description
        if kind is not PerRank and isinstance(description, dict) and "array" in description:
            plain = (node.dtype, node.shape) if kind is np.ndarray else description["array"]
            return kind, plain, None, description
        return kind, None, None, None

    def flatten(self, tree: Any) -> Flat | None:
        """None if the tree has another structure. Raises OptionError for what cannot be saved."""
        flat = Flat(None, self.specs, [], self.boxes, [])
        try:
            description = self._flatten(tree, self._root, flat)
        except _DiffersError:
            return None
        return flat._replace(description=description)

    def _flatten(self, node: Any, known: Any, flat: Flat) -> Any:
        values = flat.values
        kind, plain, children, description = known
        if type(node) is not kind:
            raise _DiffersError
        node = _stand_in(node, "", self._leaves)
        if children is not None:
            if isinstance(node, dict):
                if list(node) != plain:
                    raise _DiffersError
                inner: Any = zip(node.values(), children, strict=True)
            elif len(node) != plain:
                raise _DiffersError
            else:
                inner = zip(node, children, strict=True)
            found = []
            for value, child in inner:
                if child[0] is np.ndarray and type(value) is np.ndarray:  # nearly all of them, without a call
                    if value.dtype != child[1][0] or value.shape != child[1][1]:
                        raise _DiffersError
                    values.append(value)
                    found.append(child[3])
                else:
                    found.append(self._flatten(value, child, flat))
            name = next(iter(description))
            return {name: list(map(list, zip(plain, found, strict=True)))} if name == "dict" else {name: found}
        if kind is np.ndarray:
            if (node.dtype, node.shape) != plain:
                raise _DiffersError
            values.append(node)
            return description
        if kind is PerRank:
            made = _own(node, "", flat, self._leaves)
            if flat.own[-1].flat.specs != self._own[len(flat.own) - 1]:
                raise _DiffersError
            return made
        if plain is not None:
            alone = Flat(None, [], [], [], [])
            _leaf(node, "", alone, self._leaves)
            if alone.specs[0][1:] != self.specs[plain][1:] or alone.boxes[0] != self.boxes[plain]:
                raise _DiffersError
            values.append(alone.values[0])
            return description
        return _flatten(node, "", Flat(None, [], [], [], []), self._leaves, 0)


class _DiffersError(Exception):
    """From a template."""


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
