"""No value makes a decoder take over 256 MiB beyond its batch, or 2 s, or raise; its neighbours stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import HOSTILE
from pace import Pace

pytestmark = pytest.mark.hostile

MOST_BYTES, MOST_SECONDS = 256 << 20, 2.0
#: Values that are right, however large or odd, for some versions of the libraries. All others are refused.
FINE = {
    "zstd/window_of_128_mib", "images/jpeg_parts", "images/jpeg_fill", "images/jpeg_few_scans", "images/png_frames",
    "images/png_16_bit", "images/png_pixels", "images/bmp_colors", "packed raw/zeros", "message/infinite",
}  # fmt: skip
#: One of each kind whose making and decoding takes milliseconds.
QUICK = (
    "gzip/short_members", "zstd/largest_size", "zstd/garbage_behind", "images/gif_35_bytes_65535", "images/tiff_65535",
    "images/jp2_65535", "images/webp_canvas_65535", "images/pnm_comment", "images/avif", "pickle/one_hash",
    "pickle/two", "trusted pickle/two_of_an_old_protocol", "msgpack/two", "json/deep", "npy/two", "datum/gigabytes",
    "packed zstd/gigabytes", "reserved entry/deep", "reserved entry/records_infinite", "manifest/deep",
)  # fmt: skip


def run(names: list[str], seconds: float) -> list[dict]:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    done = subprocess.run(
        [sys.executable, here / "hostile.py", *names], capture_output=True, text=True, timeout=seconds, env=env
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{names[len(lines)]} ended the process: {done.stderr[-500:]}"
    return lines


def check(names: list[str], seconds: float) -> None:
    pace = Pace()
    lines = run(names, seconds)
    pace.sample()
    assert [line["case"] for line in lines] == names
    for line in lines:
        assert line["said"].startswith("refused") or (line["said"] == "decoded" and line["case"] in FINE), line
        assert line["peak"] <= MOST_BYTES, line
        assert line["seconds"] <= MOST_SECONDS * pace.slowness, (line, pace.slowness)


def test_some_of_each_kind() -> None:
    check(list(QUICK), 300)


@pytest.mark.full
@pytest.mark.parametrize("group", HOSTILE)
def test_all(group: str) -> None:
    check([f"{group}/{name}" for name in HOSTILE[group]], 600)


def test_there_are_200() -> None:
    assert sum(map(len, HOSTILE.values())) >= 200
