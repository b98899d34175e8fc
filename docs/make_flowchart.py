"""Draws docs/options.svg, the flowchart of docs/options.md, from the questions below.

python docs/make_flowchart.py            # writes the picture
python docs/make_flowchart.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "options.svg"
# From top to bottom: a question, and what to do if the answer is yes. A box without an answer ends the chart.
# The first line of an answer is code.
STEPS = [
    ("Task: vectors or labels from\na model that only encodes?", 'padding="zero"\nif padding is not read'),
    ("Model: a checkpoint in\nGGUF, GPTQ or AWQ?", "keep_bits=True\nthe memory of the file"),
    ("Hardware: a GPU, or a CPU\nwith BF16 or AMX?", "dtype=torch.bfloat16\nif such tokens will do"),
    ("Hardware: a CPU\nwith little memory?", 'packed_weights="never"\nsame tokens'),
    ("Batch: one sequence\nat a time, on a CPU?", 'self_speculation="int8"\ngreedy: same tokens'),
    ("Batch: many inputs\nin a script?", "8 to 64 in a call\nsorted by length"),
    ("Batch: a whole file?", "fastgen-generate\nmakes the batches"),
    ("May weights be rounded\nto 8 or 4 bits?", 'weight_dtype="int8"\nand packed_weights="keep"'),
    ("Measure: fastgen.compare", None),
]
WIDTH, BOX, HEIGHT, GAP, MARGIN = 620, 272, 66, 30, 12


def draw() -> str:
    """The picture as SVG. Its colours follow the reader's setting, light or dark."""
    height = 2 * MARGIN + len(STEPS) * HEIGHT + (len(STEPS) - 1) * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Which option when: questions from top to bottom, with a setting for each yes</title>",
        "<style>",
        "text { font: 18px system-ui, 'DejaVu Sans', sans-serif; fill: #1b1f24 }",
        ".code { font: 600 17px ui-monospace, 'DejaVu Sans Mono', monospace }",
        ".note, .way { font-size: 16px; fill: #57606a }",
        "rect { stroke-width: 1.5; fill: #f6f8fa; stroke: #8c959f } .answer { fill: #ddf4e4; stroke: #2a8a4a }",
        "path { stroke: #8c959f; stroke-width: 1.5; fill: none } .head { fill: #8c959f }",
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .note, .way { fill: #aab3bd }",
        "rect { fill: #22272e; stroke: #768390 } .answer { fill: #17361f; stroke: #4cae6a } }",
        "</style>",
    ]
    for number, (question, answer) in enumerate(STEPS):
        top = MARGIN + number * (HEIGHT + GAP)
        parts += _box(MARGIN, top, question.split("\n"), "question")
        if answer is not None:
            right = WIDTH - MARGIN - BOX
            parts += _box(right, top, answer.split("\n"), "answer")
            parts += _arrow(MARGIN + BOX, top + HEIGHT / 2, right, top + HEIGHT / 2, "yes")
        if number + 1 < len(STEPS):
            parts += _arrow(MARGIN + BOX / 2, top + HEIGHT, MARGIN + BOX / 2, top + HEIGHT + GAP, "then")
    return "\n".join([*parts, "</svg>", ""])


def _box(left: float, top: float, lines: list[str], kind: str) -> list[str]:
    first = top + HEIGHT / 2 + 6 - 12 * (len(lines) - 1)
    parts = [f'<rect class="{kind}" x="{left}" y="{top}" width="{BOX}" height="{HEIGHT}" rx="8"/>']
    for number, line in enumerate(lines):
        style = "" if kind == "question" else ' class="code"' if number == 0 else ' class="note"'
        place = f'x="{left + BOX / 2:g}" y="{first + 24 * number:g}" text-anchor="middle"'
        parts.append(f"<text{style} {place}>{escape(line)}</text>")
    return parts


def _arrow(x: float, y: float, to_x: float, to_y: float, word: str) -> list[str]:
    """From (x, y) to the right or down."""
    if y == to_y:
        head, at = f"M{to_x} {y} l-9 -5 v10 z", (x + (to_x - x) / 2 - 5, y - 8, "middle")
    else:
        head, at = f"M{x} {to_y} l-5 -9 h10 z", (x + 10, y + (to_y - y) / 2 + 4, "start")
    return [
        f'<path d="M{x} {y} L{to_x} {to_y}"/><path class="head" d="{head}"/>',
        f'<text class="way" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{at[2]}">{word}</text>',
    ]


def is_stale() -> bool:
    """Whether the picture shows something else than the questions above."""
    return not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != draw()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the picture is out of date")
    if parser.parse_args().check:
        return int(is_stale())
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
