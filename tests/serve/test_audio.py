"""What is said in recordings: what `generate` makes of them, in all forms, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from openai import OpenAI

from fastgen.pipeline.errors import SetupError
from fastgen_serve import audio, metrics
from fastgen_serve.api import audio as interface
from fastgen_serve.api.audio_schema import TranscriptionSegment
from fastgen_serve.app import create_app
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import loading
from tests.pipeline import tiny
from tests.serve import recordings
from tests.serve.recordings import HOSTILE, KINDS, RATE, lossless, sound
from tests.serve.servers import GPT2, WAIT, SharedModels, command, in_thread, until

MOST_BYTES, MOST_SECONDS = 3_000_000, 20
# Those of two seconds have one window, the others several.
SHORT, LONG = sound(1.5, 2), sound(5, 3)
SEGMENTS = [
    TranscriptionSegment(id=0, start=0.0, end=2.5, text=" Let there be light:", tokens=[1]),
    TranscriptionSegment(id=1, start=2.5, end=2.5, text=" ", tokens=[2]),
    TranscriptionSegment(id=2, start=3661.0625, end=3725.9996, text=" and there\n\nwas --> light.", tokens=[3]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kinds = {"whisper": {}, "english": {"languages": ()}}
    made = {name: str(tiny.whisper(tmp_path_factory.mktemp(name), **options)) for name, options in kinds.items()}
    made |= {kind.__name__: str(kind(tmp_path_factory.mktemp(kind.__name__))) for kind in KINDS}
    return {**made, "gpt2": GPT2}


@pytest.fixture(scope="module")
def settings(folders: dict[str, str]) -> ServeSettings:
    return ServeSettings(
        models=tuple(folders.items()), warm_up=False, max_audio_bytes=MOST_BYTES, max_audio_seconds=MOST_SECONDS
    )


def say(client: OpenAI, samples: Any = SHORT, model: str = "whisper", data: bytes | None = None, **fields: Any) -> Any:
    """What OpenAI's client gets for a recording. Fields that it does not know go into `extra_body`."""
    known = {"language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"}
    own = {name: fields.pop(name) for name in list(fields) if name not in known}
    given = ("recording.wav", lossless(samples) if data is None else data)
    return client.audio.transcriptions.create(model=model, file=given, extra_body=own or None, **fields)


def refusal(error: openai.APIStatusError) -> tuple[int, str | None, str]:
    body: Any = error.body
    assert body["message"] and "\n" not in body["message"]
    return error.status_code, body["param"], body["message"]


# ---- what is said


THRESHOLDS = {"logprob_threshold": -0.5, "compression_ratio_threshold": 2.4, "seed": 3}


@pytest.mark.parametrize(
    ("samples", "fields", "options"),
    [
        (SHORT, {}, {}),
        (LONG, {}, {}),
        (SHORT, {"language": "de"}, {"language": "de"}),
        (LONG, {"language": "French"}, {"language": "fr"}),
        (SHORT, {"prompt": "let there be light"}, {"prompt_ids": "let there be light"}),
        (LONG, {"prompt": "let there be light"}, {"prompt_ids": "let there be light"}),
        (SHORT, {"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 5}),
        (LONG, {**THRESHOLDS, "temperature": 0.5}, {**THRESHOLDS, "temperature": (0.5, 0.7, 0.9)}),
    ],
)
def test_a_text_is_that_of_generate(
    client: OpenAI, folders: dict[str, str], samples: Any, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    if "prompt_ids" in options:
        tokens = recordings.loaded(folders["whisper"])[2].get_prompt_ids(options["prompt_ids"])
        options = {"prompt_ids": torch.from_numpy(tokens)}
    expected = recordings.text(folders["whisper"], samples, task="transcribe", **options)
    found = say(client, samples, **fields)
    assert found.text == expected and expected
    assert found.usage.seconds == -(-len(samples) // RATE)


def test_options_change_the_text(client: OpenAI) -> None:
    several = ({}, {"language": "de"}, {"language": "fr"}, {"prompt": "light"}, {"temperature": 0.7, "seed": 5})
    assert len({say(client, LONG, **fields).text for fields in several}) == len(several)


def test_a_translation(client: OpenAI, folders: dict[str, str]) -> None:
    given = ("a.wav", lossless(LONG))
    expected = recordings.text(folders["whisper"], LONG, task="translate")
    assert client.audio.translations.create(model="whisper", file=given).text == expected
    found: Any = client.audio.translations.create(model="whisper", file=given, response_format="verbose_json")
    assert (found.text, found.language, found.duration, found.task) == (expected, "english", 5.0, "translate")


def test_a_model_for_english_alone(client: OpenAI, folders: dict[str, str]) -> None:
    expected = recordings.text(folders["english"], SHORT)
    for language in ("en", "de", "no language"):
        assert say(client, model="english", language=language).text == expected
    assert say(client, model="english", response_format="verbose_json").language == "english"
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(model="english", file=("a.wav", lossless(SHORT)))


@pytest.mark.parametrize("name", ["moonshine", "speech2text"])
def test_a_model_that_reads_all_at_once(client: OpenAI, folders: dict[str, str], name: str) -> None:
    assert say(client, model=name).text == recordings.text(folders[name], SHORT)
    drawn = recordings.text(folders[name], SHORT, seed=3, do_sample=True, temperature=0.5)
    assert say(client, model=name, temperature=0.5, seed=3).text == drawn
    for fields in ({"language": "en"}, {"prompt": "a"}, {"response_format": "srt"}, {"logprob_threshold": "-1"}):
        with pytest.raises(openai.BadRequestError) as refused:
            say(client, model=name, **fields)
        assert refusal(refused.value)[:2] == (400, next(iter(fields)))


def test_requests_of_several_clients_are_in_the_engine_together(
    client: OpenAI, models: Models, folders: dict[str, str]
) -> None:
    engine: Any = models.get("whisper")._worker._runner._engine  # type: ignore[attr-defined]
    expected = [recordings.text(folders["whisper"], sound(1, seed), task="transcribe") for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        with engine.paused():
            asked = [threads.submit(say, client, sound(1, seed)) for seed in range(3)]
            until(lambda: engine.stats()["waiting"] == 3)
        assert [each.result().text for each in asked] == expected


# ---- forms


def test_segments(client: OpenAI, folders: dict[str, str]) -> None:
    made = recordings.generated(
        folders["whisper"], LONG, task="transcribe", return_timestamps=True, return_segments=True
    )
    decode = recordings.loaded(folders["whisper"])[2].decode
    found = say(client, LONG, response_format="verbose_json", timestamp_granularities=["segment"])
    assert found.text == decode(made["sequences"][0], skip_special_tokens=True).strip()
    assert (found.duration, found.task) == (5.0, "transcribe")
    assert found.language == {"en": "english", "de": "german", "fr": "french"}[heard(folders["whisper"], LONG)]
    assert len(found.segments) == len(made["segments"][0]) > 2
    for number, (segment, own) in enumerate(zip(found.segments, made["segments"][0], strict=True)):
        assert (segment.id, segment.tokens) == (number, own["tokens"].tolist())
        assert segment.text == decode(own["tokens"], skip_special_tokens=True)
        assert segment.start == pytest.approx(min(float(own["start"]), 5.0))
        assert segment.end == pytest.approx(min(float(own["end"]), 5.0))
    assert segment.model_fields_set == {"id", "start", "end", "text", "tokens"}, "nothing is made up"
    assert say(client, LONG, response_format="verbose_json", language="fr").language == "french"


def heard(folder: str, samples: Any) -> str:
    """The code of the language that the model finds."""
    model, extractor, tokenizer = recordings.loaded(folder)
    features = extractor(samples[: 2 * RATE], sampling_rate=RATE, return_tensors="pt")
    (token,) = model.detect_language(features.input_features).tolist()
    return str(tokenizer.decode([token]).strip("<|>"))


def test_thresholds_keep_the_segments(client: OpenAI) -> None:
    found = say(client, LONG, response_format="verbose_json", logprob_threshold=-9, no_speech_threshold=0.9)
    assert found.segments and found.language in ("english", "german", "french")
    silent = say(client, LONG, response_format="verbose_json", logprob_threshold=0, no_speech_threshold=-1)
    assert (silent.text, silent.segments, silent.language) == ("", [], "unknown")


def test_subtitles() -> None:
    assert interface.srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,500\nLet there be light:\n\n"
        "2\n01:01:01,062 --> 01:02:06,000\nand there was -> light.\n\n"
    )
    assert interface.vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nLet there be light:\n\n"
        "01:01:01.062 --> 01:02:06.000\nand there was -> light.\n\n"
    )
    assert (interface.srt([]), interface.vtt([])) == ("", "WEBVTT\n\n")


def test_forms_of_an_answer(http: httpx.Client, folders: dict[str, str]) -> None:
    def answer(form: str) -> httpx.Response:
        given = {"file": ("a.wav", lossless(LONG))}
        return http.post("/v1/audio/transcriptions", files=given, data={"model": "whisper", "response_format": form})

    expected = recordings.text(folders["whisper"], LONG, task="transcribe")
    assert answer("json").json() == {"text": expected, "usage": {"type": "duration", "seconds": 5}}
    verbose = answer("verbose_json").json()
    assert list(verbose) == ["task", "language", "duration", "text", "segments", "usage"]
    segments = [TranscriptionSegment(**each) for each in verbose["segments"]]
    for form, written in (
        ("text", expected + "\n"), ("srt", interface.srt(segments)), ("vtt", interface.vtt(segments)),
    ):  # fmt: skip
        found = answer(form)
        assert found.text == written and found.headers["Content-Type"] == "text/plain; charset=utf-8"


# ---- files


def test_a_hostile_file(client: OpenAI) -> None:
    """Others are in test_audio_files.py."""
    with pytest.raises(openai.BadRequestError) as refused:
        say(client, data=HOSTILE["flac damaged"]())
    assert refusal(refused.value)[:2] == (400, "file")
    assert say(client).text


# ---- requests that are refused


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities", "words"),
        ({"timestamp_granularities[]": ["word", "segment"]}, "timestamp_granularities", "words"),
        ({"timestamp_granularities[]": "segment"}, None, "ask for that"),
        ({"stream": "true"}, "stream", "not supported"),
        ({"response_format": "diarized_json"}, "response_format", "verbose_json"),
        ({"language": "klingon"}, "language", "de, en, fr"),
        ({"language": "ja"}, "language", "de, en, fr"),
        ({"prompt": "<|endoftext|>"}, "prompt", "special token"),
        ({"prompt": "a" * 40_000}, None, "maximum size"),
        ({"temperature": "2"}, "temperature", "less than or equal to 1"),
        ({"temperature": "nan"}, "temperature", "number"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"no_speech_threshold": "0.5"}, None, "logprob_threshold"),
        ({"keywords[]": "light"}, "keywords", "not supported"),
        ({"max_tokens": "5"}, "max_tokens", "not known"),
        ({"model": "gpt2"}, "model", "is one for generate"),
        ({"language": ["de", "fr"]}, "language", "string"),
    ],
    ids=str,
)
def test_fields_that_are_refused(http: httpx.Client, fields: dict[str, Any], param: str | None, said: str) -> None:
    given = {"model": "whisper", **fields}
    answer = http.post("/v1/audio/transcriptions", files={"file": ("a.wav", lossless(SHORT))}, data=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and said in error["message"], error


def test_fields_that_ask_for_nothing(http: httpx.Client) -> None:
    fields = {"language": "", "prompt": "", "stream": "false", "chunking_strategy": "auto", "temperature": "0"}
    given = {"file": ("a.wav", lossless(SHORT))}
    answers = [http.post("/v1/audio/transcriptions", files=given, data=each).json() for each in ({}, fields)]
    assert answers[0] == answers[1] and answers[0]["text"], "the first model is the one that transcribes"


def test_bodies_that_are_no_forms(http: httpx.Client) -> None:
    path = "/v1/audio/transcriptions"
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    for answer, said in (
        (http.post(path, json={"file": "a"}), "multipart/form-data"),
        (http.post(path, data={"model": "whisper"}), "multipart/form-data"),
        (http.post(path, files={"model": (None, "whisper")}), "file"),
        (http.post(path, files={"file": (None, "text")}), "is no file"),
        (http.post(path, files=[("file", ("a", b"a")), ("file", ("b", b"b"))]), "Too many files"),
        (http.post(path, content=b"nothing", headers={"Content-Type": "multipart/form-data"}), "boundary"),
        (http.post(path, content=b"no part", headers=boundary), ""),
    ):
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and said in message and "\n" not in message, message


def test_models_that_do_not_transcribe(client: OpenAI, http: httpx.Client, models: Models) -> None:
    with pytest.raises(openai.NotFoundError, match="'none' is not served"):
        say(client, model="none")
    answer = http.post("/v1/completions", json={"model": "whisper", "prompt": "light"})
    assert answer.status_code == 400 and "is one for transcribe" in answer.json()["error"]["message"]
    alone = ServeSettings(models=(("gpt2", GPT2),))
    with in_thread(create_app(alone, SharedModels([models.get("gpt2")]))) as url:
        answer = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", lossless(SHORT))})
        assert answer.status_code == 404 and answer.json()["error"]["message"] == "no model that is served transcribes"


# ---- how much


def test_files_that_are_too_large(http: httpx.Client, client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="the file has more than 3000000 bytes") as refused:
        say(client, data=bytes(MOST_BYTES + 1))
    assert refusal(refused.value)[:2] == (413, "file")
    with pytest.raises(openai.APIStatusError, match="the body has more than") as refused:
        say(client, data=bytes(MOST_BYTES + 100_000))
    assert refused.value.status_code == 413
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    chunks = (head if number == 0 else bytes(100_000) for number in range(60))  # without a length
    answer = http.post("/v1/audio/transcriptions", content=chunks, headers=kind)
    assert answer.status_code == 413
    answer = http.post("/v1/completions", content=bytes(5 * 2**20))  # others are as long as they were
    assert answer.status_code == 413 and "4194304 bytes" in answer.json()["error"]["message"]


def test_an_overloaded_server_reads_no_bodies(client: OpenAI, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(request: Any) -> Any:
        raise AssertionError("it is read")

    monkeypatch.setattr(interface, "_read", read)
    with ExitStack() as busy:
        for model in models:
            busy.enter_context(model.reserve(10_000))
        with pytest.raises(openai.RateLimitError) as refused:
            say(client)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
    with pytest.raises(openai.InternalServerError, match="the server has failed"):
        say(client)


def test_room_for_uploads(client: OpenAI, models: Models, settings: ServeSettings) -> None:
    app = create_app(settings, SharedModels(list(models)))
    with in_thread(app) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
        assert say(other).text
        held = app.state.uploads
        assert held.bytes == 0
        with held.hold(2**30), pytest.raises(openai.RateLimitError, match="uploads of other requests"):
            say(other)
    held = models.get("whisper")._held  # type: ignore[attr-defined]
    with held.hold(2**30), pytest.raises(openai.RateLimitError, match="recordings of other requests"):
        say(client)


def test_recordings_of_two_requests_are_read_at_a_time(
    client: OpenAI, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, reading, decoded = threading.Event(), [], audio.decoded

    def read(*given: Any) -> Any:
        reading.append(given)
        assert may_end.wait(WAIT)
        return decoded(*given)

    monkeypatch.setattr(audio, "decoded", read)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(say, client) for _ in range(4)]
        try:
            until(lambda: models.get("whisper")._admission.rows == 4)  # type: ignore[attr-defined]
            until(lambda: len(reading) == 2)
            assert audio.AT_ONCE == 2, "so the others do not come to be read"
        finally:
            may_end.set()
        assert all(each.result().text for each in asked)
    assert models.get("whisper")._admission.rows == 0  # type: ignore[attr-defined]


# ---- around it


def test_keys_models_and_metrics(models: Models, folders: dict[str, str]) -> None:
    settings = ServeSettings(models=tuple(folders.items()), api_keys=("secret",))
    with in_thread(create_app(settings, SharedModels(list(models)))) as url:
        with OpenAI(base_url=f"{url}/v1", api_key="another") as client, pytest.raises(openai.AuthenticationError):
            say(client)
        with OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            count: Callable[[str], float] = lambda name: metrics.REGISTRY.get_sample_value(*NUMBERS[name]) or 0  # noqa: E731
            before = {name: count(name) for name in NUMBERS}
            assert {each.id for each in client.models.list()} == set(folders)
            assert say(client).text
            assert all(count(name) > before[name] for name in NUMBERS), before


NUMBERS: dict[str, tuple[str, dict[str, str]]] = {
    "jobs": ("fastgen_jobs_total", {"model": "whisper", "outcome": "finished"}),
    "tokens": ("fastgen_tokens_total", {"model": "whisper", "kind": "generated"}),
    "requests": ("fastgen_requests_total", {"path": "/v1/audio/transcriptions", "status": "200"}),
}


def test_a_package_that_is_missing(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(SetupError, match=r"needs the package soxr.*\[serve\]"):
        loading.read_feature_extractor(folders["whisper"])
    assert loading.read_feature_extractor(GPT2) is None


def test_the_command(enabled: None, folders: dict[str, str]) -> None:
    """The model is in a process of its own, and warmed up. It ends with the server, however that ends."""
    expected = recordings.text(folders["whisper"], LONG, task="transcribe")
    with command(f"whisper={folders['whisper']}", "--max-audio-seconds", "6", "--slots", "2") as served:
        served.wait_until_ready()
        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            assert say(client, LONG).text == expected
            with pytest.raises(openai.BadRequestError, match="longer than 6 s"):
                say(client, sound(7))
            assert say(client, LONG, response_format="srt").startswith("1\n00:00:")
        lines = [json.loads(line) for line in served.lines if line.startswith("{")]
        (line,) = [each for each in lines if each["path"].startswith("/v1/audio") and each["status"] == 200][:1]
        assert line["model"] == "whisper" and line["audio_s"] == 5.0 and line["tokens"] > 0
        assert expected not in "\n".join(served.lines)
        assert "Traceback" not in "\n".join(served.lines)
        children = psutil.Process(served.process.pid).children(recursive=True)
        served.process.kill()
        assert children and not psutil.wait_procs(children, WAIT)[1], "they end with the server"
