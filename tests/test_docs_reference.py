"""The API reference: every public name has an entry, in the sources and in the site that Sphinx builds of them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from required import skip_or_fail

import pario
import pario.decode
import pario.lmdb
from pario.codec.registry import CODECS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ADAPTERS = ("jax", "lightning", "tensorflow", "torch")
_DIRECTIVE = re.compile(r"(?m)^\.\. (?:auto)?(?:class|exception|function|module|data):: ([\w.]+)")


def exported(file: Path) -> list[str]:
    """`__all__` of a module that cannot be imported here."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError(f"{file} has no __all__")


def public() -> list[str]:
    """Every public name of pario, with its module."""
    names = [f"pario.{name}" for name in pario.__all__]
    names += [f"pario.decode.{name}" for name in pario.decode.__all__]
    names += [f"pario.lmdb.{name}" for name in pario.lmdb.__all__ if not name.startswith("__")]
    for adapter in ADAPTERS:
        file = ROOT / "pario" / "adapters" / f"{adapter}.py"
        names += [f"pario.adapters.{adapter}.{name}" for name in exported(file)]
    names += [f"{module}.{name.capitalize()}" for name, module in CODECS.items()]
    return names


def importable() -> list[str]:
    return [name for name in public() if not name.startswith("pario.adapters.") and name != "pario.__version__"]


def named(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_every_public_name_is_in_the_reference() -> None:
    entries = {name for page in (DOCS / "reference").glob("*.rst") for name in _DIRECTIVE.findall(page.read_text())}
    assert sorted(set(public()) - entries) == []


@pytest.mark.parametrize("name", importable())
def test_every_public_name_has_a_docstring(name: str) -> None:
    what = named(name)
    assert inspect.getdoc(what)
    if inspect.isclass(what) and what.__module__.startswith("pario"):
        for member, value in vars(what).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(what, member)), f"{name}.{member}"


def test_drawings_are_those_of_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name, make in draw.DRAWINGS.items():
        assert make().svg() == (DOCS / "figures" / f"{name}.svg").read_text(), "python docs/draw.py"


def test_the_gallery_draws_what_a_trace_and_a_prometheus_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    thread = {"pid": 0, "tid": 3, "ph": "M", "name": "thread_name", "args": {"name": "training loop"}}
    span = {"pid": 0, "tid": 3, "ph": "X", "name": "your code", "ts": 5e6, "dur": 1e5}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [thread, span]}))
    drawn = gallery.step(str(tmp_path / "trace.json"), 0.4)
    assert ">training loop<" in drawn
    assert drawn.count(f'fill="{gallery.SPANS["your code"]}"') == 2  # the span, and what its colour means
    series = {"metric": {"user": "anna", "name": "train", "job_id": "7"}, "values": [[0, "1e6"], [1, "2e6"]]}
    monkeypatch.setattr(gallery, "ask", lambda *_: [series])
    shown = gallery.jobs("http://nowhere", 60.0)
    assert shown.count("<polyline") == 4
    assert "anna train 7" in shown


def test_external_links_have_the_right_form() -> None:
    """Whether they lead somewhere is not asked: tests reach no network."""
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for target in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+://[^>]*)>", page.read_text()):
            link = target[0] or target[1]
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./~#%?=&+@:,-]*)?", link), f"{page.name}: {link}"


def sphinx(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The command of docs/conf.py."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(source), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT)


def require_sphinx() -> None:
    for name in ("furo", "myst_parser", "sphinx", "sphinx_click"):
        if importlib.util.find_spec(name) is None:
            skip_or_fail(f'{name} is missing: pip install ".[docs]"')


def faults(html: str) -> list[str]:
    """What keeps a page from those who search, who listen, or who read on a phone."""
    found = [] if re.search(r"<title>[^<]+</title>", html) else ["no title"]
    found += [] if len(re.findall(r"<h1[ >]", html)) <= 1 else ["two headings of the first rank"]
    found += [] if re.search(r'<html [^>]*lang="en"', html) else ["no language"]
    found += [] if re.search(r'<meta name="viewport" content="width=device-width', html) else ["not for phones"]
    found += [image for image in re.findall(r"<img [^>]*>", html) if not re.search(r'alt="[^"]+"', image)]
    wide = html.count('<table class="docutils') - html.count('<div class="table-wrapper')
    return found + ([f"{wide} tables that do not scroll"] if wide > 0 else [])


def luminance(color: str) -> float:
    """0 to 1, of "#rgb" or "#rrggbb", as WCAG 2 defines it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrasts(site: Path) -> dict[str, float]:
    """Colours of code on its background with less than WCAG's 4.5 to 1, in light and dark."""
    style = (site / "_static" / "pygments.css").read_text()
    found = {}
    back = "#ffffff"
    for rule, body in re.findall(r"(?m)^(.*?\.highlight[^{]*)\{([^}]*)\}", style):
        if given := re.search(r"background: (#\w{6}|#\w{3})\b", body):
            back = given[1] if rule.rstrip().endswith(".highlight") else back
        color = re.search(r"(?<![-\w])color: (#\w{6}|#\w{3})\b", body)
        if color and "lineno" not in rule:
            low, high = sorted((luminance(color[1]), luminance(back)))
            if (high + 0.05) / (low + 0.05) < 4.5:
                found[f"{rule.strip()} {color[1]} on {back}"] = (high + 0.05) / (low + 0.05)
    return found


def test_what_is_a_fault_of_a_page() -> None:
    whole = '<html lang="en"><meta name="viewport" content="width=device-width, initial-scale=1"><title>a</title>'
    assert faults(whole + '<h1>a</h1><img src="a.svg" alt="a plot">') == []
    assert len(faults('<h1>a</h1><h1>b</h1><img src="a.svg"><table class="docutils">')) == 6
    assert luminance("#fff") == 1
    assert luminance("#000000") == 0


@pytest.mark.site
def test_the_site_is_built_and_has_every_public_name(tmp_path: Path) -> None:
    require_sphinx()
    from sphinx.util.inventory import InventoryFile

    built = sphinx(DOCS, tmp_path / "site")
    assert built.returncode == 0, built.stderr[-5000:]
    with (tmp_path / "site" / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, name: name)
    entries = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    assert sorted(set(public()) - entries) == []
    html = (tmp_path / "site" / "reference" / "loader.html").read_text()
    assert "records per rank and step" in html  # parameters come from the docstrings
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {str(page): found for page in pages if (found := faults(page.read_text()))} == {}
    assert contrasts(tmp_path / "site") == {}
    # Links out of the built pages, to files and to headings.
    for page in (tmp_path / "site").rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"]*)"', page.read_text()):
            if re.match(r"https?:|mailto:|#$", link) or not link:
                continue
            file, _, anchor = link.partition("#")
            other = (page.parent / file).resolve() if file else page
            assert other.exists(), f"{page.name} links to {link}"
            if anchor and other.suffix == ".html":
                assert f'id="{anchor}"' in other.read_text(), f"{page.name} links to {link}"


@pytest.mark.site
@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("order.md", "[gone](gone.md)"),
        ("order.md", "[gone](limits.md#gone)"),
        ("order.md", "[gone](../examples/gone.py)"),
        ("order.md", "![gone](figures/gone.svg)"),
        ("reference/loader.rst", ".. autoclass:: pario.Gone"),
        ("reference/loader.rst", ":py:class:`pario.Gone`"),
    ],
)
def test_a_broken_link_breaks_the_build(tmp_path: Path, page: str, text: str) -> None:
    require_sphinx()
    few = tmp_path / "docs"
    few.mkdir()
    for name in ("conf.py", "docstrings.py", "order.md", "limits.md", "reference/loader.rst"):
        (few / name).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / name, few / name)
    pages = ("order.md", "limits.md", "reference/loader.rst")
    (few / "index.md").write_text("# All\n\n**Few**\n\n" + "".join(f"* [{name}]({name}): one\n" for name in pages))
    with (few / page).open("a") as file:
        file.write(f"\n{text}\n")
    built = sphinx(few, tmp_path / "site")
    assert built.returncode != 0
    assert re.search(r"gone", built.stderr, re.IGNORECASE), built.stderr[-3000:]
