"""measurements/peers.md: its tables, between markers, and its figures, from results.json.

`<!-- peers: NAME -->` and `<!-- end -->`, each alone on its line, enclose a place for a table.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache import Unavailable
from benchmarks.drawing import COLOURS, HEIGHT, WIDTH, write_figures
from benchmarks.marked import fill_marked
from benchmarks.measure import told as words
from benchmarks.peers.conduct import CELLS, STATES, Cell, cpu_us, rate
from benchmarks.peers.sets import SETS
from benchmarks.peers.table import PEERS, Variant, variants

__all__ = ["fill"]

Found = dict[str, Any]

STATE_WORDS = {"warm": "in the page cache", "cold": "cold, from the disk", "slow": "slow store"}
#: pario's orders that the bar is held against or shown beside
_OURS = ("pario:global", "pario:block", "pario:memory")
_DELIVERS = {True: "yes", False: "**no**"}


def _held(found: Found, cell: Cell) -> Found:
    return {key: turns for key, turns in found["cells"].get(cell.name, {}).items() if turns}


def _rows(found: Found) -> Iterable[Variant]:
    seen = {key for held in (*found["cells"].values(), *found["checks"].values()) for key in held}
    return (one for one in variants() if one.key in seen)


def _count(value: float) -> str:
    if value >= 99_950:
        return f"{value / 1e3:.0f} k"
    return f"{value / 1e3:.1f} k" if value >= 9_950 else f"{value:.0f}"


def _words(cell: Cell) -> str:
    ranks = f"{cell.ranks} rank{'s' if cell.ranks > 1 else ''}"
    return f"{SETS[cell.set].title}, {STATE_WORDS[cell.state]}, {ranks}" + (", 2 threads" if cell.threads > 1 else "")


def against_best(found: Found, cell: Cell, ours: str) -> tuple[str, list[float], list[tuple[float, float]]] | None:
    """(best other loader, ratios round by round, pairs of rates); None: not measured."""
    held = _held(found, cell)
    others = {key: turns for key, turns in held.items() if not key.startswith("pario")}
    if ours not in held or not others:
        return None
    best = max(others, key=lambda key: statistics.median(map(rate, others[key])))
    pairs = [(rate(a), rate(b)) for a, b in zip(held[ours], others[best], strict=False)]
    return best, [a / b for a, b in pairs], pairs


def _title(key: str) -> str:
    return next(one.title for one in variants() if one.key == key)


def ratios(found: Found) -> str:
    lines = [
        '| set, caches, ranks | pario "global" ÷ best | bar ≥ 1 | the best other loader (its mixing) | "block" ÷ best '
        '| "global", memory tier ÷ best | rounds |',
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        told = against_best(found, cell, "pario:global")
        if told is None:
            continue
        best, values, pairs = told
        verdict = "met" if statistics.median(values) >= 1 else "**not met**"
        mixed = found["checks"].get(f"{cell.set}/1", {}).get(best, {}).get("mixing")
        ours, theirs = (_count(statistics.median(side)) for side in zip(*pairs, strict=True))
        more = [against_best(found, cell, key) for key in _OURS[1:]]
        lines.append(
            f"| {_words(cell)} | {words(values)} | {verdict} "
            f"| {_title(best)}{'' if mixed is None else f' ({_mixed(mixed)})'}: {theirs}/s, pario {ours}/s | "
            + " | ".join(words(one[1]) if one else "" for one in more)
            + f" | {len(values)} |"
        )
    return "\n".join(lines)


def _mixed(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def losses(found: Found) -> str:
    """A sentence per measured cell in which another loader is faster than pario "global"."""
    lines, kept = [], 0
    for cell in CELLS:
        told = against_best(found, cell, "pario:global")
        if told is None:
            continue
        values = told[1]
        if statistics.median(values) >= 1:
            kept += 1
            continue
        held = _held(found, cell)
        rates = {key: statistics.median(map(rate, turns)) for key, turns in held.items()}
        faster = [key for key in rates if rates[key] > rates["pario:global"] and not key.startswith("pario")]
        faster.sort(key=lambda key: -rates[key])
        names = ", ".join(f"{_title(key)} {rates[key] / rates['pario:global']:.2f} ×" for key in faster)
        lines.append(f'* *{_words(cell)}*: faster than pario "global" are {names}.')
    return "\n".join(
        [f'pario "global" is the fastest, or as fast, in {kept} of {kept + len(lines)} measured cells.', "", *lines]
    )


def missing(found: Found) -> str:
    """Cells that were not measured, or with fewer rounds; turns that failed; peers that were not installed."""
    lines = [
        f"* Not installed: {peer.title}: {found['left_out'][peer.module]}"
        for peer in PEERS
        if peer.module in found["left_out"]
    ]
    none = [_words(cell) for cell in CELLS if not _held(found, cell)]
    if none:
        lines.append(f"* Not measured: {'; '.join(none)}.")
    for cell in CELLS:
        counts = [len(turns) for turns in _held(found, cell).values()]
        if counts and min(counts) < 5:
            few = [_title(key) for key, turns in _held(found, cell).items() if len(turns) == min(counts)]
            which = "" if len(few) == len(counts) else f" ({', '.join(few)})"
            lines.append(f"* {_words(cell)}: {min(counts)} rounds instead of 5{which}.")
    for name, why in found["errors"].items():
        lines.append(f"* {name}: {_last_line(why)}")
    for name, said in found["checks"].items():
        lines += [f"* {name}, {_title(key)}: {_last_line(one['error'])}" for key, one in said.items() if "error" in one]
    return "\n".join(lines) or "* Nothing."


def _last_line(error: str) -> str:
    """Without the folders of the machine on which it happened."""
    return re.sub(r"/[^\s'\"]*/", "", error.splitlines()[-1])[:200]


def speeds(found: Found, state: str, ranks: int, threads: int) -> str:
    cells = [cell for cell in CELLS if (cell.state, cell.ranks, cell.threads) == (state, ranks, threads)]
    cells = [cell for cell in cells if _held(found, cell)]
    if not cells:
        return "*Not measured.*"
    lines = ["| |" + "".join(f" {SETS[cell.set].title}: records/s | CPU µs | first batch | memory |" for cell in cells)]
    lines.append("|---|" + "---|---|---|---|" * len(cells))
    for variant in _rows(found):
        parts = []
        for cell in cells:
            turns = _held(found, cell).get(variant.key)
            if not turns:
                parts.append(" | | | |")
                continue
            rates = [rate(turn) for turn in turns]
            firsts = [turn["first_batch"] for turn in turns]
            if state == "warm":  # later turns go on with the data set that the first one opened
                firsts = firsts[:1]
            memory = max(sum(rank["rss"] for rank in turn["ranks"]) for turn in turns) / (1 << 20)
            parts.append(
                f" {_count(statistics.median(rates))} ({_count(min(rates))} … {_count(max(rates))}) | "
                f"{statistics.median(map(cpu_us, turns)):.3g} | {statistics.median(firsts):.2f} s | {memory:.0f} MiB |"
            )
        if any(part.strip(" |") for part in parts):
            lines.append(f"| {variant.title} |{''.join(parts)}")
    return "\n".join(lines)


def delivered(found: Found) -> str:
    lines = [
        "| | exactly once, bytes right: 1 rank | 2 ranks | a new order each epoch | mixing: 3 KB | 150 KB | JPEG |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in _rows(found):
        cells = {name: found["checks"].get(name, {}).get(variant.key) for name in found["checks"]}
        once = []
        for ranks in (1, 2):
            said = [cells[f"{name}/{ranks}"] for name in SETS if cells.get(f"{name}/{ranks}")]
            once.append(_once(said))
        first = [cells[f"{name}/1"] for name in SETS if cells.get(f"{name}/1") and "error" not in cells[f"{name}/1"]]
        anew = _DELIVERS[all(one["anew"] for one in first)] if first else ""
        mixed = [_mixed((cells.get(f"{name}/1") or {}).get("mixing")) for name in SETS]
        lines.append(f"| {variant.title} | {once[0]} | {once[1]} | {anew} | {' | '.join(mixed)} |")
    return "\n".join(lines)


def _once(said: Sequence[Found]) -> str:
    if not said:
        return ""
    bad = [one for one in said if not one.get("exactly_once")]
    if not bad:
        return "yes"
    one = bad[0]
    if "error" in one:
        return "did not run"  # the reason is among what was not measured
    return f"**no**: {one['missing']} missing, {one['repeated']} repeated, {one['wrong']} wrong"


def _short(error: str) -> str:
    words = " ".join(error.split()).replace("|", "/").replace("`", "'")
    return f"`{words[:110]}`"


def uneven(found: Found) -> str:
    lines = ["| | records per rank | batches per rank | missing | repeated |", "|---|---|---|---|---|"]
    for key, one in found["behaviour"].get("uneven", {}).items():
        if "error" in one:
            lines.append(f"| {_name(key)} | {_short(one['error'])} | | | |")
            continue
        parts = [", ".join(map(str, one[part])) for part in ("records", "batches")]
        lines.append(f"| {_name(key)} | {parts[0]} | {parts[1]} | {one['missing']} | {one['repeated']} |")
    return "\n".join(lines)


def damage(found: Found) -> str:
    lines = ["| | three bad JPEGs of 512 | 64 bytes of a raw record inverted in the file |", "|---|---|---|"]
    damaged, flipped = (found["behaviour"].get(name, {}) for name in ("damaged", "flipped"))
    for key in [*damaged, *(key for key in flipped if key not in damaged)]:
        lines.append(f"| {_name(key)} | {_outcome(damaged.get(key))} | {_outcome(flipped.get(key))} |")
    return "\n".join(lines)


def _outcome(one: Found | None) -> str:
    if one is None:
        return ""
    if "error" in one:
        return f"raises {_short(one['error'])}"
    wrong = f", **{one['wrong']} of them wrong, without an error**" if one["wrong"] else ", all right"
    return f"delivers {one['delivered']} of {one['of']}{wrong}"


def _name(key: str) -> str:
    module, _, name = key.partition(":")
    return Variant(next(peer for peer in PEERS if peer.module == module), name).title


def facts(found: Found) -> str:
    machines = found.get("machines") or [{}]
    one = machines[-1]
    days = sorted({machine["date"][:10] for machine in machines})
    versions = dict(sorted({name: v for held in found["versions"].values() for name, v in held.items()}.items()))
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Measured {' and '.join(days)} on {one['cpus']} cores ({one['cpu'] or 'unknown processor'}), "
        f"{one['memory_bytes'] / (1 << 30):.0f} GiB, Linux {one['kernel']}, Python {one['python']}, commit "
        f"{(one['commit'] or 'unknown')[:9]}; {named}."
    )


def _figures(found: Found, pyplot: Any) -> Iterable[tuple[str, Any]]:
    """Per state one panel per set, one below the other for narrow screens: records/s of every loader on one rank, from
    the slowest to the fastest round."""
    shown = list(_rows(found))
    for state in STATES:
        cells = [
            cell for cell in CELLS if (cell.state, cell.ranks, cell.threads) == (state, 1, 1) and _held(found, cell)
        ]
        if not cells:
            continue
        figure, panels = pyplot.subplots(len(cells), 1, figsize=(WIDTH, 1.2 * HEIGHT * len(cells)), squeeze=False)
        for panel, cell in zip(panels[:, 0], cells, strict=True):
            held = _held(found, cell)
            there = [one for one in reversed(shown) if one.key in held]
            for y, variant in enumerate(there):
                rates = [rate(turn) for turn in held[variant.key]]
                middle = statistics.median(rates)
                colour = COLOURS[5] if variant.peer.module == "pario" else COLOURS[0]
                panel.barh(y, middle, color=colour)
                panel.plot([min(rates), max(rates)], [y, y], color="black", linewidth=1)
            panel.set_yticks(range(len(there)), [one.title for one in there])
            panel.set_xscale("log")
            panel.set_xlabel("records/s")
            panel.set_title(f"{SETS[cell.set].title}, {STATE_WORDS[state]}")
        figure.tight_layout()
        yield f"peers-{state}", figure


def fill(found: Found, folder: Path) -> None:
    """Fill measurements/peers.md and write measurements/figures/peers-*.svg."""
    parts = {
        "machine": facts(found), "ratios": ratios(found), "losses": losses(found), "missing": missing(found),
        "delivered": delivered(found), "uneven": uneven(found), "damage": damage(found),
    }  # fmt: skip
    for state in STATES:
        parts[f"{state}_1"] = speeds(found, state, 1, 1)
        if any(_held(found, cell) for cell in CELLS if (cell.state, cell.ranks, cell.threads) == (state, 1, 1)):
            parts[f"{state}_1"] += f"\n\n![Records per second, {STATE_WORDS[state]}](figures/peers-{state}.svg)"
        parts[f"{state}_2"] = speeds(found, state, 2, 1)
    parts["threads"] = speeds(found, "warm", 1, 2)
    for name, text in parts.items():
        if text.startswith("|") and text.count("\n") < 2:
            parts[name] = "*Not measured.*"
    page = folder / "peers.md"
    page.write_text(fill_marked(page.read_text(), "peers", parts))
    try:
        write_figures(lambda pyplot: _figures(found, pyplot), folder / "figures")
    except Unavailable as e:
        print(f"no figures: {e}")
