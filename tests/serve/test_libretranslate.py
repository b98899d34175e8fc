"""LibreTranslate's interface, with a client of it and over HTTP: its shapes, and the translations of `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import InvalidArgument, Unsatisfiable
from libretranslatepy import LibreTranslateAPI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fastgen_serve.api import libretranslate
from fastgen_serve.app import create_app
from fastgen_serve.errors import BadRequest
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation import sentences
from tests.equivalence.check import in_threads
from tests.serve import servers, tiny_translators

DOCUMENTED = [checks.content_type_conformance, checks.response_schema_conformance, checks.status_code_conformance]
IS_JSON = {"Content-Type": "application/json"}
TEXT = "The man went to the city. He saw a light!"


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "en-de": tiny_translators.marian(folder / "en-de", "en", "de"),
        "de-many": tiny_translators.marian(folder / "de-many", "de", "many", ("eng", "fra"), seed=1),
        "many": tiny_translators.m2m100(folder / "many", seed=2),
        "kjv-gpt2": servers.GPT2,
        "kjv-bart": servers.BART,
    }


@pytest.fixture(scope="module")
def settings(paths) -> ServeSettings:
    return ServeSettings(
        models=tuple(paths.items()), slots=8, max_batch=20, max_beams=4, max_body_bytes=50_000,
        languages={"kjv-bart": frozenset({("fr", "en")}), "many": frozenset({("es", "it"), ("it", "zh")})},
        warm_up=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def translated(paths) -> Any:
    """What `generate` makes of one sentence alone, and what it is called with."""
    loaded = {
        name: (AutoTokenizer.from_pretrained(path), AutoModelForSeq2SeqLM.from_pretrained(path))
        for name, path in paths.items()
        if name != "kjv-gpt2"
    }

    def translate(name: str, sentence: str, source: str = "", target: str = "", **options: Any) -> list[str]:
        tokenizer, model = loaded[name]
        if source:
            tokenizer.src_lang, options["forced_bos_token_id"] = source, tokenizer.get_lang_id(target)
        with torch.no_grad():
            outputs = model.generate(**tokenizer([sentence], return_tensors="pt"), **options)
        return [text.strip() for text in tokenizer.batch_decode(outputs, skip_special_tokens=True)]

    return translate


def test_a_client_of_libretranslate(url, translated):
    client = LibreTranslateAPI(url)
    (first,), (second,) = (
        translated("en-de", sentence) for sentence in ("The man went to the city.", "He saw a light!")
    )
    assert client.translate(TEXT, "en", "de") == f"{first} {second}"
    assert client.languages() == [
        {"code": "zh", "name": "Chinese", "targets": []},  # clients get the names of targets here
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "fr", "name": "French", "targets": ["en"]},
        {"code": "de", "name": "German", "targets": ["en", "fr"]},
        {"code": "it", "name": "Italian", "targets": ["zh"]},
        {"code": "es", "name": "Spanish", "targets": ["it"]},
    ]
    assert client.detect("Der Mann ging in die Stadt.")[0]["language"] == "de"
    with pytest.raises(HTTPError) as found:
        client.translate(TEXT, "en", "tlh")
    assert found.value.code == 400
    assert "target" in json.load(found.value)["error"]


def test_lists_line_breaks_and_the_source_that_is_found(client, translated):
    texts = [f"{TEXT}\n\n  He saw a light!\n", "Am Anfang schuf Gott Himmel und Erde.", "12", ""]
    answer = client.post("/translate", json={"q": texts, "source": "auto", "target": "en"}).json()
    (german,) = translated("de-many", f">>eng<< {texts[1]}")
    assert answer["translatedText"] == [texts[0], german, "12", ""]  # the first one is in English already
    assert [each["language"] for each in answer["detectedLanguage"]][:2] == ["en", "de"]
    assert answer["detectedLanguage"][1]["confidence"] > 50
    assert answer["detectedLanguage"][2]["confidence"] == 0
    assert "alternatives" not in answer
    city, light = translated("en-de", "The man went to the city.")[0], translated("en-de", "He saw a light!")[0]
    answer = client.post("/translate", json={"q": texts[0], "source": "en", "target": "de"}).json()
    assert answer == {"translatedText": f"{city} {light}\n\n  {light}\n"}


def test_alternatives_are_the_further_beams(client, translated):
    body = {"q": "He saw a light!", "source": "en", "target": "de", "alternatives": 3}
    expected = list(dict.fromkeys(translated("en-de", body["q"], num_beams=4, num_return_sequences=4)))
    answer = client.post("/translate", json=body).json()
    assert [answer["translatedText"], *answer["alternatives"]] == expected
    many = client.post("/translate", json={**body, "q": [body["q"], body["q"]]}).json()
    assert many == {"translatedText": [expected[0]] * 2, "alternatives": [expected[1:]] * 2}


def test_each_pair_has_its_model(client, translated):
    for target, token in (("fr", ">>fra<<"), ("en", ">>eng<<")):
        (expected,) = translated("de-many", f"{token} Und die Erde war leer.")
        body = {"q": "Und die Erde war leer.", "source": "de", "target": target}
        assert client.post("/translate", json=body).json()["translatedText"] == expected
    for source, target in (("es", "it"), ("it", "zh")):
        (expected,) = translated("many", "He saw a light!", source, target)
        body = {"q": "He saw a light!", "source": source, "target": target}
        assert client.post("/translate", json=body).json()["translatedText"] == expected
    (expected,) = translated("kjv-bart", "le ciel et la terre")
    answer = client.post("/translate", data={"q": "le ciel et la terre", "source": "fr", "target": "en"})
    assert answer.json()["translatedText"] == expected
    answer = client.post("/translate", json={"q": "x y", "source": "en", "target": "fr"})
    assert answer.status_code == 400
    assert "from English (en) to French (fr)" in answer.json()["error"]


def test_html_keeps_its_tags(client, translated):
    (light,) = translated("en-de", "He saw a light!")
    html = '<p class="a">He saw a light!</p>\n<code>He</code>'
    body = {"q": html, "source": "en", "target": "de", "format": "html", "alternatives": "1"}
    answer = client.post("/translate", data=body).json()
    escaped = light.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert answer["translatedText"] == f'<p class="a">{escaped}</p>\n<code>He</code>'.replace("\n", " ")
    assert len(answer["alternatives"]) == 1


def test_long_sentences_are_cut(client):
    long = " ".join(["behold"] * 200)
    answer = client.post("/translate", json={"q": long, "source": "en", "target": "de"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["translatedText"]


def test_forms_with_several_texts(client):
    fields = {"q": ["He saw a light!", "12"], "source": "en", "target": "de"}
    answers = [client.post("/translate", data=fields), client.post("/translate", json=fields)]
    assert answers[0].json() == answers[1].json()
    assert client.post("/translate", data={**fields, "format": ""}).json() == answers[0].json()
    assert client.post("/translate", json={**fields, "format": None}).json() == answers[0].json()
    assert client.post("/translate", params=fields).json() == answers[0].json()
    parts = [("q", (None, "12")), ("source", (None, "en")), ("target", (None, "de"))]
    assert client.post("/translate", files=parts).json() == {"translatedText": "12"}


GOOD = {"q": "He saw a light!", "source": "en", "target": "de"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"q": None}, "q"), ({"q": ""}, "q"), ({"q": []}, "q"), ({"q": 3}, "q"), ({"q": ["a"] * 21}, "q"),
        ({"q": "\ud800"}, "q"), ({"source": None}, "source"), ({"source": "xx"}, "source"),
        ({"target": "../../etc"}, "target"), ({"target": 5}, "target"), ({"format": "pdf"}, "format"),
        ({"alternatives": -1}, "alternatives"), ({"alternatives": "many"}, "alternatives"),
        ({"alternatives": 4}, "alternatives"), ({"secret": "x"}, "secret"), ({"\ud800": "x"}, "the body"),
    ],
)  # fmt: skip
def test_fields_that_are_wrong_are_named(client, change, field):
    body = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    answer = client.post("/translate", content=json.dumps(body), headers=IS_JSON)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(f"{field}") or field in answer.json()["error"]


@pytest.mark.parametrize("path", ["/translate", "/detect"])
@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_00, '{"q": 1' + "0" * 5000 + "}", b"\xff"])
def test_bodies_that_are_none(client, path, content):
    answer = client.post(path, content=content, headers=IS_JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert client.post(path, content=content).status_code == 400


def test_detection(client):
    found = client.post("/detect", data={"q": "Le ciel et la terre passeront."}).json()
    assert found[0]["language"] == "fr" and 50 < found[0]["confidence"] <= 100
    assert client.post("/detect", json={"q": ["Der Himmel", "und die Erde"]}).json()[0]["language"] == "de"
    assert client.post("/detect", json={"q": "12"}).json() == [{"confidence": 0.0, "language": "en"}]


def test_files(client, translated):
    (light,) = translated("en-de", "He saw a light!")
    fields = {"source": "auto", "target": "de"}
    upload = {"file": ("../../a/light.TXT", b"He saw a light!\nHe saw a light!\n", "text/html")}
    answer = client.post("/translate_file", data=fields, files=upload)
    assert answer.status_code == 200, answer.text
    found = client.get(answer.json()["translatedFileUrl"])
    assert found.text == f"{light}\n{light}\n"
    assert found.headers["content-disposition"] == 'attachment; filename="translation.txt"'
    assert found.headers["content-type"] == "text/plain; charset=utf-8"
    for name in ("x.txt", "..%2F..%2Fetc%2Fpasswd", "%00"):
        assert client.get(f"/download_file/{name}").status_code == 404


@pytest.mark.parametrize(
    ("name", "fields", "word"),
    [
        ("a.pdf", {}, "file"), ("a", {}, "file"), (None, {}, "file"), ("a.docx", {}, "damaged"),
        ("a.txt", {"target": "xx"}, "target"), ("a.txt", {"more": "x"}, "more"),
    ],
)  # fmt: skip
def test_files_that_are_refused(client, name, fields, word):
    upload = {} if name is None else {"file": (name, b"He saw a light!")}
    answer = client.post("/translate_file", data={"source": "en", "target": "de", **fields}, files=upload)
    assert answer.status_code == 400
    assert word in answer.json()["error"]


def test_a_file_that_is_too_large(client):
    upload = {"file": ("a.txt", b"a" * 60_000)}
    answer = client.post("/translate_file", data={"source": "en", "target": "de"}, files=upload)
    assert answer.status_code == 413
    assert list(answer.json()) == ["error"]


def test_frontend_settings_and_suggestions(client):
    found = client.get("/frontend/settings").json()
    assert found["language"] == {
        "source": {"code": "auto", "name": "Auto Detect"},
        "target": {"code": "de", "name": "German"},
    }
    assert ".docx" in found["supportedFilesFormat"]
    assert (found["suggestions"], found["apiKeys"], found["keyRequired"]) == (False, False, False)
    answer = client.post("/suggest", data={"q": "a", "s": "b", "source": "en", "target": "de"})
    assert answer.status_code == 403
    assert list(answer.json()) == ["error"]


def test_many_clients_get_what_each_would_get_alone(client, translated):
    expected = {
        text: translated("en-de", text)[0] for text in ("He saw a light!", "The man went to the city.", "Fear not.")
    }
    found: list[tuple[str, str]] = []

    def ask(text: str) -> None:
        body = {"q": text, "source": "en", "target": "de"}
        found.append((text, client.post("/translate", json=body).json()["translatedText"]))

    texts = list(expected) * 4
    in_threads(lambda number: ask(texts[number]), len(texts))
    assert len(found) == 12
    assert all(expected[text] == answer for text, answer in found)


OPERATIONS = r"^/(translate|detect|languages|frontend|suggest|translate_file|download_file|stats)"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_drawn_requests_get_answers_that_are_documented(settings, models, mode):
    app = create_app(settings, servers.SharedModels(list(models)))
    operations = (
        schemathesis.openapi.from_asgi("/openapi.json", app).include(path_regex=OPERATIONS).get_all_operations()
    )
    seen = set()
    for operation in (found.ok() for found in operations):

        @given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis_settings(max_examples=5, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error, *DOCUMENTED])
            seen.add(case.path)

        with contextlib.suppress(Unsatisfiable, InvalidArgument):  # where nothing can be wrong
            check()
    assert {"/translate", "/detect", "/translate_file"} <= seen


def test_keys_are_in_the_body_or_the_header(models, settings):
    locked = dataclasses.replace(settings, api_keys=("right",))
    with (
        servers.in_thread(create_app(locked, servers.SharedModels(list(models)))) as url,
        httpx.Client(base_url=url) as client,
    ):
        half = httpx.post(f"{url}/detect", content='{"q": "12", "api_key": "\\ud800"}', headers=IS_JSON)
        assert half.status_code == 403
        for key, status in (("right", 200), ("wrong", 403), (None, 403)):
            more = {} if key is None else {"api_key": key}
            header = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path in ("/translate", "/detect"):
                body = {"q": "12", "source": "en", "target": "de"} if path == "/translate" else {"q": "12"}
                assert client.post(path, json={**body, **more}).status_code == status
                assert client.post(path, data={**body, **more}).status_code == status
                assert client.post(path, json=body, headers=header).status_code == status
            upload = {"file": ("a.txt", b"12")}
            fields = {"source": "en", "target": "de", **more}
            answer = client.post("/translate_file", data=fields, files=upload)
            assert answer.status_code == status
            if status == 200:
                assert client.get(answer.json()["translatedFileUrl"]).text == "12"
            else:
                assert "key" in answer.json()["error"]
        assert LibreTranslateAPI(url, "right").translate("12", "en", "de") == "12"
        assert client.get("/languages").status_code == 200
        assert client.get("/frontend/settings").json()["keyRequired"] is True


def test_a_server_without_translators(settings, models):
    alone = dataclasses.replace(settings, models=(("kjv-gpt2", servers.GPT2),), languages={})
    with servers.in_thread(create_app(alone, servers.SharedModels([models.get("kjv-gpt2")]))) as url:
        assert httpx.get(f"{url}/languages").json() == []
        for path, body in (("/translate", GOOD), ("/translate", {**GOOD, "source": "auto"}), ("/detect", {"q": "a b"})):
            answer = httpx.post(f"{url}{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert "/languages" in answer.json()["error"]
        assert httpx.get(f"{url}/frontend/settings").status_code == 200


async def test_models_are_looked_at_in_a_thread_before_the_first_request(monkeypatch):
    made: list[bool] = []

    class Translator:
        def __init__(self, models: Models, settings: ServeSettings) -> None:
            made.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(libretranslate, "Translator", Translator)
    app = create_app(ServeSettings(), Models([]))
    async with app.router.lifespan_context(app):
        assert made == [False]
    assert made == [False]


def test_texts_of_one_request_have_so_many_pieces_together():
    half = "Yes. " * 30_000
    assert len(libretranslate._cut([half, ""], sentences.cut)[0]) == 60_000
    with pytest.raises(BadRequest, match="100000 pieces"):
        libretranslate._cut([half, half], sentences.cut)
