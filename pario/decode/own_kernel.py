"""The user's own kernel as decoder: a function of one record that Numba compiles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, columns
from pario.errors import OptionError
from pario.records import Records

#: what a kernel may ask for behind its rows
_ASKED = ("id", "seed")


class Kernel(Decoder):
    """Calls a function of one record, compiled by Numba, for all records of a batch in one call without the GIL.

        def decode(value, image, label):
            label[0] = value[0]
            image[:] = value[1:].reshape(3, 32, 32) / np.float32(255)

        Kernel(decode, {"image": ("float32", (3, 32, 32)), "label": "int64"})

    The function's parameters are the record's bytes, a read-only u8[k] array; then one array per output, by the
    outputs' names and in their order (the name of a single one is free); then, if it wants them, `id`, the record's id,
    and `seed`, a number that depends on the seed, the epoch and the record's id alone (np.random.seed(seed) makes
    NumPy's functions of random numbers inside the kernel follow it). An output without a shape is an array of one
    element. Rows hold anything before the call: write all of them.

    The record is bad if the function raises, or returns a number other than 0. Numba compiles it on its first use in
    each process, and does not keep it.

    Parameters
    ----------
    f : function
        It must have the form above, and Numba must be able to compile it.
    outputs : dict name -> dtype or (dtype, shape)
    debug : bool
        Compare each index with the size of its array, so that a wrong one is an error of its record. Without it a
        wrong index reads or overwrites foreign memory.
    parallel : bool
        Divide each batch among the threads that decode. It pays for kernels of many microseconds per record.
    """

    def __init__(
        self, f: Callable[..., Any], outputs: Mapping[str, Any], *, debug: bool = False, parallel: bool = False
    ) -> None:
        if not inspect.isfunction(f):
            f = getattr(f, "py_func", f)  # what numba.njit returned
        if not inspect.isfunction(f):
            raise OptionError(f"a kernel must be a plain function, got {f!r}")
        self.f, self.debug, self.parallel = f, bool(debug), bool(parallel)
        self.outputs = _outputs(outputs)
        self.asked = _asked(f, list(self.outputs))
        self.spec = True  # nothing depends on record 0
        self.__doc__ = f.__doc__ or type(self).__doc__
        self.__module__ = f.__module__
        self.__qualname__ = f.__qualname__

    def __repr__(self) -> str:
        said = {name: (dtype.str, shape) if shape else dtype.str for name, (shape, dtype) in self.outputs.items()}
        more = "".join(f", {name}=True" for name in ("debug", "parallel") if getattr(self, name))
        return f"{type(self).__name__}({self.f.__qualname__}, {said!r}{more})"

    def __reduce__(self) -> Any:
        # A decorated function goes by its name, as functions do: its name leads here, not to the function.
        found: Any = sys.modules.get(self.f.__module__)
        for name in self.f.__qualname__.split("."):
            found = getattr(found, name, None)
        return self.f.__qualname__ if found is self else (_made, (self.f, self.outputs, self.debug, self.parallel))

    def learn(self, record: np.ndarray) -> bool:
        return self.learn_at(record, 0, Draw())

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> bool:
        one = np.array([number], np.int64), np.ascontiguousarray(record), np.zeros(1, np.int64)
        records = Records(*one, np.array([len(record)], np.int64))
        out = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.shapes(records).items()}
        failures = self.decode(records, out, draw)
        if failures:
            raise self._refused(record, failures[0][1])
        return True

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        return {name: ((len(records), *shape), dtype) for name, (shape, dtype) in self.outputs.items()}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        loop, _ = self._compiled
        data, starts, nbytes, codes = columns(records)
        ids = np.array(records.ids, np.int64)
        outside = (starts < 0) | (nbytes < 0) | (starts > len(data) - nbytes)
        if outside.any():
            return [(int(i), "the record lies outside the bytes that were read") for i in np.flatnonzero(outside)]
        arrays = tuple(out[name] if shape else out[name].reshape(-1, 1) for name, (shape, _) in self.outputs.items())
        failures: Failures = []
        at = np.zeros(1, np.int64)
        codes[:] = 0
        while at[0] < len(starts):
            try:
                loop(data, starts, nbytes, ids, draw.key, arrays, codes, at)
                break
            except Exception as error:
                text = str(error)
                failures.append((int(at[0]), f"{type(error).__name__}: {text}" if text else type(error).__name__))
                at[0] += 1
        failures += [(int(i), f"{self.f.__qualname__} returned {int(codes[i])}") for i in np.flatnonzero(codes)]
        return sorted(failures)

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """(loop, function). Raises OptionError if Numba cannot."""
        return _compile(self)


def kernel(
    outputs: Mapping[str, Any], *, debug: bool = False, parallel: bool = False
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: the function becomes a decoder, `Kernel(f, outputs)`.

        @pario.decode.kernel({"image": ("float32", (3, 32, 32)), "label": "int64"})
        def decode(value, image, label): ...

        loader = pario.Loader("train.lmdb", 64, decode)
    """
    return lambda f: Kernel(f, outputs, debug=debug, parallel=parallel)


def _made(f: Callable[..., Any], outputs: Mapping[str, ArraySpec], debug: bool, parallel: bool) -> Kernel:
    return Kernel(f, {name: (dtype, shape) for name, (shape, dtype) in outputs.items()}, debug=debug, parallel=parallel)


def _outputs(outputs: Any) -> dict[str, ArraySpec]:
    """name -> (shape, dtype) of a row."""
    if not isinstance(outputs, Mapping) or not outputs:
        raise OptionError(f"outputs must be name -> dtype or (dtype, shape), got {outputs!r}")
    found = {}
    for name, of in outputs.items():
        try:
            row = np.dtype(of if not isinstance(of, tuple) else (of[0], of[1]))
        except (TypeError, ValueError, IndexError) as error:
            raise OptionError(f"output {name!r} must be a dtype or (dtype, shape), got {of!r}: {error}") from error
        base = row.base
        if not isinstance(name, str) or base.kind not in "biufc" or base == np.float16 or not base.isnative:
            raise OptionError(
                f"output {name!r} must be numbers that Numba knows, in this machine's byte order, got {of!r}"
            )
        found[name] = (row.shape, base)
    return found


def _asked(f: Callable[..., Any], outputs: list[str]) -> list[str]:
    """Which of `id` and `seed` the function wants. Raises OptionError if its parameters are not as they must be."""
    parameters = list(inspect.signature(f).parameters.values())
    names = [p.name for p in parameters]
    asked = [name for name in names[1 + len(outputs) :] if name in _ASKED]
    rows = names[1 : 1 + len(outputs)]
    plain = all(p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    right = rows == outputs or (len(outputs) == 1 and len(rows) == 1 and rows[0] not in _ASKED)
    if not plain or not right or names[1 + len(outputs) :] != [name for name in _ASKED if name in asked]:
        raise OptionError(
            f"{f.__qualname__}{inspect.signature(f)} must take the record and one array per output: "
            f"{f.__qualname__}(value, {', '.join(outputs)}), and then, if it wants them, id, seed"
        )
    return asked


def _compile(own: Kernel) -> tuple[Any, Any]:
    from numba import types
    from numba.core.errors import NumbaError
    from numba.np.numpy_support import from_dtype

    from pario.kernels import users

    def array(ndim: int, dtype: np.dtype, mutable: bool = True) -> Any:
        return types.Array(from_dtype(dtype), ndim, "C", readonly=not mutable)

    rows = [array(max(len(shape), 1), dtype) for shape, dtype in own.outputs.values()]
    value = array(1, np.dtype(np.uint8), mutable=False)
    try:
        function = users.compiled(own.f, own.debug)
        function.compile((value, *rows, *(types.int64 for _ in own.asked)))
        returned = function.overloads[function.signatures[0]].signature.return_type
    except (NumbaError, NotImplementedError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise OptionError(
            f"Numba cannot compile {own.f.__qualname__}{inspect.signature(own.f)}: {' '.join(lines)[:600]}",
            hint="docs: numba.readthedocs.io, supported Python features. Function(f) takes what Numba does not.",
        ) from error
    if not users.is_code(returned):
        raise OptionError(
            f"{own.f.__qualname__} must return nothing, or a number that is 0 if the record is good, not {returned}"
        )
    return users.loop_around(function, "id" in own.asked, "seed" in own.asked), function
