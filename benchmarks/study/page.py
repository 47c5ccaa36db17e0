"""The study's page in the documentation, from the JSON of `python -m benchmarks.study`.

    python -m benchmarks.study.page OUT/study.json                        prints all tables
    python -m benchmarks.study.page OUT/study.json --into measurements/study.md --figures measurements/figures

A place for a table: `<!-- study: NAME -->` and `<!-- end -->`, each alone on its line; the names are `machine`, `bars`,
`missed`, `rates`, `gains`, `switches`, `times`, `store`, `speculation`, `requests` and `groups`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.study import plots, tables


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.page", description=__doc__.split("\n")[0])
    parser.add_argument("json")
    parser.add_argument("--into", action="append", default=[], help="a Markdown file with markers")
    parser.add_argument("--figures", help="a folder for the figures, as SVG")
    options = parser.parse_args(argv)
    document = json.loads(Path(options.json).read_text())
    if not options.into:
        print(tables.markdown(document))
    for name in options.into:
        page = Path(name)
        page.write_text(tables.fill(page.read_text(), document))
    if options.figures:
        for figure in plots.plot(document, options.figures):
            print(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
