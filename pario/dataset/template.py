"""Templates of keys: "image-%09d", "{:05d}.jpg", "structure:{}". A number or a text makes a key, and is found in it.

    %d  %09d  {:d}  {:09d}    a number, with this many digits at least
    %s  {}                    any text
"""

from __future__ import annotations

import re

from pario.errors import OptionError

#: %% {{ }} are characters, the others hold the number or the text.
_PARTS = re.compile(rb"%%|\{\{|\}\}|%(?P<c>[^%]*?[a-zA-Z])|\{(?P<f>[^{}]*)\}")
#: Without the zero, Python pads with blanks.
_NUMBER_C = re.compile(rb"(?:0(\d+))?[di]")
_NUMBER_F = re.compile(rb"\w*:(?:0(\d+))?d?")
_MOST = (1 << 63) - 1


class Template:
    """Raises OptionError unless there is exactly one number or text in it.

    prefix, suffix : what every key begins with, and ends with
    digits : the least number of digits; None: any text
    """

    def __init__(self, given: str | bytes) -> None:
        self.given = given
        text = given.encode() if isinstance(given, str) else bytes(given)
        literal, at, holes = [b""], 0, list[int | None]()
        for part in _PARTS.finditer(text):
            literal[-1] += text[at : part.start()]
            at = part.end()
            if part["c"] is None and part["f"] is None:
                literal[-1] += part[0][:1]
            else:
                holes.append(_digits(part, given))
                literal.append(b"")
        literal[-1] += text[at:]
        if len(holes) != 1:
            raise OptionError(
                f"the template {given!r} has {len(holes)} numbers, and needs one",
                hint='As "image-%09d", "image-{:09d}" or, for any text, "image-{}". What is the same in all keys, as a '
                'resolution, is written out: "256-{:05d}".',
            )
        self.digits = holes[0]
        self.prefix, self.suffix = literal
        if self.digits is None and not (self.prefix or self.suffix):
            raise OptionError(f"the template {given!r} fits every key", hint="%d takes the keys that are numbers.")

    def __repr__(self) -> str:
        return repr(self.given)

    def parse(self, key: bytes) -> int | bytes | None:
        """The number or text of which this key is made; None for another key."""
        if not key.startswith(self.prefix) or not key.endswith(self.suffix):
            return None
        inside = key[len(self.prefix) : len(key) - len(self.suffix)]
        if len(key) < len(self.prefix) + len(self.suffix) or not inside:
            return None
        if self.digits is None:
            return inside
        if not inside.isdigit() or len(inside) < self.digits:
            return None
        if inside[0] == 48 and len(inside) > max(1, self.digits):  # zeros only as far as the template puts them
            return None
        number = int(inside) if len(inside) < 20 else _MOST + 1
        return number if number <= _MOST else None

    def make(self, name: int | bytes) -> bytes:
        """The key of this number or text."""
        inside = name if isinstance(name, bytes) else str(name).encode()
        return self.prefix + inside.rjust(self.digits or 0, b"0") + self.suffix


def _digits(part: re.Match[bytes], given: str | bytes) -> int | None:
    inside = part["f"] if part["c"] is None else part["c"]
    if inside in (b"s", b""):
        return None
    number = (_NUMBER_F if part["c"] is None else _NUMBER_C).fullmatch(inside)
    if number is None or int(number[1] or 0) > 18:
        raise OptionError(
            f"the template {given!r} has {part[0].decode(errors='backslashreplace')!r}",
            hint="A template holds %d, %09d, {:d} or {:09d} for a number, or %s or {} for any text; %% and {{ stand "
            "for % and {.",
        )
    return int(number[1] or 0)
