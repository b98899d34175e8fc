"""The functions of FairSeq's extension `libnat`, whose sources its release on PyPI lacks.

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


def compute_ed2(xs: list[Tokens], ys: list[Tokens]) -> list[int]:
    """How many insertions and deletions lead from each x to its y, at the least."""
    return [sum(map(len, inserted)) + sum(deleted) for inserted, deleted in _edits(xs, ys)]


def suggested_ed2_path(xs: list[Tokens], ys: list[Tokens], terminal_symbol: int) -> list[list[Tokens]]:
    """For each pair: what to insert before each token of x and behind the last, then 1 for each that is deleted.

    A list that would be empty has the terminal symbol, unless x itself is empty.
    """
    return [_ended([*inserted, deleted], terminal_symbol, deleted) for inserted, deleted in _edits(xs, ys)]


def suggested_ed2_path_with_delete(
    xs: list[Tokens], ys: list[Tokens], terminal_symbol: int, deletion_symbol: int
) -> list[list[Tokens]]:
    """For each pair: what to insert before each token of x and behind the last, and a symbol where it is deleted."""
    paths = []
    for inserted, deleted in _edits(xs, ys):
        marked = [tokens + [deletion_symbol] * gone for tokens, gone in zip(inserted, [*deleted, 0], strict=True)]
        paths.append(_ended(marked, terminal_symbol, deleted))
    return paths


def _ended(path: list[Tokens], terminal_symbol: int, deleted: list[int]) -> list[Tokens]:
    return [part or [terminal_symbol] for part in path] if deleted else path


def _edits(xs: list[Tokens], ys: list[Tokens]) -> list[tuple[list[Tokens], list[int]]]:
    """For each pair: what is inserted before each token of x and behind the last, and whether each is deleted.

    Of several shortest edits it is the one that, read from the end, inserts as early as it can, and then deletes.
    """
    return [_edit(x, y) for x, y in zip(xs, ys, strict=True)]


def _edit(x: Tokens, y: Tokens) -> tuple[list[Tokens], list[int]]:
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
    return inserted, deleted
