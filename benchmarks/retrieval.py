"""Whether vectors find the same texts: `python -m benchmarks.retrieval SOURCES REFERENCES [SOURCES REFERENCES]`.

Files are arrays of `fastgen-embed`. Row n of the references belongs to row n of the sources. With four files, the first
two are one way of making the vectors and the others another one, such as weights of 8 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

_SOURCES_AT_ONCE = 1024
_USAGE = "usage: python -m benchmarks.retrieval SOURCES.npy REFERENCES.npy [SOURCES.npy REFERENCES.npy]"


def nearest(sources: Any, references: Any) -> Any:
    """The reference whose vector is closest to that of each source, by the cosine; of equally close ones the first.

    Args:
        sources: [sources, size].
        references: [references, size].

    Returns:
        Row numbers [sources].
    """
    there = _unit(references).T
    parts = range(0, len(sources), _SOURCES_AT_ONCE)
    found = [(_unit(sources[start : start + _SOURCES_AT_ONCE]) @ there).argmax(axis=1) for start in parts]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _unit(vectors: Any) -> Any:
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def shares(files: list[Path]) -> dict[str, float]:
    """What part of the sources finds its own reference, with each pair of files; and what part the same in both."""
    pairs = [[np.load(file, mmap_mode="r") for file in files[start : start + 2]] for start in range(0, len(files), 2)]
    if any(len(sources) != len(references) for sources, references in pairs):
        raise ValueError("there must be a reference for each source")
    found = [nearest(*pair) for pair in pairs]
    own = {
        f"own reference first, {files[2 * n]}": float((rows == np.arange(len(rows))).mean())
        for n, rows in enumerate(found)
    }
    return own | ({"the same reference first in both": float((found[0] == found[1]).mean())} if len(found) == 2 else {})


if __name__ == "__main__":
    if len(sys.argv) not in (3, 5):
        sys.exit(_USAGE)
    for name, share in shares([Path(word) for word in sys.argv[1:]]).items():
        print(f"{100 * share:6.2f} %  {name}")
