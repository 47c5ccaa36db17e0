"""What is saved: a tree of dicts, lists and tuples with arrays, numbers, strings, bytes and None as leaves.

`flatten` divides a tree into its arrays and a description of everything else, which goes into the manifest as JSON;
`unflatten` puts both together again. What is an array, and of what type, `Leaves` decides: the one here knows NumPy,
those of pario/adapters know the tensors of a framework.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from pario.checkpoint.boxes import Box, volume
from pario.errors import CorruptedError, OptionError, StateError

__all__ = [
    "Bits", "Flat", "Leaf", "Leaves", "Shard", "Spec", "Template", "dtype_of", "flatten", "item_bytes", "pick",
    "unflatten",
]  # fmt: skip

#: Types without a NumPy dtype of their own, by the name that frameworks and ml_dtypes use -> bytes of an element.
FOREIGN = {
    "bfloat16": 2,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"), 1),
    **dict.fromkeys(("float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "int4", "uint4", "int2", "uint2"), 1),
}
#: What a dtype of a manifest may look like: NumPy's `dtype.str`, never an object.
_PLAIN = re.compile(r"[<>|][biufcSUMmV]\d{1,9}(\[\d{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_FIELDS = "fields:"
#: Containers in containers.
_DEEPEST = 100
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
        return volume(self.shape) * item_bytes(self.dtype)


class Leaf(NamedTuple):
    """What this rank holds of one array: the leaf of the tree, and which part of the whole it is."""

    value: Any
    box: Box


class Flat(NamedTuple):
    """A tree, divided. description : what `unflatten` takes; the arrays are numbers in it. values, boxes : of each
    array, what this rank holds, and which part of the whole that is"""

    description: Any
    specs: list[Spec]
    values: list[Any]
    boxes: list[Box]

    @property
    def leaves(self) -> list[Leaf]:
        return list(map(Leaf, self.values, self.boxes))


class Leaves:
    """NumPy's arrays. An adapter derives from it for the tensors of a framework; all methods are local."""

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        """(name of the dtype, shape); None if it is no array. Raises OptionError for one that cannot be saved."""
        if isinstance(leaf, np.ndarray | np.generic):
            return dtype_name(leaf.dtype), leaf.shape
        if isinstance(leaf, Bits):
            return leaf.dtype, leaf.array.shape
        return None

    def target(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
        """`memory`, u8[bytes], as what `copy` writes into."""
        return memory.view(_held_as(dtype)).reshape(shape)

    def copy(self, leaf: Any, target: Any) -> None:
        """Copy the whole leaf."""
        np.copyto(target, _array(leaf, target.dtype))

    def copy_run(self, leaf: Any, start: int, stop: int, target: Any) -> None:
        """Copy elements [start, stop) in C order; `target` has one axis."""
        np.copyto(target, _array(leaf, target.dtype).reshape(-1)[start:stop])

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        """The array that lies in `memory`, u8[bytes], which it may keep. like : this leaf of the user's tree or None"""
        array = memory.view(_held_as(dtype)).reshape(shape)
        if dtype in FOREIGN:
            known = _named(dtype)
            return Bits(array, dtype) if known is None or isinstance(like, Bits) else array.view(known)
        return array


def _array(leaf: Any, dtype: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(leaf.array if isinstance(leaf, Bits) else leaf)
    return array if array.dtype == dtype else array.view(dtype)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """As manifests name it: NumPy's `dtype.str`, a name of FOREIGN, or "fields:" and the fields as JSON."""
    if dtype.hasobject:
        raise OptionError(
            f"an array of dtype {dtype} holds Python objects, which cannot be saved", hint="Save numbers or text"
        )
    if dtype.kind == "V" or dtype.kind not in "biufcSUMm":
        if dtype.name in FOREIGN:
            return dtype.name
        if dtype.fields is not None or dtype.subdtype is not None:
            return _FIELDS + json.dumps(np.lib.format.dtype_to_descr(dtype))
        if dtype.kind != "V":
            raise OptionError(f"an array of dtype {dtype} cannot be saved: nothing says how to read it back")
    return dtype.str


@lru_cache(maxsize=1024)
def _held_as(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which arrays of that name are held. Raises CorruptedError for a name that means nothing."""
    if name in FOREIGN:
        return np.dtype(f"u{FOREIGN[name]}")
    try:
        if name.startswith(_FIELDS):
            dtype = np.lib.format.descr_to_dtype(_as_descr(json.loads(name[len(_FIELDS) :])))
        elif _PLAIN.fullmatch(name):
            dtype = np.dtype(name)
        else:
            raise ValueError("unknown")
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, SyntaxError) as e:
        raise CorruptedError(f"{name[:200]!r} is no dtype: {e}") from None
    return dtype


def _as_descr(value: Any) -> Any:
    """JSON has no tuples; a descr is a list of tuples, whose shapes are tuples."""
    if isinstance(value, list):
        return [tuple(_as_descr(e) if i == 1 else _tuple(e) for i, e in enumerate(field)) for field in value]
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        raise ValueError(f"a field of type {value!r}")
    return value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _named(name: str) -> np.dtype[Any] | None:
    """NumPy's dtype of that name, if ml_dtypes is installed."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    found = getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which arrays with that name are held: integers for foreign types. Raises CorruptedError."""
    return _held_as(name)


def item_bytes(name: str) -> int:
    """Bytes of an element."""
    return _held_as(name).itemsize


# -- trees -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def _step(key: str) -> str:
    """A key in a path: without "/", and not ".", ".." or empty, which mean something in HDF5."""
    escaped = quote(key, safe=" !#$&'()*+,:;=@^_`{|}~")
    return escaped.replace(".", "%2E") if not key.strip(".") else escaped


def flatten(tree: Any, leaves: Leaves) -> Flat:
    """Raises OptionError for what cannot be saved; it says where in the tree."""
    flat = Flat(None, [], [], [])
    return flat._replace(description=_flatten(tree, "", flat, leaves, 0))


def _flatten(node: Any, path: str, flat: Flat, leaves: Leaves, depth: int) -> Any:
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
    try:
        return _leaf(node, path, flat, leaves)
    except OptionError as e:
        raise OptionError(f"at {path or 'the root'!r}: {e.what}", hint=e.hint) from None


class Template:
    """A tree that was flattened before: another one of the same structure is flattened in a fraction of the time.

    specs, boxes : of its arrays; their order is that of the tree
    """

    def __init__(self, tree: Any, flat: Flat, leaves: Leaves) -> None:
        self.specs = flat.specs
        self.boxes = flat.boxes
        self._leaves = leaves
        self._root = self._of(tree, flat.description, flat)

    def _of(self, node: Any, description: Any, flat: Flat) -> Any:
        """(type, what must agree, children or None, description)"""
        kind = type(node)
        if isinstance(node, dict | list | tuple):
            values = list(node.values()) if isinstance(node, dict) else node
            below = next(iter(description.values()))
            inner = [each[1] for each in below] if isinstance(node, dict) else below
            children = [self._of(value, each, flat) for value, each in zip(values, inner, strict=True)]
            return kind, list(node) if isinstance(node, dict) else len(children), children, description
        if isinstance(description, dict) and "array" in description:
            plain = (node.dtype, node.shape) if kind is np.ndarray else description["array"]
            return kind, plain, None, description
        return kind, None, None, None

    def flatten(self, tree: Any) -> Flat | None:
        """None if the tree has another structure. Raises OptionError for what cannot be saved."""
        values: list[Any] = []
        try:
            description = self._flatten(tree, self._root, values)
        except _DiffersError:
            return None
        return Flat(description, self.specs, values, self.boxes)

    def _flatten(self, node: Any, known: Any, values: list[Any]) -> Any:
        kind, plain, children, description = known
        if type(node) is not kind:
            raise _DiffersError
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
                    found.append(self._flatten(value, child, values))
            name = next(iter(description))
            return {name: list(map(list, zip(plain, found, strict=True)))} if name == "dict" else {name: found}
        if kind is np.ndarray:
            if (node.dtype, node.shape) != plain:
                raise _DiffersError
            values.append(node)
            return description
        if plain is not None:
            alone = Flat(None, [], [], [])
            _leaf(node, "", alone, self._leaves)
            if alone.specs[0][1:] != self.specs[plain][1:] or alone.boxes[0] != self.boxes[plain]:
                raise _DiffersError
            values.append(alone.values[0])
            return description
        return _flatten(node, "", Flat(None, [], [], []), self._leaves, 0)


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
        if any(o < 0 or n + o > m for o, n, m in zip(shard.offset, shape, shard.global_shape, strict=True)):
            raise OptionError(f"{shard} of shape {shape} reaches out of the whole array")
        spec, box = Spec(path, dtype, shard.global_shape, "shard"), (shard.offset, shape)
    flat.specs.append(spec)
    flat.values.append(value)
    flat.boxes.append(box)
    return {"array": len(flat.specs) - 1}


def unflatten(description: Any, array: Callable[[int], Any], arrays: int) -> Any:
    """The tree. array(number) : the array with that number, below `arrays`. Raises CorruptedError."""
    try:
        return _unflatten(description, array, arrays, 0)
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise CorruptedError(f"the manifest describes no tree: {e}") from None


def _unflatten(node: Any, array: Callable[[int], Any], arrays: int, depth: int) -> Any:
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
    if kind in ("list", "tuple"):
        found = [_unflatten(each, array, arrays, depth + 1) for each in _checked(value, list)]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        pairs = [_checked(each, list) for each in _checked(value, list)]
        return {_key(key): _unflatten(child, array, arrays, depth + 1) for key, child in pairs}
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


def pick(
    like: Any, saved: Any, array: Callable[[Any, int, str], Any], other: Callable[[Any], Any], path: str = ""
) -> Any:
    """What `like` asks for: its tree, with what was saved as leaves.

    saved : the description; array(leaf of like, number, path) makes an array; other(description) anything else
    Raises StateError where `like` and the saved tree differ. What `like` leaves out is left out.
    """
    here = path or "the root"
    kind = next(iter(saved)) if isinstance(saved, dict) and len(saved) == 1 else ""
    if isinstance(like, dict):
        if kind != "dict":
            raise StateError(f"like has a dict at {here!r}, and the checkpoint something else")
        children = {key: child for key, child in saved["dict"]}
        missing = [key for key in like if key not in children]
        if missing:
            raise StateError(f"the checkpoint has no {missing[0]!r} in {here!r}; it has {list(children)[:20]}")
        return {key: pick(value, children[key], array, other, f"{path}/{key}") for key, value in like.items()}
    if isinstance(like, list | tuple):
        if kind not in ("list", "tuple") or len(saved[kind]) != len(like):
            raise StateError(f"like has {len(like)} items at {here!r}, and the checkpoint something else")
        pairs = enumerate(zip(like, saved[kind], strict=True))
        found = [pick(value, child, array, other, f"{path}/[{k}]") for k, (value, child) in pairs]
        if hasattr(like, "_fields"):
            return type(like)(*found)
        return found if isinstance(like, list) else tuple(found)
    if kind == "array":
        return array(like, saved["array"], path)
    return other(saved)
