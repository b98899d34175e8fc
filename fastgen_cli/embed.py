"""`fastgen-embed MODEL INPUT OUTPUT`: a vector for every text of a data set.

Exit status: 0 all records done, 1 some were skipped (or the first bad one stopped a --strict run), 2 the run could not
be set up, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastgen.pipeline.encoding import EmbedOptions, embed
from fastgen_cli.encode import Command, run_command

_OUTPUTS = """\
outputs:  .npy: an array, whose row n is the vector of record n (NaN for a skipped one); .jsonl and .parquet: id, input,
          vector, input_tokens, truncated, without the skipped records; - is standard output (.jsonl)
vectors:  are made as the model's sentence-transformers files say (modules.json); without these, of the mean of the
          tokens' vectors
"""
COMMAND = Command(
    "fastgen-embed",
    """\
Write a vector for every text of a data set, in input order.

  fastgen-embed sentence-transformers/all-MiniLM-L6-v2 texts.txt vectors.npy
  fastgen-embed sentence-transformers/all-MiniLM-L6-v2 questions.csv vectors.parquet --input-column question
""",
    _OUTPUTS,
    EmbedOptions,
    embed,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_command(COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
