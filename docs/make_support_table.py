"""Writes the tables of docs/support.md: what is accelerated and what falls back, by running the equivalence grid.

    python docs/make_support_table.py            # writes it
    python docs/make_support_table.py --check    # exit status 1 if it is out of date

Every model of tests/equivalence is run with every way of decoding, unpatched and patched (tests/survey.py). A cell is
what `fastgen.stats()` counted; a case whose results differ stops the script. Nothing in them is written by hand but the
names of the cases, and what was installed where: docs/installations.csv.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fastgen  # noqa: E402
from fastgen import releases, settings  # noqa: E402
from tests import survey  # noqa: E402
from tests.equivalence import composites, multimodal, sounds  # noqa: E402
from tests.equivalence.cases import BEAM, CONTROL, DECODING, DRAWING, SAMPLE, SEARCH  # noqa: E402
from tests.equivalence.check import ENTRY_POINT, run  # noqa: E402
from tests.equivalence.hybrids import HYBRIDS  # noqa: E402
from tests.equivalence.models import BY_NAME, FAMILIES, LONG, Family  # noqa: E402
from tests.equivalence.others import LATER, OTHERS  # noqa: E402
from tests.equivalence.test_fallbacks import CASES  # noqa: E402
from tests.markdown import table  # noqa: E402

_OUTCOMES = f"{survey.ACCELERATED}$|{survey.CAPTURED}$|original: |not captured: |refused by Transformers$"
INSTALLATIONS = ROOT / "docs" / "installations.csv"
# What is between these on the page is made here; the rest is written by hand.
BEGIN, END = "<!-- tables -->", "<!-- /tables -->"


def model_rows(families: Iterable[Family]) -> list[list[str]]:
    """A row per model class: its name and a cell per column. Raises AssertionError if a case fails."""
    rows = survey.rows(families)
    for name, row in rows:
        for cell in row.values():
            assert all(re.match(_OUTCOMES, found) for found in cell.outcomes), (name, cell.outcomes)
    return [[f"`{name}`", *map(str, row.values())] for name, row in rows]


def multimodal_rows() -> list[list[str]]:
    """A row per class that takes more than text: a cell of prompts of text, and one of a picture or a sound in each."""
    rows = []
    for name in multimodal.CONFIGS:
        model, with_pictures = multimodal.build(name), multimodal.PICTURES.get(name)
        cells = ["not run", "not run"]
        for column, make_inputs in enumerate([multimodal.text, *([with_pictures] if with_pictures else [])]):
            inputs = make_inputs()
            found = [survey.captured_outcome(model, inputs, options) for options in DECODING.values()]
            cells[column] = cell(found)
        rows.append([f"`{type(model).__name__}`", *cells])
    return rows


def composite_rows() -> list[list[str]]:
    """A row per model that is made of an encoder and a decoder, which may be any two, or that reads sounds."""
    rows = []
    for name, (make_model, inputs) in composites.MODELS.items():
        model, ways = composites.build(make_model), [composites.options(name, each) for each in DECODING.values()]
        cells = [[made(model, inputs(), way) for way in ways] for made in (survey.outcome, survey.captured_outcome)]
        rows.append([f"`{type(model).__name__}`", name, *map(cell, cells)])
    return rows


def sound_rows() -> list[list[str]]:
    """A row per model that makes sounds."""
    rows = []
    for name, make_model in sounds.MODELS.items():
        model, inputs, ways = sounds.build(make_model), sounds.inputs(name), sounds.ways(name)
        cells = [
            [survey.outcome(model, inputs, way) for way in ways],
            [survey.captured_outcome(model, inputs, way, longer={}) for way in ways],
        ]
        rows.append([f"`{type(model).__name__}`", name, *map(cell, cells)])
    return rows


def cell(outcomes: list[str]) -> str:
    """What several cases have come to."""
    return str(survey.Cell(outcomes))


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
                found += [survey.outcome(family.build(), family.make_inputs(), {**way, **mine}) for way in decodings]
            rows.append([name, cell(found)])
    return rows


def fallback_rows() -> list[list[str]]:
    """What falls back whatever the model, with the reason that `fastgen.stats()` gives."""
    rows = []
    for name, case in CASES.items():
        model, inputs, options = case.build(), case.inputs(), case.options()
        fastgen.reset_stats()
        with settings.changed(captured_step="never"):
            run(model, inputs, lambda options=options: options)
        rows.append([name, *fastgen.stats()[ENTRY_POINT]["fallback"]])
    return rows


def installation_rows() -> list[list[str]]:
    """What was installed, and what passed there: written by hand into INSTALLATIONS."""
    with INSTALLATIONS.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def installations() -> str:
    """The section of `installation_rows`."""
    header, *rows = installation_rows()
    return f"""## What was installed

Transformers {" to ".join(releases.TESTED)} are tested. This was run on Linux, on x86-64 machines.
Only one row had a GPU.
`make test-versions`, `make test-newest` and `make check-wheel` run it again.

{table(header, rows)}
"""


def make(page: str) -> str:
    """The text of docs/support.md, with the tables as they should be."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the markers are missing"
    return f"{before}{begin}\n{tables()}{end}{after}"


def tables() -> str:
    """What is between the markers."""
    header = ["model", *survey.WAYS, survey.CAPTURED_STEP]
    return f"""## Models that must be accelerated

Made by `python docs/make_support_table.py` from the equivalence tests, with transformers {transformers.__version__}.
Every cell was run, unpatched and patched, with the same result. "original" means that the call ran on Transformers' own
code, for the reason that `fastgen.stats()` gives; "one sequence" is greedy search, and sampling of one sequence per
input. The last column is all of them with `captured_step="always"`.

The tests run them with FASTGEN_STRICT=1.

{table(header, model_rows(FAMILIES))}

## Other models that the tests run

A model in neither list is accelerated if its K/V cache and its decoding loop are those of the library.

{table(header, model_rows([*OTHERS, *LATER]))}

## Models that take more than text

With `captured_step="always"`. What reads pictures and sounds is the library's own code.

{table(["model", "text", "with a picture or a sound in each input"], multimodal_rows())}

## Models made of two, and models that read sounds

The models of this table except Kosmos-2 and 2.5, and the captured models of the table above except Granite Speech
(Plus), VideoLLaMA 3, Aria, Exaone 4.5 and HyperCLOVA X, run in [slots](engine.md#slots).

{table(["model", "of", "all ways of decoding", "captured step"], composite_rows())}

## Models that make sounds

Greedy and sampled, with guidance and without.

{table(["model", "of", "all ways of decoding", "captured step"], sound_rows())}

## Models with states besides K and V

From Transformers 5.14 on: linear attention, state spaces, and short convolutions.

{table(header, model_rows(HYBRIDS))}

## Options

Run on BART, GPT-2 and Llama.

{table(["option", "outcome"], option_rows())}

## What falls back

{table(["case", "reason in `fastgen.stats()`"], fallback_rows())}

{installations()}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with survey.surveying():
        path = ROOT / "docs" / "support.md"
        page = make(path.read_text(encoding="utf-8"))
    if path.read_text(encoding="utf-8") == page:
        return 0
    if arguments.check:
        print("docs/support.md is out of date")
        return 1
    path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
