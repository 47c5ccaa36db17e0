"""What a record seems to be, and which decoder to try: a guess from its bytes, which executes nothing."""

from __future__ import annotations

import json
import pickletools
import re
import zlib

import numpy as np

from pario.commands.screen import printable
from pario.decode.base import describe
from pario.decode.registry import find
from pario.decode.tensor_protos import outline
from pario.decode.unpickle import PLAIN

__all__ = ["guess", "kind_of", "suggest"]

#: Decompressed bytes that the guess at a compressed record looks at.
_INSIDE = 64 << 10


def kind_of(what: str) -> str:
    """The kind of a record, of what `guess` says about it: "a pickle" of "a pickle, protocol 4 of ..."."""
    kind = re.split(r"[,:]", what)[0]
    return "bytes of no known kind" if kind.startswith("bytes ") else re.sub(r" +\(.*", "", kind)


def guess(value: bytes, nbytes: int) -> str:
    """A guess at the format of these bytes, in a few words. Executes nothing: it never loads a pickle.

    value : the first bytes of the record; nbytes : its length
    """
    if not value:
        return "empty"
    whole = len(value) == nbytes
    if whole and value[0] >> 3 <= 7 and (datum := _datum(value)):
        return datum
    if whole and value[0] == 0x0A and (tensors := outline(value)):
        return f"Caffe2 TensorProtos: {', '.join(tensors)}"
    said = describe(np.frombuffer(value, np.uint8))[0]
    if value[:1] == b"\x80" and len(value) > 1 and 2 <= value[1] <= 5:
        names = list(dict.fromkeys(_pickled(value)))
        return f"a pickle, protocol {value[1]}{' of ' if names else ''}{', '.join(names[:3])}"
    if "perhaps JSON" in said and whole:
        try:
            json.loads(value)
            return f"JSON: {printable(value)}"
        except ValueError:
            pass
    if ", " in said:
        kind = said.split(", ", 1)[1]
        inside = _inside(value)
        return f"{kind} of {guess(inside, len(inside))}" if inside else kind
    try:
        text = value.decode()
        if all(c.isprintable() or c in "\t\r\n" for c in text):
            return f"text: {printable(text.replace(chr(10), ' ').encode())}"
    except UnicodeDecodeError:
        pass
    return f"bytes {value[:8].hex(' ')}{' ...' if nbytes > 8 else ''}"


def suggest(value: bytes, nbytes: int) -> str:
    """The decoder to try, as one writes it: "pario.decode.Json()"; "" if nothing suggests one.

    value : the first bytes of the record; nbytes : its length
    """
    said = guess(value, nbytes)
    for begin, name in (("Caffe Datum", "datum"), ("Caffe2 TensorProtos", "tensor_protos"), ("text:", "text")):
        if said.startswith(begin):
            return f"pario.decode.{find(name).cls}()"
    if said.startswith("a pickle"):
        plain = set(_pickled(value)) <= PLAIN
        return f"pario.decode.Pickle({'allow=[]' if plain else 'allow_pickle=True'})"
    if said.startswith(("zlib", "gzip")):
        inside = _inside(value)
        inner = suggest(inside, len(inside)) if inside else ""
        return f"pario.decode.{find(said[:4]).cls}({inner})"
    _, advice = describe(np.frombuffer(value[:16], np.uint8))
    call = advice.removeprefix("use ")
    return call if call.endswith("()") and call.startswith("pario.decode.") else ""


def _inside(value: bytes) -> bytes:
    """The beginning of what a zlib or gzip record holds; b"" for anything else."""
    window = zlib.MAX_WBITS | 16 if value[:2] == b"\x1f\x8b" else zlib.MAX_WBITS if value[:1] == b"\x78" else 0
    if not window:
        return b""
    try:
        return zlib.decompressobj(window).decompress(value, _INSIDE)
    except zlib.error:
        return b""


def _datum(value: bytes) -> str:
    """A description of a Caffe Datum, "" for anything else. In Python: compiling a kernel for five records is too
    slow."""
    numbers = {1: 0, 2: 0, 3: 0, 5: 0, 7: 0}
    data, floats, at = b"", 0, 0
    try:
        while at < len(value):
            tag, at = _varint(value, at)
            field, kind = tag >> 3, tag & 7
            if kind == 0 and field in numbers:
                numbers[field], at = _varint(value, at)
            elif kind == 2 and field in (4, 6):
                nbytes, at = _varint(value, at)
                if at + nbytes > len(value):
                    return ""
                data, floats = (value[at : at + nbytes], floats) if field == 4 else (data, floats + nbytes // 4)
                at += nbytes
            elif kind == 5 and field == 6:
                floats, at = floats + 1, at + 4
            else:
                return ""
    except IndexError:
        return ""
    channels, height, width, label = (numbers[k] for k in (1, 2, 3, 5))
    if numbers[7]:
        inner = describe(np.frombuffer(data, np.uint8))[0].split(", ")[-1]
        return f"Caffe Datum with {inner}, label {label}"
    count = channels * height * width
    if not count or count not in (len(data), floats):
        return ""
    what = "u8 pixels" if len(data) == count else "floats"
    return f"Caffe Datum, {channels} x {height} x {width} {what}, label {label}"


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """(number, offset of its end). Raises IndexError if the bytes end too early."""
    number = shift = 0
    while shift < 70:
        byte = value[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
    raise IndexError


def _pickled(value: bytes) -> list[str]:
    """Names of the classes and functions that a pickle would call, read from its opcodes."""
    names: list[str] = []
    strings: list[str] = []
    memo: dict[int, str | None] = {}
    last: str | None = None  # the string that the opcode before has pushed
    try:
        for op, argument, _ in pickletools.genops(value):
            pushed: str | None = None
            if op.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
            elif op.name == "STACK_GLOBAL" and len(strings) >= 2:
                names.append(".".join(strings[-2:]))
            elif op.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if argument is None else int(argument)] = pushed = last
            elif op.name in ("GET", "BINGET", "LONG_BINGET"):
                pushed = memo.get(int(argument or 0))
                strings += [] if pushed is None else [pushed]
            elif isinstance(argument, str):
                strings.append(argument)
                pushed = argument
            last = pushed
    except Exception:
        pass  # a truncated or broken pickle: show what was found so far
    return names
