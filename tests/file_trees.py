"""What a tree of files must show of an LMDB, worked out from its keys alone, without any code of pario/files."""

from __future__ import annotations

from collections.abc import Iterator

from pario.files.tree import FOLDER, Node, Tree

__all__ = ["awkward_keys", "expected_folders", "walk"]

#: What keys are put together of, to meet each rule of names, and each two of them.
PIECES = [
    *(b"a", b"b", b"a", b"/", b"/", b"//", b".", b"..", b"%", b"%41", b"%~", b"%db", b"\0", b"\n", b"\x7f"),
    b"\xff\x80",
    *("é".encode(), "\x85".encode(), b"-", b"0", b" ", b".jpg", b"z" * 90, "ü".encode() * 70, b"\x01" * 90),
]


def awkward_keys(numbers: list[list[int]]) -> list[bytes]:
    """Distinct keys that LMDB takes; each number names a piece."""
    keys = {b"".join(PIECES[i % len(PIECES)] for i in key)[:511] for key in numbers}
    return sorted(key for key in keys if key)


def walk(tree: Tree, path: str = "") -> Iterator[tuple[str, Node]]:
    """All files; on the way each name is looked up again, and all names of a folder differ."""
    seen = set()
    for name, node in tree.names(path):
        below = f"{path}/{name}" if path else name
        assert name not in seen, below
        assert name not in ("", ".", "..")
        assert "/" not in name
        assert "\0" not in name
        assert len(name.encode()) <= 255  # valid UTF-8, too
        assert name.isprintable() or any(c in name for c in " \xa0\u3000"), ascii(name)
        seen.add(name)
        assert tree.find(below) == node
        if node.kind == FOLDER:
            yield from walk(tree, below)
        else:
            yield below, node


def expected_folders(keys: list[bytes]) -> set[bytes]:
    """Everything before a slash of a key."""
    return {key[:i] for key in keys for i in range(len(key)) if key[i : i + 1] == b"/"}
