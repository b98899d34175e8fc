"""`fastgen-classify MODEL INPUT OUTPUT`: labels and scores for every text of a data set.

Exit status: 0 all records done, 1 some were skipped (or the first bad one stopped a --strict run), 2 the run could not
be set up, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastgen.pipeline.encoding import ClassifyOptions, classify
from fastgen_cli.encode import Command, run_command

_OUTPUTS = """\
outputs:  .jsonl and .parquet: id, input, label, score, labels, scores, input_tokens, truncated; .csv: id, input, label,
          score, and with --top-k label_2, score_2, ...; without the skipped records; - is standard output (.jsonl)
"""
COMMAND = Command(
    "fastgen-classify",
    """\
Write labels and scores for every text of a data set, in input order.

  fastgen-classify distilbert/distilbert-base-uncased-finetuned-sst-2-english reviews.csv labels.csv --input-column text
  fastgen-classify cross-encoder/ms-marco-MiniLM-L6-v2 pairs.tsv scores.jsonl --input-column query --pair-column passage
""",
    _OUTPUTS,
    ClassifyOptions,
    classify,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_command(COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
