"""Words of a translated text, where a noun should stand, only become fewer: in docs, docstrings, comments, errors."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: "A window has at least so many batches" lacks its noun ("Minimum number of batches"); "so long as it lasts" does not
NOUNLESS = re.compile(r"\b(?:so (?:many|often|long|much)\b(?! (?:as|that|of)\b)|whoever\b)", re.IGNORECASE)
#: the ratchet; 20 is the bar
MOST = 3


def found(text: str) -> list[str]:
    return [match[0] for match in NOUNLESS.finditer(text)]


def test_words_that_replace_a_noun_become_fewer() -> None:
    folders = [ROOT / "docs", ROOT / "docs" / "reference", ROOT / "measurements"]  # the site copies the last into docs
    pages = [page for folder in (ROOT, *folders) for kind in ("*.md", "*.rst") for page in folder.glob(kind)]
    paths = [*pages, *(ROOT / "pario").rglob("*.py"), *(ROOT / "pario").rglob("*.slurm")]
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for _ in found(line)
    ]
    assert len(lines) <= MOST, "\n".join(lines)


def test_what_is_counted() -> None:
    assert found("So many threads, and whoever waits so long") == ["So many", "whoever", "so long"]
    assert not found("so long as it lasts; so many that nothing fits; three bytes each")
