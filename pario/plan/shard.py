"""Even division among ranks, nodes or threads."""

from __future__ import annotations

from pario.errors import OptionError

__all__ = ["even_split"]


def even_split(n: int, size: int, rank: int) -> tuple[int, int]:
    """(start, stop) of share `rank` of `size` contiguous shares of `n` items.

    Sizes differ by at most one, larger shares first; with n < size the last size - n shares are empty.
    """
    if n < 0 or size < 1 or not 0 <= rank < size:
        raise OptionError(f"cannot take share {rank!r} of {size!r} from {n!r} things")
    base, extra = divmod(n, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)
