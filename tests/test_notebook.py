"""`_repr_html_` of loaders, batches, reports, checkpointers: well formed, escaped, small; OpenCV reads the pictures."""

from __future__ import annotations

import ast
import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.notebook import html, pictures


class Reader(HTMLParser):
    """The text of each table's cell; fails if a tag stays open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.sources: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, page

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "img":
            self.sources.append(dict(attrs)["src"])
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "a<b>&c"
    with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(12):
            txn.put(b"%03d" % i, np.full((200, 300, 3), i, np.uint8).tobytes())
    return folder


def decode(value: bytes) -> dict[str, Any]:
    row = np.frombuffer(value, np.uint8).reshape(200, 300, 3)
    return {"image": row, "label": np.int64(row[0, 0, 0]), "word": "<b>"}


def test_a_batch_shows_its_pictures(path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    with pario.Loader(path, 10, decode, comm="self", shuffle=False) as loader:
        page = loader.peek()._repr_html_()
        rebuilt = pario.Batch({"label": np.arange(3)})._repr_html_()
    seen = Reader(page)
    text = " ".join(seen.text)
    assert "epoch=0, step=0, records=10" in text
    assert "uint8[10, 200, 300, 3]" in text
    assert "int64[10]: [0 1 2 3]" in text
    assert len(page) < 200_000
    assert 1 < len(seen.sources) <= 10
    for i, source in enumerate(seen.sources):
        raw = base64.b64decode(source.removeprefix("data:image/png;base64,"))
        shown = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_UNCHANGED)
        assert max(shown.shape) <= 128
        assert (shown == i).all()
    assert Reader(rebuilt).text == ["Batch(label: int64[3])", "label", "int64[3]: [0 1 2]"]


@pytest.mark.parametrize(
    ("array", "count"),
    [
        (np.zeros((3, 1, 28, 28), np.float32), 3),
        (np.full((2, 3, 20, 30), np.nan, np.float64), 2),
        (np.zeros((2, 20, 30, 1), np.uint8), 2),
        (np.zeros((0, 20, 30, 3), np.uint8), 0),
        (np.zeros((2, 5, 30, 30), np.uint8), 0),
        (np.zeros((2, 20, 30, 3), np.int64), 0),
        (np.zeros((4, 4)), 0),
        (np.array(["a"]), 0),
        ([1, 2], 0),
    ],
)
def test_what_is_a_picture(array: Any, count: int) -> None:
    assert len(Reader(pictures(array)).sources) == count


def test_gray_and_channels_first_are_the_right_way_round() -> None:
    cv2 = pytest.importorskip("cv2")
    rows = np.random.default_rng(0).integers(0, 255, (1, 3, 20, 30), dtype=np.uint8)
    (source,) = Reader(pictures(rows)).sources
    raw = np.frombuffer(base64.b64decode(source.partition(",")[2]), np.uint8)
    assert (cv2.imdecode(raw, cv2.IMREAD_UNCHANGED)[..., ::-1] == rows[0].transpose(1, 2, 0)).all()


def test_the_others_are_escaped_tables(path: Path, tmp_path: Path) -> None:
    with pario.Loader(path, 5, decode, comm="self", shuffle="global", seed=3) as loader:
        list(loader)
        page = loader._repr_html_()
        report = loader.report()._repr_html_()
    text = " ".join(Reader(page).text)
    assert "a<b>&c" in text
    assert "'global'" in text
    assert "in epoch 1" in text
    assert "3 batches" in text
    assert "<b>" not in page
    said = "".join(Reader(report).text)
    assert re.search(r"rank +node +records", said)
    with pario.Checkpointer(comm="self", slow=str(tmp_path / "run")) as checkpoints:
        checkpoints.save(7, {"w": np.ones(3)}).wait()
        assert "newest step 7" in " ".join(Reader(checkpoints._repr_html_()).text)
    assert Reader(html("<x>", [("<i>", "a & b", "<br>".replace("<br>", ""))])).text == ["<x>", "<i>", "a & b"]


def test_the_notebook_in_examples_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, without Jupyter: what the last expression of a cell shows is a table."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads((Path(__file__).parents[1] / "examples" / "start.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "start.ipynb", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "start.ipynb", "eval"), names) if last else None
            shown += [Reader(value._repr_html_())] if value is not None else []
    assert [bool(page.sources) for page in shown] == [False, True, False]
