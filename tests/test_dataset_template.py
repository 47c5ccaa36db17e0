"""Templates of keys. The oracle is Python's own formatting."""

from __future__ import annotations

import pytest

from pario.dataset.template import Template
from pario.errors import OptionError

NUMBERS = [0, 1, 9, 10, 99, 100, 12_345, 10**9, (1 << 63) - 1]


@pytest.mark.parametrize(
    "text",
    ["%d", "image-%09d", "%05d.img", "50%%-%03d", "}%d}", "{:d}", "{:09d}-x", "{0:05d}", "{i:03}", "{{{:d}}}", "a%i"],
)
@pytest.mark.parametrize("kind", [str, bytes])
def test_numbers(text: str, kind: type) -> None:
    template = Template(text if kind is str else text.encode())
    for number in NUMBERS:
        key = (text % number if "%" in text else text.format(number, i=number)).encode()
        assert template.make(number) == key
        assert template.parse(key) == number
        for other in (key + b"1x", b"x" + key, key[:-1] + b"\n", key.replace(b"1", b"+1", 1) if b"1" in key else b""):
            found = template.parse(other)
            assert found is None or template.make(found) == other


@pytest.mark.parametrize("key", [b"a-007", b"a-", b"a-7x", b"a--7", b"a- 7", "a-٣".encode(), b"a-" + b"9" * 30])
def test_other_keys(key: bytes) -> None:
    assert Template("a-%d").parse(key) is None


def test_overlapping_ends() -> None:
    assert Template("aa{}aa").parse(b"aaa") is None
    assert Template("aa{}aa").parse(b"aaaaa") == b"a"


@pytest.mark.parametrize("text", ["image-%s", "image-{}"])
def test_texts(text: str) -> None:
    template = Template(text)
    assert template.digits is None
    assert template.parse(b"image-000/\xff") == b"000/\xff"
    assert template.make(b"000/\xff") == b"image-000/\xff"
    assert template.parse(b"image-") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image", "has 0 numbers"),
        ("{}-{:05d}", "has 2 numbers"),
        ("%d-%d", "has 2 numbers"),
        ("{}", "fits every key"),
        ("%9d", "has '%9d'"),
        ("%x", "has '%x'"),
        ("{:x}", "has '{:x}'"),
        ("%099d", "has '%099d'"),
    ],
)
def test_what_is_no_template(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Template(text)
