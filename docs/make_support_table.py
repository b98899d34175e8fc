"""Writes docs/support.md: what is accelerated and what falls back, found out by running the equivalence grid.

    python docs/make_support_table.py            # writes docs/support.md, and the short table into README.md
    python docs/make_support_table.py --check    # exit status 1 if either is out of date

Every model of tests/equivalence is run with every way of decoding, unpatched and patched. A cell is what
`fastgen.stats()` counted; a case whose results differ stops the script. Nothing is written by hand but the names of the
cases. In README.md the short table stands between the markers below; without the markers README.md is left alone.
"""

from __future__ import annotations

import argparse
import re
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

BEGIN, END = "<!-- support -->", "<!-- /support -->"
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


def make() -> tuple[str, str]:
    """The text of docs/support.md, and the short table of README.md."""
    header = ["model", *COLUMNS]
    required, fallbacks = model_rows(FAMILIES), fallback_rows()
    page = f"""# What is accelerated

Made by `python docs/make_support_table.py` from the equivalence tests, with transformers {transformers.__version__}.
Every cell was run, unpatched and patched, with the same result. "original" means that the call ran on Transformers' own
code, for the reason that `fastgen.stats()` gives; "one sequence" is greedy search, and sampling of one sequence per
input.

## Models that must be accelerated

The tests run them with FASTGEN_STRICT=1.

{table(header, required)}

## Other models that the tests run

A model in neither list is accelerated if its K/V cache and its decoding loop are those of the library.

{table(header, model_rows(OTHERS))}

## Options

Run on BART, GPT-2 and Llama.

{table(["option", "outcome"], option_rows())}

## What falls back

{table(["case", "reason in `fastgen.stats()`"], fallbacks)}
"""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in required:
        alike.setdefault(tuple(cells), []).append(
            re.sub("ForConditionalGeneration|ForCausalLM|LMHeadModel|MTModel|`", "", name)
        )
    short = table(["models", *COLUMNS], [[", ".join(names), *cells] for cells, names in alike.items()])
    first = {reason: name for name, reason in reversed(fallbacks)}
    return page, f"{short}\n\nWhat falls back: {', '.join(reversed(first.values()))}. All cases: docs/support.md."


def with_table(readme: str, compact: str) -> str:
    """README.md with the table between its markers, if it has them."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{compact}\n{end}{after}" if begin and end else readme


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kv.MIN_SHARED_BYTES = 0  # a tiny model's prefix would not be worth sharing
    page, compact = make()
    readme = ROOT / "README.md"
    files = {ROOT / "docs" / "support.md": page}
    if readme.exists():
        files[readme] = with_table(readme.read_text(), compact)
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(files[path])
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
