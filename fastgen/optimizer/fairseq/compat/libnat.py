"""The function that FairSeq calls of its extension `libnat`, whose sources its release on PyPI lacks.

The models that edit their output (Levenshtein and insertion transformer) learn from the shortest edit that leads from
one sequence to another by inserting and deleting tokens.
"""

from __future__ import annotations

import sys
from types import ModuleType

Tokens = list[int]


def make(missing: None) -> ModuleType:
    """What stands for the extension: this module."""
    return sys.modules[__name__]


def suggested_ed2_path(xs: list[Tokens], ys: list[Tokens], terminal_symbol: int) -> list[list[Tokens]]:
    """For each pair: what to insert before each token of x and behind the last, then 1 for each that is deleted.

    A list that would be empty has the terminal symbol, unless x itself is empty.
    """
    paths = [_edit(x, y) for x, y in zip(xs, ys, strict=True)]
    return [[part or [terminal_symbol] for part in path] if x else path for x, path in zip(xs, paths, strict=True)]


def _edit(x: Tokens, y: Tokens) -> list[Tokens]:
    """Of several shortest edits the one that, read from the end, inserts as early as it can, and then deletes."""
    # [i][j]: how many insertions and deletions lead from the first i tokens of x to the first j of y.
    distances = [list(range(len(y) + 1))]
    for i, token in enumerate(x, start=1):
        row = [i]
        for j, other in enumerate(y, start=1):
            row.append(distances[-1][j - 1] if token == other else 1 + min(distances[-1][j], row[-1]))
        distances.append(row)
    inserted: list[Tokens] = [[] for _ in range(len(x) + 1)]
    deleted = [0] * len(x)
    i, j = len(x), len(y)
    while i or j:
        if j and distances[i][j - 1] < distances[i][j]:
            j -= 1
            inserted[i].insert(0, y[j])
        else:
            i -= 1
            if distances[i][j] < distances[i + 1][j]:
                deleted[i] = 1
            else:
                j -= 1
    return [*inserted, deleted]
