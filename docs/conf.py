"""The site: python -m sphinx -W --keep-going docs build/site   (pip install ".[docs]")

The pages are Markdown that a forge shows as it is; docs/index.md says which there are and in which order, how-fast.md
has the measurements. The API reference comes from the docstrings, the command line's from click.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402

from pario import __version__  # noqa: E402

project = "pario"
author = "The pario authors"
release = __version__
html_logo = "figures/logo.svg"
html_title = f"pario {__version__}"
html_theme = "furo"
pygments_dark_style = "a11y-high-contrast-dark"
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_click",
]
exclude_patterns = ["figures", "measurements/figures"]

# Anchors as a forge makes them, down to the deepest heading.
myst_heading_anchors = 6
# Quotes and dashes as they are written.
smartquotes = False

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
#: `Loader` is two classes: without its framework an adapter's annotation stays a word.
suppress_warnings = ["ref.python"]
#: The adapters are described on machines without their frameworks.
autodoc_mock_imports = ["torch", "jax", "tensorflow", "lightning"]
#: References into pario must lead somewhere. Other projects' types are words: no network is asked for their pages.
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(?!pario\.).*"), ("py:class", r"pario\.(?:\w+\.)+\w+")]


def sections(index: str) -> list[tuple[str, list[str]]]:
    """The parts of docs/index.md, "**Title**" and a list of links, as (title, pages)."""
    parts = re.split(r"(?m)^\*\*(.+)\*\*$", index)
    return [
        (title, re.findall(r"(?m)^\* \[[^\]]+\]\(([^)#]+)\)", text))
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def read_page(app: Any, page: str, source: list[str]) -> None:
    """The README belongs to the forge: links to it lead to the index, whose lists become the contents. Links to and
    from measurements/ mean the folder beside docs/; here it lies in docs/."""
    source[0] = source[0].replace("](../README.md)", "](../index.md)" if "/" in page else "](index.md)")
    if page.startswith("measurements/"):
        source[0] = re.sub(r"\]\(\.\./(?!docs/|index\.md)", "](../../", source[0]).replace("](../docs/", "](../")
    source[0] = source[0].replace("](../measurements/", "](measurements/")
    if page == "how-fast":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nmeasurements/*\n```\n"
    if page == "index":
        for title, pages in sections(source[0]):
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def bring_measurements(app: Any, config: Any) -> None:
    """Sphinx takes pages from below docs/ only: a copy that git ignores."""
    if (HERE.parent / "measurements").is_dir():
        shutil.copytree(HERE.parent / "measurements", HERE / "measurements", dirs_exist_ok=True)


def escape_underscores(app: Any, context: Any, lines: list[str]) -> None:
    """Help texts are for terminals: a name in them that ends with an underscore is no reference."""
    lines[:] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", line) for line in lines]


def setup(app: Any) -> dict[str, Any]:
    app.connect("config-inited", bring_measurements)
    app.connect("source-read", read_page)
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", escape_underscores)
    app.connect("autodoc-process-docstring", docstrings.process)
    return {"parallel_read_safe": True}
