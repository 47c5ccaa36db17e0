"""Numbers and tables as text, for screen and log; numbers as bytes; JSON that anybody may have written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: What a look at JSON raises whose writer is not known: a number that is infinite, an object where a list should be.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError)


_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)(i?)B?(?:/s)?\s*")


def read_size(text: str) -> float | None:
    """ "150 MiB" -> 157286400.0; powers of 1000 without the i. None: it is no size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    return float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")


def varint(number: int) -> bytes:
    """A number in groups of seven bits, the low ones first, as LEB128 and protobuf have it; of 64 bits if negative."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_json(text: str | bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of JSON that anybody may have written. Raises ValueError.

    hook : what becomes of an object
    """
    try:
        return json.loads(text, object_hook=hook)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except MemoryError:
        raise ValueError(f"no memory for the {len(text):,} bytes of JSON") from None


def decimal_bytes(nbytes: float) -> str:
    """1234567 -> "1.23 MB"; powers of 1000, as storage is sold and measured."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(nbytes) < 999.5 or unit == "TB":
            return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def seconds(value: float) -> str:
    """0.00123 -> "1.2 ms"."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def counted(n: int, one: str, many: str | None = None) -> str:
    """ "1 record", "1,200 records"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def table(rows: Sequence[Sequence[str]], *, left: int = 1, words: bool = False) -> str:
    """Columns of text, the first `left` ones aligned to the left, the others to the right.

    words : the last column is text, aligned to the left, too
    """
    count = len(rows[0])
    widths = [max(len(row[k]) for row in rows) for k in range(count)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k < left or (words and k == count - 1) else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def metric(kind: str, name: str, what: str, values: Iterable[tuple[Mapping[str, str], float | None]]) -> list[str]:
    """The lines of one metric, as Prometheus reads them.

    kind : "gauge" or "counter"; what : a sentence about it; values : labels, and the value with these; None: no limit
    """
    lines = [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
    for labels, value in values:
        words = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
        said = f"{{{words}}}" if words else ""
        lines.append(f"{name}{said} {'+Inf' if value is None else f'{value:.15g}'}")
    return lines


_ESCAPES = str.maketrans({"\\": r"\\", '"': r'\"', "\n": r"\n"})
