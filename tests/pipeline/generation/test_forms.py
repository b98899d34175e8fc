"""Outputs of a given form: `--json-schema`, `--regex` and `--grammar`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastgen.pipeline import SetupError, generate_dataset
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.generation.loading import load
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.journal import identity

SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Moses", "Aaron"]}, "years": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["who", "years"],
    "additionalProperties": False,
}


def run(model: Path, source: Path, target: Path, **options: Any) -> Any:
    given = {"max_new_tokens": 30, "num_beams": 1, **options.pop("generation", {})}
    defaults = {"batch_size": 4, "device": "cpu", "quiet": True, "workers": 0, "truncation": True}
    return generate_dataset(model, source, target, generation=given, **{**defaults, **options})


@pytest.mark.parametrize(
    ("kind", "generation"),
    [("gpt2", {}), ("bart", {"num_beams": 3, "num_return_sequences": 2}), ("gpt2", {"do_sample": True})],
    ids=["greedy", "beams", "drawn"],
)
def test_json(
    kind: str, generation: dict[str, Any], inputs: Path, tmp_path: Path, request: pytest.FixtureRequest, programs: None
) -> None:
    """Outputs have the schema, in static batches and in slots."""
    model, schema = request.getfixturevalue(kind), tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    for batching in "static", "continuous":
        target = tmp_path / f"{batching}.jsonl"
        options = {"json_schema": str(schema), "generation": generation, "batching": batching}
        report = run(model, inputs, target, **options, limit=12)
        assert report.samples == 12 and not report.skipped
        for line in target.read_text().splitlines():
            written = json.loads(line)["text"]
            for text in written if isinstance(written, list) else [written]:
                found = json.loads(text)
                assert found.keys() == {"who", "years"} and found["who"] in ("Moses", "Aaron")


def test_lines(bart: Path, inputs: Path, tmp_path: Path) -> None:
    grammar, target = tmp_path / "form.gbnf", tmp_path / "out.txt"
    grammar.write_text('root ::= ("Moses" | "Aaron") [0-9] [0-9]')
    for form in {"regex": "(Moses|Aaron)[0-9]{2}"}, {"grammar": str(grammar)}:
        run(bart, inputs, target, overwrite=True, **form)
        lines = target.read_text().splitlines()
        assert len(lines) == 40 and all(re.fullmatch("(Moses|Aaron)[0-9]{2}", line) for line in lines)


def test_another_form_is_another_run(bart: Path, inputs: Path, tmp_path: Path) -> None:
    """What is in the file decides, not its name."""
    schemas, found = [SCHEMA, SCHEMA, SCHEMA | {"required": ["who"]}], list[Any]()
    for number, schema in enumerate(schemas):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(schema))
        settings = RunOptions(str(bart), str(inputs), str(tmp_path / "out.txt"), json_schema=str(path))
        loaded = load(settings)
        found.append(identity(settings, Inputs(settings), loaded))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "(a"}, "the form of outputs: the form of the result cannot be followed"),
        ({"json_schema": "none.json"}, "none.json"),
        ({"regex": "a", "grammar": "b"}, "outputs have one form"),
    ],
)
def test_what_does_not_fit_is_one_line(
    bart: Path, inputs: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(SetupError, match=re.escape(said)) as refused:
        run(bart, inputs, tmp_path / "out.txt", **options)
    assert "\n" not in str(refused.value) and not (tmp_path / "out.txt").exists()
