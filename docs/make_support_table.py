"""Writes docs/support.md: what is accelerated and what falls back, found out by running the equivalence grid.

    python docs/make_support_table.py            # writes it
    python docs/make_support_table.py --check    # exit status 1 if it is out of date

Every model of tests/equivalence is run with every way of decoding, unpatched and patched. A cell is what
`fastgen.stats()` counted; a case whose results differ stops the script. Nothing is written by hand but the names of the
cases.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fastgen  # noqa: E402
from fastgen.decoding import kv  # noqa: E402
from tests.equivalence.cases import BEAM, CONTROL, DECODING, DRAWING, SAMPLE, SEARCH  # noqa: E402
from tests.equivalence.check import ENTRY_POINT, check, run  # noqa: E402
from tests.equivalence.models import BY_NAME, FAMILIES, LONG, Family  # noqa: E402
from tests.equivalence.others import OTHERS  # noqa: E402
from tests.equivalence.test_fallbacks import CASES, WITHOUT_BEAMS  # noqa: E402

# Columns of the table: the name, and the cases of the grid that it stands for.
COLUMNS = {
    "beam search": ["beam", "beam, 3 returned", "beam sampling"],
    "several samples": ["sampling, 4 returned"],
    "one sequence": ["greedy", "sampling"],
}
ACCELERATED = "accelerated"


def outcome(model: Any, inputs: dict[str, Any], options: Any) -> str:
    """ACCELERATED, or "original" and the reason. Raises AssertionError if patched and unpatched results differ."""
    fastgen.reset_stats()
    check(model, inputs, options)
    counts = fastgen.stats()[ENTRY_POINT]
    return ACCELERATED if counts["accelerated"] else f"original: {next(iter(counts['fallback']))}"


def model_rows(families: Iterable[Family]) -> list[list[str]]:
    """A row per model class: its name and a cell per column."""
    found: dict[str, dict[str, list[str]]] = {}
    for family in families:
        row = found.setdefault(family.model_class, {column: [] for column in COLUMNS})
        for column, names in COLUMNS.items():
            for name in names:
                if family.name in WITHOUT_BEAMS and "num_beams" in DECODING[name]:
                    row[column].append("refused by Transformers")
                else:
                    row[column].append(outcome(family.build(), family.make_inputs(), DECODING[name]))
    return [[f"`{name}`", *(cell(values) for values in row.values())] for name, row in found.items()]


def cell(outcomes: list[str]) -> str:
    """What several cases have come to."""
    return "; ".join(sorted(set(outcomes), key=lambda text: (text != ACCELERATED, text)))


def option_rows() -> list[list[str]]:
    """A row per option, over the models that stand for the others."""
    families = [BY_NAME[name] for name in ("bart", "gpt2", "llama")]
    rows = []
    for options, decodings in ((SEARCH, [BEAM]), (CONTROL, [BEAM, SAMPLE]), (DRAWING, [SAMPLE])):
        for name, values in options.items():
            found = []
            for family in families:
                mine = dict(values)
                if family.encoder_decoder:
                    mine.update({key: mine[key] - LONG for key in ("max_length", "min_length") if key in mine})
                found += [outcome(family.build(), family.make_inputs(), {**way, **mine}) for way in decodings]
            rows.append([name, cell(found)])
    return rows


def fallback_rows() -> list[list[str]]:
    """What falls back whatever the model, with the reason that `fastgen.stats()` gives."""
    rows = []
    for name, case in CASES.items():
        model, inputs, options = case.build(), case.inputs(), case.options()
        fastgen.reset_stats()
        run(model, inputs, lambda options=options: options)
        rows.append([name, *fastgen.stats()[ENTRY_POINT]["fallback"]])
    return rows


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def make() -> str:
    """The text of docs/support.md."""
    header = ["model", *COLUMNS]
    return f"""# What is accelerated

Made by `python docs/make_support_table.py` from the equivalence tests, with transformers {transformers.__version__}.
Every cell was run, unpatched and patched, with the same result. "original" means that the call ran on Transformers' own
code, for the reason that `fastgen.stats()` gives; "one sequence" is greedy search, and sampling of one sequence per
input.

## Models that must be accelerated

The tests run them with FASTGEN_STRICT=1.

{table(header, model_rows(FAMILIES))}

## Other models that the tests run

A model in neither list is accelerated if its K/V cache and its decoding loop are those of the library.

{table(header, model_rows(OTHERS))}

## Options

Run on BART, GPT-2 and Llama.

{table(["option", "outcome"], option_rows())}

## What falls back

{table(["case", "reason in `fastgen.stats()`"], fallback_rows())}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kv.MIN_SHARED_BYTES = 0  # a tiny model's prefix would not be worth sharing
    path, page = ROOT / "docs" / "support.md", make()
    if path.exists() and path.read_text() == page:
        return 0
    if arguments.check:
        print("docs/support.md is out of date")
        return 1
    path.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
