"""The form of vectors and labels in the journal and in each format of the output.

- `.npy`: one array [records, size]. The row of a skipped record is NaN, so that row n is record n.
- `.jsonl`, `.csv`: a record per line. Skipped records are left out.
- `.parquet`: the same as columns.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.pipeline.layouts import CHUNK, Layout, cells
from fastgen.pipeline.records import Result


class Vectors(Layout):
    """A vector for each text.

    Args:
        size: elements of a vector.
        dtype: float32 or float16.
    """

    fields = ("id", "input", "vector", "input_tokens", "truncated")

    def __init__(self, size: int, dtype: str) -> None:
        import numpy

        self._size, self.dtype = size, numpy.dtype(dtype).newbyteorder("<")

    def of_row(self, numbers: Any) -> Result:
        """Returns a vector's bytes in base64: exact and short for the journal."""
        return {"vector": base64.b64encode(numbers.tobytes()).decode("ascii")}

    def column_types(self) -> dict[str, Any]:
        import pyarrow

        number = pyarrow.from_numpy_dtype(self.dtype.newbyteorder("="))
        return super().column_types() | {"vector": pyarrow.list_(number)}

    def written(self, result: Result) -> dict[str, Any]:
        return super().written(result) | {"vector": self._vector(result)}

    def plain(self, result: Result) -> dict[str, Any]:
        return super().written(result) | {"vector": self._vector(result).tolist()}

    def write(self, path: Path, form: str, results: Iterable[Result]) -> None:
        if form != "npy":
            super().write(path, form, results)
            return
        with open(path, "wb", buffering=CHUNK) as handle:
            self._write_array(handle, results)

    def _write_array(self, handle: BinaryIO, results: Iterable[Result]) -> None:
        """Writes the array row by row. The number of rows is known at the end, and the header has room for it."""
        import numpy

        start = self._header(0)
        handle.write(start)
        missing = numpy.full(self._size, numpy.nan, self.dtype).tobytes()
        rows = 0
        for result in results:
            handle.write(missing if "error" in result else base64.b64decode(result["vector"]))
            rows += 1
        end = self._header(rows)
        assert len(end) == len(start), "NumPy leaves room in the header for the number of rows"
        handle.seek(0)
        handle.write(end)

    def _header(self, rows: int) -> bytes:
        from numpy.lib import format as npy

        header = io.BytesIO()
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": (rows, self._size)}
        npy.write_array_header_1_0(header, about)
        return header.getvalue()

    def _vector(self, result: Result) -> Any:
        import numpy

        return numpy.frombuffer(base64.b64decode(result["vector"]), self.dtype)


class Labels(Layout):
    """Labels with their scores, best first. `label` and `score` are the first ones.

    Args:
        labels: the model's labels.
        count: how many are written for each record.
    """

    dtype = "float32"
    fields = ("id", "input", "pair", "label", "score", "labels", "scores", "input_tokens", "truncated")
    optional = frozenset({"pair"})

    def __init__(self, labels: Sequence[str], count: int, with_pair: bool) -> None:
        self._labels, self._count = labels, count
        pair = ("pair",) if with_pair else ()
        numbered = [(f"label_{number}", f"score_{number}") for number in range(2, count + 1)]
        self._columns = ("id", "input", *pair, "label", "score", *(name for both in numbered for name in both))

    def of_row(self, numbers: Any) -> Result:
        """Returns the best labels with their scores; equal scores keep the model's order."""
        scores = numbers.tolist()
        best = sorted(range(len(scores)), key=lambda label: (-scores[label], label))[: self._count]
        return {"labels": [self._labels[label] for label in best], "scores": [scores[label] for label in best]}

    def written(self, result: Result) -> dict[str, Any]:
        return super().written(result | {"label": result["labels"][0], "score": result["scores"][0]})

    def header(self, form: str) -> bytes:
        return cells(self._columns) if form == "csv" else b""

    def line(self, result: Result, form: str) -> bytes:
        if form != "csv" or "error" in result:
            return super().line(result, form)
        pair = [result["pair"]] if "pair" in self._columns else []
        best = [value for both in zip(result["labels"], result["scores"], strict=True) for value in both]
        return cells([result["id"], result["input"], *pair, *best])
