"""Pages whose tables are made by scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["fill_marked"]


def fill_marked(page: str, kind: str, parts: Mapping[str, str]) -> str:
    """`page` with new text between each `<!-- KIND: NAME -->` and `<!-- end -->`, each alone on its line.

    parts : NAME -> text, "" -> that of `<!-- KIND -->`. Where it has none, the page keeps what it has.
    """

    def one(match: re.Match[str]) -> str:
        text = parts.get(match["name"] or "")
        return match[0] if not text else f"{match['head']}\n{text}\n{match['tail']}"

    return re.sub(rf"(?ms)^(?P<head><!-- {kind}(?:: (?P<name>\w+))? -->)$.*?^(?P<tail><!-- end -->)$", one, page)
