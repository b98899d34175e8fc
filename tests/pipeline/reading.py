"""Files of every format, and what is read from them."""

from __future__ import annotations

import csv
import json

from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.inputs import Inputs

TEXTS = ["one", 'two, with "quotes"', "three\u2028breaks only in unicode", "naïve 雪"]


def inputs(path, **options):
    return Inputs(RunOptions(model="m", input=str(path), output="-", **options))


def read(path, **options):
    return list(inputs(path, **options))


def rows_of(path):
    """Those of an output in JSON lines."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def bad_kinds(records):
    return {record.line: record.problem.kind for record in records if record.problem}


def write_parquet(path, columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def write(path, texts, form):
    if form == "txt":
        path.write_bytes("".join(text + "\n" for text in texts).encode())
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"a": 1, "text": text}) + "\n" for text in texts))
    elif form in ("csv", "tsv"):
        with open(path, "w", newline="", encoding="utf-8") as handle:
            csv.writer(handle, delimiter="\t" if form == "tsv" else ",").writerows(
                [["a", "text"], *([1, t] for t in texts)]
            )
    elif form == "parquet":
        write_parquet(path, {"a": [1] * len(texts), "text": texts})
    else:
        from datasets import Dataset

        Dataset.from_dict({"a": [1] * len(texts), "text": texts}).save_to_disk(str(path))
    return path
