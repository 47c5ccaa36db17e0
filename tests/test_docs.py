"""The README and the pages: length, links, code that compiles, places that tables fill, words that are gone."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import startup, tables
from benchmarks.publish import PARTS, commands

ROOT = Path(__file__).resolve().parent.parent
HEADS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "packaging/README.md")
PAGES = sorted([*(ROOT / name for name in HEADS), *(ROOT / "docs").glob("*.md"), *(ROOT / "measurements").glob("*.md")])
#: what fills the places between markers: prefix -> script; a page may name no other
FILLED_BY = {
    "peers": "benchmarks/peers/report.py",
    "codecs": "benchmarks/codecs.py",
    "study": "benchmarks/study/page.py",
    "bars": "benchmarks/tables.py",
    "model": "benchmarks/model/__main__.py",
    "model-tiers": "benchmarks/model/__main__.py",
    "failures": "benchmarks/failures.py",
    "startup": "benchmarks/startup.py",
    "mutants": "benchmarks/mutants.py",
    "dlio": "benchmarks/dlio/study.py",
    "beside": "benchmarks/checkpoint_beside.py",
}
#: Markers that `.ci/run` reads literally.
COMMANDS = ("demo", "tests")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Without code blocks and inline code, in which brackets are no links."""
    return re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name} links to {target}: there is no such file"
        if anchor:
            assert anchor in anchors(other), f"{page.name} links to {target}: {other.name} has no such heading"


def test_pages_that_the_code_names_exist() -> None:
    """In docstrings, help texts, hints of errors, comments."""
    for folder in ("benchmarks", "examples", "jobscripts", "packaging", "pario", "tests"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".json", ".py", ".slurm", ".txt") and file.name != "test_docs.py":
                for name, anchor in re.findall(r"\b((?:docs|measurements)/[\w-]+\.md)(?:#([\w-]+))?", file.read_text()):
                    assert (ROOT / name).exists(), f"{file}: there is no {name}"
                    assert not anchor or anchor in anchors(ROOT / name), f"{file}: {name} has no #{anchor}"


@each_page
def test_python_in_pages_compiles(page: Path) -> None:
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text()):
        ast.parse(block, str(page))


def test_scripts_in_pages_are_those_in_examples() -> None:
    """ "[examples/a.py](../examples/a.py):" and the whole file."""
    page = (ROOT / "docs" / "pytorch.md").read_text()
    found = re.findall(r"(?ms)^\[examples/(\w+\.py)\]\(\.\./examples/\1\):\n\n```python\n(.*?)^```$", page)
    assert len(found) == 5
    for name, block in found:
        assert block == (ROOT / "examples" / name).read_text(), f"docs/pytorch.md shows another examples/{name}"


@each_page
def test_places_for_tables_have_an_end_and_a_script(page: Path) -> None:
    found = re.findall(r"(?m)^<!-- ([\w-]+)(?:: ([\w.-]+))? -->$", page.read_text())
    heads = [name for name, _ in found if name not in COMMANDS]
    assert heads[1::2] == ["end"] * (len(heads) // 2), f"{page.name}: {heads}"
    for name in heads[::2]:
        assert name in FILLED_BY, f"{page.name}: nothing fills <!-- {name} -->"
        assert (ROOT / FILLED_BY[name]).exists()


def test_every_page_is_in_the_index_and_every_measurement_in_how_fast() -> None:
    index, fast = ((ROOT / "docs" / name).read_text() for name in ("index.md", "how-fast.md"))
    for page in PAGES:
        if page.parent == ROOT / "docs" and page.name != "index.md":
            lines = [line for line in index.splitlines() if f"]({page.name})" in line]
            assert len(lines) == 1, f"docs/index.md has {len(lines)} lines for {page.name}"
        if page.parent == ROOT / "measurements":
            link = rf"\]\(../measurements/{page.name}[#)]"
            assert re.search(link, fast), f"docs/how-fast.md does not link to {page.name}"


def test_what_to_expect_names_pages_and_tests_that_exist() -> None:
    rows = re.findall(r"(?m)^\| (\d+) \|(.*)\|$", (ROOT / "measurements" / "what-to-expect.md").read_text())
    assert [int(number) for number, _ in rows] == [*range(1, 14), *range(1, 11)]
    for number, row in rows:
        expected, said, page, shown = (cell.strip() for cell in row.split(" | "))
        assert expected, number
        assert said, number
        assert re.fullmatch(r"(\[[\w-]+\.md\]\([^)]+\)(, )?)+", page), page
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert len(tests) == shown.count("`") // 2 > 0, shown
        for file, name in tests:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, f"no {file}::{name}"


def test_commands_of_readme_are_single_lines() -> None:
    text = (ROOT / "README.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"(?m)^<!-- {name} -->\n```bash\n[^\n]+\n```$", text), name


def test_publish_fills_every_place_from_what_it_measures() -> None:
    """One command for all tables; each page that has places is named by the part whose prefix they have."""
    filled: dict[str, set[str]] = {}
    for part, (_, fill) in PARTS.items():
        pages = {word for word in fill if word.endswith(".md")} or {f"measurements/{part}.md"}
        prefix = {"dropin": "bars", "tiers": "bars"}.get(part, part)
        filled.setdefault(prefix, set()).update(pages)
    for page in PAGES:
        for name in re.findall(r"(?m)^<!-- ([\w-]+)(?:: [\w.-]+)? -->$", page.read_text()):
            if name not in (*COMMANDS, "end", "mutants"):  # these take an hour and are not about speed
                assert str(page.relative_to(ROOT)) in filled[name], f"{page.name}: nothing fills {name} there"
    for command in commands("/data", list(PARTS), measure=True):
        assert importlib.util.find_spec(command[2]), command


def test_startup_page_is_filled_from_a_run() -> None:
    side = {
        "seconds": {"median": 1.0, "min": 0.9, "max": 1.1},
        "launched": {"median": 2.0, "min": 1.9, "max": 2.1},
        "processor per rank": {"median": 0.3, "min": 0.3, "max": 0.3},
        "whole processor per rank": {"median": 0.4, "min": 0.4, "max": 0.4},
    }
    row = {"ranks": 2, "control": side, "pario": {**side, "import": 0.1, "Loader": 0.2, "batch": 0.01}}
    row |= {"no MPI": row["pario"], "no MPI ÷ MPI": {"median": 0.9, "min": 0.8, "max": 1.0}}
    facts = {"cpus": 2, "cpu": "", "date": "today", "commit": "0123456789abcdef"}
    page = startup.fill("a\n<!-- startup -->\nold\n<!-- end -->\nb", {"machine": facts, "rounds": 3, "table": [row]})
    assert "old" not in page
    assert "| 2 | 1.00 (0.90–1.10) | 1.00 (0.90–1.10) | 0.10 + 0.20 + 0.01 |" in page
    assert "| 2 | 2.00 (1.90–2.10) | 2.00 (1.90–2.10) | 0.90 (0.80–1.00) | 0.10 + 0.20 + 0.01 |" in page
    assert "commit 012345678;" in page


def test_tables_of_bars_and_dropin_stand_side_by_side(tmp_path: Path) -> None:
    row = {"case": "c", "figure": 1.0, "low": 1.0, "high": 1.0, "unit": "×", "bar": None, "sense": "", "met": None}
    facts = {
        "date": "d",
        "cpus": 2,
        "cpu": "",
        "memory_bytes": 1 << 30,
        "kernel": "6",
        "python": "3",
        "fio": "",
        "versions": {},
    }
    for name in ("bars", "dropin"):
        section = {
            "name": name,
            "title": name,
            "state": "warm",
            "rows": [{**row, "ours": "", "theirs": ""}],
            "notes": [],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": facts, "rounds": 5, "sections": [section]}))
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- bars: {name} -->\n<!-- end -->\n" for name in ("bars", "dropin", "machine")))
    files = [str(tmp_path / f"{name}.json") for name in ("bars", "dropin", "missing")]
    assert tables.main([*files, "--into", str(page)]) == 0
    assert page.read_text().count("| c | 1.000 × |") == 2
    assert "Measured d on 2 cores" in page.read_text()
