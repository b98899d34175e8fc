"""What the command line of a server comes to, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen_serve import keys
from fastgen_serve.errors import Unauthorized
from fastgen_serve.main import UsageError, main, read
from fastgen_serve.settings import ServeSettings
from tests.serve.servers import BART, GPT2


def test_models_have_the_names_of_their_folders_or_those_that_are_given() -> None:
    assert read([BART, "org/hub-name", f"mine={GPT2}"]).models == (
        ("kjv-bart", BART),
        ("org/hub-name", "org/hub-name"),
        ("mine", GPT2),
    )
    assert read([BART, GPT2, "--served-model-name", "one", "two"]).models == (("one", BART), ("two", GPT2))


def test_a_folder_with_an_equals_sign_is_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert read([str(folder)]).models == (("a=b", str(folder)),)


def test_options_have_the_defaults_of_the_settings() -> None:
    assert read([BART]) == ServeSettings(models=(("kjv-bart", BART),))
    found = read([BART, "--slots", "8", "--slo-ms", "250", "--scheduler", "lazy", "--host", "::1", "--drain-s", "0"])
    assert (found.slots, found.slo_ms, found.scheduler, found.host, found.drain_s) == (8, 250.0, "lazy", "::1", 0.0)
    assert read([BART, "--dtype", "bfloat16"]).dtype == "bf16" and read([BART, "--dtype", "auto"]).dtype == "auto"
    found = read([BART, "--cache-gib", "1.5", "--cors-origin", "http://localhost:3000", "--cors-origin", "*"])
    assert read([BART, "--max-images", "1"]).max_images == 1
    assert (found.cache_gib, found.cors_origins) == (1.5, ("http://localhost:3000", "*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "MODEL"), ([BART, "--slots", "0"], "slots is 0"), ([BART, "--slots", "many"], "--slots"),
        ([BART, "--dtype", "fp8"], "--dtype"), ([BART, BART], "two are named kjv-bart"),
        ([BART, "--served-model-name", "a", "b"], "2 names for 1 models"),
        ([BART, "--api-key-file", "/no/such/file"], "cannot read /no/such/file"),
        ([BART, "--port", "70000"], "port is 70000"), ([BART, "--request-timeout-s", "0"], "request_timeout_s is 0"),
        ([BART, "--cache-gib", "0"], "cache_gib is 0"), ([BART, "--scheduler", "lazy"], "give --slo-ms"),
        ([BART, "--cors-origin", "https://example.org/page"], "cors_origin is 'https://example.org/page'"),
        ([BART, "--languages", "other=en:de"], "no model is named other"),
        ([BART, "--languages", "en-de"], "no pair of languages"), ([BART, "--replicas", "2"], "give --ray"),
        ([BART, "--ray", "local", "--replicas", "0"], "replicas is 0"),
        ([BART, "--ray", "local", "--replicas", "3", "--max-replicas", "2"], "max_replicas is 2: give 3 or more"),
        ([BART, "--ray", "local", "--port", "0"], "port is 0"), ([BART, "--nonsense"], "--nonsense"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and lines[0].startswith("fastgen-serve: ")


@pytest.mark.parametrize(
    "given",
    [
        *({name: None} for name in ("slots", "port", "host", "max_tokens", "drain_s", "warm_up", "dtype", "scheduler")),
        *({"slots": value} for value in ("8", 8.0, True)),
        {"threads": 1.5}, {"cache": 256}, {"slo_ms": "20"}, {"log_texts": "no"}, {"dtype": ["fp32"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_of_another_type_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"^{name} is "):
        ServeSettings(**given)
    ServeSettings(threads=None, slo_ms=20, cache=None)


def test_keys_are_read_one_a_line_and_stay_out_of_what_is_printed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nsecret-one\n\n  secret-two \n")
    settings = read([BART, "--api-key-file", str(file), "--cache", "redis://:password@host"])
    assert settings.api_keys == ("secret-one", "secret-two")
    assert "secret" not in repr(settings) and "password" not in repr(settings)
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="has no key"):
        read([BART, "--api-key-file", str(file)])


def test_a_key_is_one_of_those_that_there_are() -> None:
    keys.check(None, ())
    keys.check("b", ("a", "b"))
    for wrong in (None, "", "c", "ab", "ä", "\ud800"):
        with pytest.raises(Unauthorized):
            keys.check(wrong, ("a", "b"))
    assert keys.of_header("Bearer  key ") == "key" and keys.of_header("bearer key") == "key"
    assert keys.of_header("Basic key") is None and keys.of_header(None) is None
