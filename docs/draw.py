"""The logo, and the drawings of how-it-works.md: python docs/draw.py writes docs/figures/*.svg."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FIGURES = Path(__file__).resolve().parent / "figures"

#: Okabe and Ito's colours, light ones for areas
NUMBERS, BYTES, TRAINING, PLAIN = "#dcecf7", "#fdebc8", "#d5efe5", "#f2f2f2"
INK = "#222222"


class Drawing:
    """Boxes and arrows on a white sheet; units are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, lines: list[str], fill: str = PLAIN) -> None:
        """The first line is bold; the others explain it."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{INK}"/>'
        )
        top = y + height / 2 - 8 * (len(lines) - 1) + 4
        for k, line in enumerate(lines):
            self.text(x + width // 2, round(top + 16 * k), line, weight="bold" if k == 0 else "normal")

    def text(self, x: int, y: int, line: str, *, anchor: str = "middle", weight: str = "normal") -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}">{escape(line)}</text>'
        )

    def arrow(self, points: list[tuple[int, int]], *, dashed: bool = False) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{dash} marker-end="url(#head)"/>'
        )

    def bar(self, x: int, y: int, width: int, height: int, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{INK}" stroke-width="0.7"/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="12" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def way() -> Drawing:
    """Numbers go down on the left, bytes come up on the right."""
    d = Drawing(720, 430, "The way of a byte")
    for y, lines in (
        (20, ["seed, epoch", "two integers"]),
        (100, ["record ids of the step", "plan: arithmetic"]),
        (180, ["extents", "locate: the index of the LMDB"]),
        (260, ["a few long reads", "plan: neighbours are merged"]),
    ):
        d.box(30, y, 230, 50, lines, NUMBERS)
    for y in (70, 150, 230):
        d.arrow([(145, y), (145, y + 30)])
    d.box(190, 360, 340, 50, ["store, page cache or tier", "fetch: pread, several in flight, one rank per node"])
    d.arrow([(145, 310), (145, 385), (190, 385)])
    for y, lines in (
        (260, ["slot of the ring", "memory that all ranks of the node share"]),
        (180, ["records", "views into the slot, nothing is copied"]),
        (100, ["arrays", "decode: no GIL, reused memory"]),
        (20, ["batch", "your training step"]),
    ):
        d.box(430, y, 260, 50, lines, TRAINING if lines[0] == "batch" else BYTES)
    d.arrow([(530, 385), (560, 385), (560, 310)])
    for y in (260, 180, 100):
        d.arrow([(560, y), (560, y - 30)])
    d.text(345, 50, "numbers go down,")
    d.text(345, 66, "bytes come up")
    return d


def when() -> Drawing:
    """The slots of a ring over the time of a few groups of steps."""
    slots, unit, left, top, row = 4, 52, 150, 40, 34
    d = Drawing(720, 290, "Where a byte is when")
    for slot in range(slots):
        y = top + slot * row
        d.text(left - 12, y + 17, f"slot {slot}", anchor="end")
        for turn in range(4):
            begin = slot + turn * slots  # a group is consumed in one unit; it was read three units before
            spans = ((begin - 3, begin - 1, BYTES), (begin - 1, begin, PLAIN), (begin, begin + 1, TRAINING))
            for start, stop, fill in spans:
                start, stop = max(start, 0), min(stop, 10)
                if start < stop:
                    d.bar(left + start * unit, y, (stop - start) * unit, 24, fill)
                    if fill == TRAINING:
                        d.text(left + start * unit + unit // 2, y + 17, f"group {begin}")
    y = top + slots * row + 8
    d.text(left - 12, y + 17, "training", anchor="end")
    for step in range(20):
        d.bar(left + step * unit // 2, y, unit // 2, 24, TRAINING)
    d.text(left, top - 14, "time", anchor="start")
    d.arrow([(left + 32, top - 18), (left + 10 * unit, top - 18)])
    y += 54
    for x, fill, words in (
        (60, BYTES, "being read from the store"),
        (280, PLAIN, "ready"),
        (380, TRAINING, "decoded and used"),
    ):
        d.bar(x, y, 20, 14, fill)
        d.text(x + 28, y + 12, words, anchor="start")
    return d


def waits() -> Drawing:
    """Arrows lead from the one who waits to the one who is waited for."""
    d = Drawing(720, 380, "Who waits for whom")
    d.box(250, 16, 220, 44, ["store"], BYTES)
    for x, node in ((30, 0), (380, 1)):
        d.bar(x, 100, 310, 190, "none")
        d.text(x + 12, 282, f"node {node}", anchor="start")
        d.box(x + 20, 116, 130, 44, ["reading rank", "its threads"], NUMBERS)
        d.box(x + 20, 200, 130, 44, ["ring", "slots"], BYTES)
        for k in range(2):
            d.box(x + 200, 116 + 84 * k, 95, 44, [f"rank {2 * node + k}", "your loop"], TRAINING)
            d.arrow([(x + 200, 138 + 84 * k), (x + 152, 216 + 12 * k)])
        d.arrow([(x + 85, 116), (x + 85, 86), (300 if node == 0 else 430, 86), (300 if node == 0 else 430, 62)])
        d.arrow([(x + 70, 160), (x + 70, 198)])
    d.box(200, 320, 320, 44, ["your Allreduce", "and the beginning of each loop"], TRAINING)
    d.arrow([(278, 244), (278, 318)])
    d.arrow([(628, 244), (628, 342), (522, 342)])
    d.text(152, 184, "a free slot", anchor="middle")
    d.text(502, 184, "a free slot", anchor="middle")
    d.text(220, 184, "a full slot", anchor="middle")
    d.text(570, 184, "a full slot", anchor="middle")
    d.text(120, 80, "answers to its reads", anchor="middle")
    return d


def logo() -> Drawing:
    """One file, and the ranks that it feeds."""
    d = Drawing(96, 64, "pario")
    d.bar(6, 8, 24, 48, BYTES)
    for y in (8, 24, 40):
        d.bar(66, y, 24, 16, TRAINING)
        d.arrow([(30, 32), (48, 32), (48, y + 8), (64, y + 8)])
    return d


DRAWINGS = {"logo": logo, "way": way, "when": when, "waits": waits}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FIGURES / f"{name}.svg").write_text(draw().svg())
