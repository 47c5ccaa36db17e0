"""Names from keys: one name per component, one component per name, and names that file systems take."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.files.names import EXTENSIONS, LONGEST_EXTENSION, Part, digest_of, extension_of, is_plain, name_of, part_of

MARKS = ["", "%", "%db"]

parts = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=120).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.sampled_from([b"%", b"%4", b"1", b".", b"~", b"db", b"\0", b"a" * 60, b"\xc3\xa9" * 40])).map(b"".join),
).map(lambda part: part.replace(b"/", b"|")[:511])


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (b"000123.png", "000123.png"),
        ("grüße 1".encode(), "grüße 1"),
        (b"", "%"),
        (b".", "%2E"),
        (b"..", "%2E%2E"),
        (b"...", "..."),
        (b".hidden", ".hidden"),
        (b"50%", "50%25"),
        (b"a%2Fb", "a%252Fb"),
        (b"\0\0\0\x07", "%00%00%00%07"),
        (b"tab\there", "tab%09here"),
        (b"\xffA\x80", "%FFA%80"),
        ("\x9b1m".encode(), "%C2%9B1m"),
        (b"\xed\xa0\x80", "%ED%A0%80"),  # a surrogate is not UTF-8
        (b"\x7f", "%7F"),
        (b"x" * 255, "x" * 255),
        (b"x" * 256, "x" * 221 + "%~" + hashlib.blake2b(b"x" * 256, digest_size=16).hexdigest()),
    ],
)
def test_the_stated_rules(part: bytes, name: str) -> None:
    assert name_of(part) == name
    said = part_of(name)
    assert said is not None
    assert part.startswith(said.start)
    assert said.digest == ("" if said.start == part else digest_of(part))


def test_marks_and_flat_names() -> None:
    assert [name_of(b"a", mark) for mark in MARKS] == ["a", "a%", "a%db"]
    assert name_of(b"", "%") == "%%"
    assert part_of("%%") == Part(b"", "", "%")
    assert name_of(b"a/b", flat=True) == "a%2Fb"
    assert part_of("a%2Fb", flat=True) == Part(b"a/b")
    assert part_of("a%2Fb") is None  # no component has a slash


@settings(deadline=None, max_examples=100)
@given(parts, st.sampled_from(MARKS), st.booleans(), st.sampled_from([255, 247]))
def test_names_lead_back(part: bytes, mark: str, flat: bool, longest: int) -> None:
    name = name_of(part, mark, flat=flat, longest=longest)
    assert 0 < len(name.encode()) <= longest
    assert not {name} & {".", ".."}
    assert not any(character < " " or "\x7f" <= character < "\xa0" or character == "/" for character in name)
    said = part_of(name, flat=flat, longest=longest)
    assert said is not None
    assert said.mark == mark
    if said.digest:
        assert said.digest == digest_of(part)
        assert part.startswith(said.start)
        assert len(name.encode()) > longest - 40  # as much as there is room for
    else:
        assert said.start == part


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(parts, st.sampled_from(MARKS)), unique=True))
def test_no_two_have_one_name(things: list[tuple[bytes, str]]) -> None:
    assert len({name_of(*thing) for thing in things}) == len(things)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=80) | st.lists(st.sampled_from(["%", "4", "1", "%41", "a", ".", "%~", "db"])).map("".join))
def test_no_component_has_two_names(name: str) -> None:
    said = part_of(name)
    if said is not None and not said.digest:
        assert name_of(said.start, said.mark) == name


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=300) | st.lists(parts, max_size=6).map(lambda p: b"/".join(p).decode("utf-8", "replace")))
def test_plain_paths_are_keys(path: str) -> None:
    if is_plain(path):
        assert "/".join(map(name_of, path.encode().split(b"/"))) == path


@pytest.mark.parametrize(
    ("head", "extension"),
    [
        (b"\xff\xd8\xff\xe0\0\x10JFIF", ".jpg"),
        (b"RIFF\x24\0\0\0WEBPVP8 ", ".webp"),
        (b"RIFF\x24\0\0\0WAVEfmt ", ".wav"),
        (b"\0\0\0\x20ftypisom", ".mp4"),
        (b"\0\0\0\x20ftypavif", ".avif"),
        (b"\x93NUMPY\x01\0", ".npy"),
        (b"plain text", ""),
        (b"", ""),
    ],
)
def test_extensions(head: bytes, extension: str) -> None:
    assert extension_of(head) == extension
    assert not extension or extension in EXTENSIONS
    assert all(one.count(".") == 1 and len(one) <= LONGEST_EXTENSION for one in EXTENSIONS)
