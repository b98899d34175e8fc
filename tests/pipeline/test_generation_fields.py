"""The fields read from the source are those of the class."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation_fields import GenerationField, generation_fields, read_generation_file


def test_every_field_of_the_class_and_no_other():
    from transformers import GenerationConfig

    own = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert {field.name for field in generation_fields()} == own


def test_fields_are_read_without_importing_transformers():
    code = (
        "import sys; from fastgen.pipeline.generation_fields import generation_fields; generation_fields();"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num_beams", "4", 4),
        ("length_penalty", "-1", -1.0),
        ("do_sample", "True", True),
        ("early_stopping", "never", "never"),
        ("early_stopping", "false", False),
        ("eos_token_id", "[1, 2]", [1, 2]),
        ("eos_token_id", "2", 2),
        ("bad_words_ids", "[[1, 2]]", [[1, 2]]),
        ("stop_strings", "123", "123"),
        ("stop_strings", '["a", "b"]', ["a", "b"]),
        ("sequence_bias", "[[[1, 2], -3.5]]", [[[1, 2], -3.5]]),
        ("forced_bos_token_id", "none", None),
        ("watermarking_config", '{"bias": 2.5}', {"bias": 2.5}),
        ("penalty_alpha", "0.6", 0.6),
    ],
)
def test_values(name, text, value):
    field = next(field for field in generation_fields() if field.name == name)
    parsed = field.parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"), [("num_beams", "four"), ("num_beams", "1.5"), ("do_sample", "maybe"), ("bad_words_ids", "[[1")]
)
def test_wrong_values(name, text):
    field = next(field for field in generation_fields() if field.name == name)
    with pytest.raises(ValueError, match=r"is not"):
        field.parse(text)


def test_a_field_of_unknown_type_takes_json_or_text():
    field = GenerationField("x", frozenset(), "")
    assert field.parse("3") == 3
    assert field.parse("abc") == "abc"


def test_files(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"num_beams": 3, "_from_model_config": True, "transformers_version": "5.0"}))
    assert read_generation_file(str(path)) == {"num_beams": 3}
    assert read_generation_file(str(tmp_path)) == {"num_beams": 3}
    for text, message in (("{", "not valid JSON"), ("[]", "not a JSON object"), ('{"num_beam": 1}', "'num_beam'")):
        path.write_text(text)
        with pytest.raises(SetupError, match=message):
            read_generation_file(str(path))
    with pytest.raises(SetupError, match="cannot read"):
        read_generation_file(str(tmp_path / "none.json"))
