"""The functions of FairSeq's extension `libnat`, whose sources its release on PyPI lacks.

The models that edit their output (Levenshtein and insertion transformer) learn from the shortest edit that leads from
one sequence to another by inserting and deleting tokens.
"""

from __future__ import annotations

from types import SimpleNamespace

Tokens = list[int]


def make(missing: None) -> SimpleNamespace:
    """What stands for the module."""
    return SimpleNamespace(
        compute_ed2=compute_ed2,
        suggested_ed2_path=suggested_ed2_path,
        suggested_ed2_path_with_delete=suggested_ed2_path_with_delete,
    )


def compute_ed2(xs: list[Tokens], ys: list[Tokens]) -> list[int]:
    """How many insertions and deletions lead from each x to its y, at the least."""
    return [_distances(x, y)[-1][-1] for x, y in zip(xs, ys, strict=True)]


def suggested_ed2_path(xs: list[Tokens], ys: list[Tokens], terminal_symbol: int) -> list[list[Tokens]]:
    """For each pair: what to insert before each token of x and behind the last, then 1 for each that is deleted.

    A list that would be empty has the terminal symbol.
    """
    paths = []
    for x, y in zip(xs, ys, strict=True):
        inserted, deleted = _edit(x, y)
        # An empty x has nothing to mark.
        paths.append([part or [terminal_symbol] for part in [*inserted, deleted]] if x else [y, []])
    return paths


def suggested_ed2_path_with_delete(
    xs: list[Tokens], ys: list[Tokens], terminal_symbol: int, deletion_symbol: int
) -> list[list[Tokens]]:
    """For each pair: what to insert before each token of x and behind the last, and a symbol where it is deleted."""
    paths = []
    for x, y in zip(xs, ys, strict=True):
        inserted, deleted = _edit(x, y)
        for place, gone in enumerate(deleted):
            inserted[place] += [deletion_symbol] * gone
        paths.append([part or [terminal_symbol] for part in inserted] if x else [y])
    return paths


def _distances(x: Tokens, y: Tokens) -> list[list[int]]:
    """[i][j]: how many insertions and deletions lead from the first i tokens of x to the first j of y."""
    table = [list(range(len(y) + 1))]
    for i, token in enumerate(x, start=1):
        row = [i]
        for j, other in enumerate(y, start=1):
            row.append(table[-1][j - 1] if token == other else 1 + min(table[-1][j], row[-1]))
        table.append(row)
    return table


def _edit(x: Tokens, y: Tokens) -> tuple[list[Tokens], list[int]]:
    """What is inserted before each token of x and behind the last, and whether each is deleted.

    Of several shortest edits it is the one that, read from the end, inserts as early as it can, and then deletes.
    """
    table = _distances(x, y)
    inserted: list[Tokens] = [[] for _ in range(len(x) + 1)]
    deleted = [0] * len(x)
    i, j = len(x), len(y)
    while i or j:
        if j and table[i][j - 1] < table[i][j]:
            j -= 1
            inserted[i].insert(0, y[j])
        else:
            i -= 1
            if table[i][j] < table[i + 1][j]:
                deleted[i] = 1
            else:
                j -= 1
    return inserted, deleted
