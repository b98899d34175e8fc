"""The types of generation options: all of the class's are listed, and values are checked against them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation.options import TYPES, check_values, known_names, parse, read_generation_file


def test_every_field_of_the_class_is_listed_with_its_type():
    assert set(TYPES) >= known_names()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num_beams", "4", 4), ("length_penalty", "-1", -1.0), ("do_sample", "True", True),
        ("early_stopping", "never", "never"), ("early_stopping", "false", False), ("eos_token_id", "[1, 2]", [1, 2]),
        ("eos_token_id", "2", 2), ("bad_words_ids", "[[1, 2]]", [[1, 2]]), ("stop_strings", "123", "123"),
        ("stop_strings", '["a", "b"]', ["a", "b"]), ("sequence_bias", "[[[1, 2], -3.5]]", [[[1, 2], -3.5]]),
        ("forced_bos_token_id", "none", None), ("watermarking_config", '{"bias": 2.5}', {"bias": 2.5}),
        ("penalty_alpha", "0.6", 0.6),
    ],
)  # fmt: skip
def test_values(name, text, value):
    parsed = parse(name, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"), [("num_beams", "four"), ("num_beams", "1.5"), ("do_sample", "maybe"), ("bad_words_ids", "[[1")]
)
def test_wrong_values(name, text):
    with pytest.raises(ValueError, match=r"is not"):
        parse(name, text)


def test_a_field_of_unknown_type_takes_json_or_text():
    assert parse("of_a_later_release", "3") == 3
    assert parse("of_a_later_release", "abc") == "abc"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0: it must be at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3: it must be at least 1"),
        ({"num_beams": "four"}, "num_beams is 'four': it must be of type int"),
        ({"num_beams": 2.5}, "num_beams is 2.5"),
        ({"num_beams": True}, "num_beams is True"),
        ({"do_sample": "yes"}, "do_sample is 'yes': it must be of type bool"),
        ({"bad_words_ids": "x"}, "bad_words_ids is 'x': it must be of type JSON"),
    ],
)
def test_values_that_the_library_cannot_do_with(values, message):
    with pytest.raises(SetupError, match=message):
        check_values(SimpleNamespace(**values))


def test_values_that_it_can_do_with():
    fine = SimpleNamespace(
        length_penalty=1, early_stopping="never", eos_token_id=[1, 2], stop_strings=["a"], top_k=None
    )
    check_values(fine)


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
