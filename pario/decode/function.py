"""A plain Python function as decoder, and the rule that turns the user's argument into a decoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Draw, read_only
from pario.decode.rows import RowDecoder, RowOptions
from pario.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: What a function may ask for, by the names of its parameters.
ASKED = ("value", "key", "id", "rng")


class Function(RowDecoder):
    """Calls a Python function for every record.

    The function's parameters are the record's bytes, and by name any of:

        value   the bytes; so is the first parameter of any other name
        key     the record's key: bytes
        id      the record's id: int
        rng     a numpy Generator; its numbers depend on the seed, the epoch and the record's id alone

    An array or a number becomes {"data": ...}, a pair {"data": ..., "label": ...}; a dict or named tuple keeps its own
    names, and a dict in a dict becomes "outer.inner". Names, shapes and dtypes come from record 0, and every other
    record must return the same ones, unless `ragged` says otherwise. A value whose dtype does not convert safely (a
    float where record 0 had an integer) is a failure. Strings and other objects become arrays of objects [b].

    Parameters
    ----------
    f : callable
        Called by several threads at once. If it raises, the record is a failure. The decoder can be pickled if f can.
    view : bool
        Pass a read-only u8 array over the reader's memory instead of bytes. This saves a copy; the array is valid only
        during the call.
    rng : bool
        Pass the generator as second argument to a function without a parameter called rng.
    parallel : bool
        False for functions that never release the GIL (a few microseconds of pure Python): one thread is then faster.
    ragged : None, "flat", "pad", "list" or "object", or a dict of names with these
        How arrays whose sizes differ become one: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        view: bool = False,
        rng: bool = False,
        parallel: bool = True,
        **rows: Unpack[RowOptions],
    ) -> None:
        if not callable(f):
            raise OptionError(f"a decoder function must be callable, got {f!r}")
        super().__init__(**rows)
        self.f, self.view, self.rng, self.parallel = f, bool(view), bool(rng), bool(parallel)
        self.asked, unknown = _asked(f)
        if len(unknown) > (self.rng and not (self.asked and "rng" in self.asked)):
            raise OptionError(
                f"{self!r} needs {', '.join(unknown)}: pario passes a record's bytes, and by name value, key, id, rng",
                hint="functools.partial(f, name=value) gives a function its other arguments.",
            )
        self.wants_key = self.asked is not None and "key" in self.asked

    def __repr__(self) -> str:
        name = getattr(self.f, "__qualname__", None) or repr(self.f)
        said = super().__repr__().removeprefix(f"{type(self).__name__}(")
        return f"{type(self).__name__}({name}{'' if said == ')' else ', '}{said}"

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        # Without the function, whose own repr may be long, or have this one in it, as that of a method has.
        return {name: each for name, each in super().arguments().items() if name != "f"}

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        if self.view:
            given: Any = read_only(record)
        else:
            given = record.tobytes()
        if self.asked is None:
            return self.f(given, draw.rng(number)) if self.rng else self.f(given)
        names: dict[str, Any] = {}
        if "key" in self.asked:
            names["key"] = key
        if "id" in self.asked:
            names["id"] = number
        if "rng" in self.asked:
            names["rng"] = draw.rng(number)
        if "value" in self.asked:
            return self.f(value=given, **names)
        if self.rng and "rng" not in self.asked:
            return self.f(given, draw.rng(number), **names)
        return self.f(given, **names) if "" in self.asked else self.f(**names)


def _asked(f: Callable[..., Any]) -> tuple[frozenset[str] | None, list[str]]:
    """What a function asks for, and the names of the parameters that nobody can give it.

    The first: names of ASKED, and "" if its first parameter has another name: it gets the record's bytes. None if the
    function asks for nothing by name, as functions of one parameter do: it is called with the bytes.
    """
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return None, []
    single = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    asked = {p.name for p in single if p.name in ASKED and p.kind != p.POSITIONAL_ONLY}
    positional = bool(parameters) and parameters[0].kind != parameters[0].KEYWORD_ONLY
    if positional and parameters[0].name not in asked:
        asked.add("")
    given = {*asked, parameters[0].name} if positional else asked
    unknown = [p.name for p in single if p.default is p.empty and p.name not in given]
    alone = len(parameters) == 1 and positional
    return (None if alone or asked <= {""} else frozenset(asked)), unknown
