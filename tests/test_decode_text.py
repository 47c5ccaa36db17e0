"""Text and tokens."""

from __future__ import annotations

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Text
from pario.errors import DecodeError, OptionError


def run(decoder, values):
    records = made(values)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


def test_text() -> None:
    out, failures = run(Text(), ["Grüße".encode(), b""])
    assert (out["data"].tolist(), failures) == (["Grüße", ""], [])
    out, _ = run(Text("latin1"), [b"\xfc"])
    assert out["data"].tolist() == ["ü"]
    _, failures = run(Text(), [b"a", b"ab\xff"])
    assert failures == [(1, "no utf-8 text: byte 2 is 0xff")]
    with pytest.raises(DecodeError, match=r"no utf-8 text: byte 0 is 0xff.*a JPEG. Use pario.decode.Image\(\)"):
        Text().learn(np.frombuffer(b"\xff\xd8\xff\xe0", np.uint8))


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "f8"])
def test_tokens(dtype) -> None:
    rows = [np.arange(k).astype(dtype) for k in (0, 5, 2)]
    out, failures = run(Text(dtype=dtype), [row.tobytes() for row in rows])
    assert failures == []
    assert out["data"].dtype == np.dtype(dtype).newbyteorder("=")
    assert out["data"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert out["offsets"].tolist() == [0, 0, 5, 7]
    out, _ = run(Text(dtype=dtype, ragged="pad", pad_value=9), [row.tobytes() for row in rows])
    assert out["data"].tolist() == [[9] * 5, [0, 1, 2, 3, 4], [0, 1, 9, 9, 9]]
    assert out["lengths"].tolist() == [0, 5, 2]


def test_half_a_token() -> None:
    _, failures = run(Text(dtype="u4"), [b"abcd", b"abc"])
    assert failures == [(1, "3 bytes are no whole number of uint32")]


def test_options() -> None:
    for wrong in ({"dtype": "object"}, {"dtype": "no such"}, {"encoding": "no such"}):
        with pytest.raises(OptionError):
            Text(**wrong)
    assert repr(Text(dtype="u2")) == "Text(dtype='uint16')"
    assert repr(Text("latin1")) == "Text(encoding='latin1')"
    assert repr(Text(dtype="u2", ragged="pad")) == "Text(dtype='uint16', ragged='pad')"
