"""Chats with images: what `generate` makes of the processor's inputs, within limits that are checked before."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import fastgen
from fastgen import releases
from fastgen_serve import images, limits
from fastgen_serve.api import prompts
from fastgen_serve.app import create_app
from fastgen_serve.errors import BadRequest, Busy
from fastgen_serve.jobs import Generate
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import loading
from fastgen_serve.workers.local import LocalModel
from tests.pipeline import tiny
from tests.serve.servers import GPT2, WAIT, in_thread, until

RED, BLUE, WIDE = ((24, 24), (255, 0, 0)), ((24, 24), (0, 0, 255)), ((48, 16), (90, 200, 10))
TEXT = "let there be light"
Picture = tuple[tuple[int, int], tuple[int, int, int]]
TOKENS = 10


def uri(picture: Picture, kind: str = "PNG", mode: str = "RGB") -> str:
    written = io.BytesIO()
    Image.new("RGB", *picture).convert(mode).save(written, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(written.getvalue()).decode()}"


def user(*contents: str | Picture) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": uri(each), "detail": "low"}}
        for each in contents
    ]
    return {"role": "user", "content": parts}


def librarys(*contents: str | Picture) -> list[dict[str, Any]]:
    """The parts of a message, as the library's processors take them."""
    return [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": Image.new("RGB", *each)}
        for each in contents
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.pictures(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def settings(folder: str) -> ServeSettings:
    return ServeSettings(
        models=(("llava", folder), ("gpt2", GPT2)), warm_up=False, max_tokens=200, max_images=3, cache="1MiB",
        max_image_bytes=100_000, max_image_pixels=40_000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(settings: ServeSettings, models: Models) -> Iterator[str]:
    app = create_app(settings, models)
    with in_thread(app) as address:
        until(lambda: all(model._identity for model in app.state.models))
        yield address


@cache
def loaded(folder: str) -> tuple[Any, Any]:
    return AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


def expected(folder: str, *contents: str | Picture, seed: int | None = None, **options: Any) -> tuple[list[str], int]:
    """What the library's `generate` writes, and the tokens of the prompt."""
    model, processor = loaded(folder)
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": librarys(*contents)}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    if seed is not None:
        torch.manual_seed(seed)
    with fastgen.disabled():
        found = model.generate(**inputs, **{"max_new_tokens": TOKENS, **options})
    length = inputs["input_ids"].shape[1]
    return processor.tokenizer.batch_decode(found[:, length:], skip_special_tokens=True), length


def ask(client: OpenAI, *contents: str | Picture, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "llava", "messages": [user(*contents)], "max_tokens": TOKENS, **fields}
    )


CHATS: list[tuple[str | Picture, ...]] = [(RED, TEXT), (TEXT, BLUE), (RED, TEXT, BLUE), (BLUE, WIDE, RED), (TEXT,)]


@pytest.mark.parametrize("contents", CHATS, ids=range(len(CHATS)))
def test_an_answer_is_what_generate_makes_of_the_processors_inputs(
    client: OpenAI, folder: str, contents: tuple[str | Picture, ...]
) -> None:
    (text,), length = expected(folder, *contents)
    answer = ask(client, *contents)
    assert answer.choices[0].message.content == text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, TOKENS)
    chunks = list(ask(client, *contents, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == answer.usage


def test_images_of_responses(client: OpenAI) -> None:
    """The same answer as that of a chat."""
    url = uri(RED)
    parts = [{"type": "input_text", "text": "what is"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    answer = client.responses.create(
        model="llava", temperature=0, max_output_tokens=8, input=[{"role": "user", "content": parts}]
    )
    chat = ask(client, "what is", RED, temperature=0, max_tokens=8)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    parts[1]["image_url"] = "https://example.org/a.png"
    with pytest.raises(openai.BadRequestError, match="data:") as refused:
        client.responses.create(model="llava", input=[{"role": "user", "content": parts}])
    assert refused.value.param == "input"


def test_few_requests_with_images_are_read_at_a_time_and_keep_no_text_waiting(
    client: OpenAI, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, reading, may_end, most = images.decoded, list[int](), threading.Event(), images.AT_ONCE

    def slowly(*given: Any) -> Any:
        reading.append(1)
        assert may_end.wait(WAIT)
        return decoded(*given)

    monkeypatch.setattr(images, "decoded", slowly)
    with ThreadPoolExecutor(most + 1) as pool:
        found = [pool.submit(ask, client, RED, TEXT, max_tokens=2) for _ in range(most + 1)]
        try:
            until(lambda: models.get("llava")._admission.rows == most + 1)  # they wait, as others do
            until(lambda: len(reading) == most)
            assert ask(client, TEXT, max_tokens=2, timeout=60).choices
            assert len(reading) == most
        finally:
            may_end.set()
        assert all(each.result().choices for each in found)
    assert models.get("llava")._admission.rows == 0


def test_an_overloaded_server_reads_no_images(client: OpenAI, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "decoded", lambda *given: 1 / 0)
    with models.get("llava").reserve(10_000), pytest.raises(openai.RateLimitError) as refused:
        ask(client, RED, TEXT)
    assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_what_a_model_writes_depends_on_the_image(folder: str) -> None:
    texts = [expected(folder, *contents)[0] for contents in ((RED, TEXT), (BLUE, TEXT), (RED, BLUE), (BLUE, RED))]
    assert len(set(map(tuple, texts))) == 4


def test_options_of_chats_with_images(client: OpenAI, folder: str) -> None:
    def written(**fields: Any) -> list[str]:
        return [choice.message.content for choice in ask(client, RED, TEXT, **fields).choices]

    beams = {"extra_body": {"num_beams": 3}}
    assert written(n=2, **beams) == expected(folder, RED, TEXT, num_beams=3, num_return_sequences=2)[0]
    drawn = {"do_sample": True, "top_k": 0, "temperature": 0.8}
    assert written(temperature=0.8, seed=4) == expected(folder, RED, TEXT, seed=4, **drawn)[0]
    several = expected(folder, RED, TEXT, seed=4, num_return_sequences=3, **drawn)[0]
    assert written(temperature=0.8, seed=4, n=3) == several
    (text,), _ = expected(folder, RED, TEXT)
    stop = text[3:5]
    assert written(stop=stop) == [text[: text.index(stop)]]
    answer = ask(client, RED, TEXT, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) == TOKENS


def test_several_sequences_of_several_images(client: OpenAI, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if releases.repeats_images_together():
        beams, best = {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}
        found = ask(client, RED, BLUE, n=2, extra_body=beams).choices
        assert [choice.message.content for choice in found] == expected(folder, RED, BLUE, **best)[0]
    monkeypatch.setattr(releases, "repeats_images_together", lambda: False)
    with pytest.raises(openai.BadRequestError, match="one sequence for several images"):
        ask(client, RED, BLUE, n=2, temperature=1)
    assert ask(client, RED, n=2, temperature=1).choices


def test_forms_of_an_image(client: OpenAI, folder: str) -> None:
    (text,), _ = expected(folder, RED, TEXT)

    def answer(image: Any) -> str:
        parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": TEXT}]
        made = client.chat.completions.create(
            model="llava", messages=[{"role": "user", "content": parts}], max_tokens=TOKENS
        )
        return made.choices[0].message.content

    assert answer(uri(RED)) == text
    for image in ({"url": uri(RED, "GIF", "P")}, {"url": uri(RED, "PNG", "RGBA"), "detail": "high"}):
        assert answer(image) == text
    for kind in ("JPEG", "WEBP"):
        assert answer({"url": uri(RED, kind)})


def test_a_conversation_with_images(client: OpenAI, folder: str, url: str) -> None:
    messages = [user(RED, "what is it"), {"role": "assistant", "content": "light"}, user("and this", BLUE)]
    _, processor = loaded(folder)
    parts = librarys(RED, "what is it"), librarys("light"), librarys("and this", BLUE)
    said = [{"role": each["role"], "content": part} for each, part in zip(messages, parts, strict=True)]
    ids = processor.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    fields = {"extra_body": {"return_token_ids": True}}
    answer = client.chat.completions.create(model="llava", messages=messages, max_tokens=2, **fields)
    assert answer.prompt_token_ids == ids[0]
    assert httpx.post(f"{url}/tokenize", json={"model": "llava", "messages": messages}).json()["tokens"] == ids[0]


def test_images_are_not_mixed_up_under_load_and_are_not_cached(
    client: OpenAI, folder: str, lookups: Any, models: Models
) -> None:
    answers = {contents: expected(folder, *contents)[0] for contents in CHATS}
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda contents: ask(client, *contents), CHATS * 3))
        assert [[each.choices[0].message.content] for each in found] == [answers[contents] for contents in CHATS * 3]
    assert lookups()["hit"] + lookups()["miss"] == 2 * 3, "those of text are looked up"
    llava = models.get("llava")
    assert llava._held.bytes == 0
    stats = llava._worker.stats()
    assert (stats["executor"], stats["alone"], stats["failed"]) == ("slots", {}, 0), "images enter slots, too"


REFUSED: list[tuple[str | dict[str, Any], str]] = [
    ("http://127.0.0.1:1/image.png", "image 1 is no data: URI .* fetches nothing"),
    ("https://example.org/image.png", "fetches nothing"),
    ("file:///etc/passwd", "fetches nothing"),
    ("/etc/passwd", "fetches nothing"),
    ("data:image/png,abc", "is no data: URI"),
    ("data:image/png;base64,@@@@", "image 1 cannot be read: .* PNG, JPEG, WEBP, GIF"),
    ("data:image/png;base64," + base64.b64encode(b"no image at all").decode(), "cannot be read"),
    ("data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(), "cannot"),
    (uri(RED, "BMP"), "cannot be read"),
    (uri(RED, "TIFF"), "cannot be read"),
    (uri(((201, 200), (1, 2, 3))), "40200 pixels together: this server takes 40000"),
    (uri(((410, 20), (1, 2, 3))), "one side is 20 times the other"),
    ("data:image/png;base64," + "A" * 140_000, "image 1 has more than 100000 bytes"),
    (uri(RED)[:-40], "cannot be read"),
]


@pytest.mark.parametrize(("image", "said"), REFUSED, ids=range(len(REFUSED)))
def test_images_that_are_refused(client: OpenAI, image: str, said: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": image}}]
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.chat.completions.create(model="llava", messages=[{"role": "user", "content": parts}], max_tokens=2)
    assert refused.value.param == "messages"


def test_requests_that_are_refused(client: OpenAI) -> None:
    for contents, fields, said in (
        ((RED,) * 4, {}, "the request has 4 images: this server takes 3"),
        ((RED, "an <image> of light"), {}, "a text has <image>, which stands for an image"),
        (("an <image> of light",), {}, "a text has <image>"),
        (("an <ima", RED, "ge> of light"), {}, "a text has <image>"),
        ((RED, TEXT), {"model": "gpt2"}, "gpt2 takes text only"),
        ((RED, TEXT), {"extra_body": {"truncate_prompt_tokens": 4}}, "truncate_prompt_tokens"),
        ((RED, TEXT), {"extra_body": {"chat_template_kwargs": {"images": "/etc/passwd"}}}, None),
        ((RED, TEXT * 30), {}, "maximum context length is 256"),
    ):
        if said is None:
            assert ask(client, *contents, **fields).choices
            continue
        with pytest.raises(openai.BadRequestError, match=said):
            ask(client, *contents, **fields)


def test_placeholders_that_do_not_fit_are_a_mistake_of_the_request(
    models: Models, settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    llava = models.get("llava")
    given = prompts.Chat([{"role": "user", "content": [{"type": "image"}]}], [uri(RED)], settings)
    monkeypatch.setattr(llava.tokenizer, "chat_template", "<image> and <image>")
    with pytest.raises(BadRequest, match="the model's processor refuses the images: .*2 <image> tokens"):
        asyncio.run(prompts.chat_inputs(llava, given, prompts.Templating(), prompts.Cutting()))


def test_what_is_too_large_takes_no_memory(settings: ServeSettings) -> None:
    for kind in ("PNG", "WEBP"):
        large = uri(((2000, 2000), (1, 2, 3)), kind)
        tracemalloc.start()
        with pytest.raises(BadRequest, match="4000000 pixels"):
            images.decoded([large], settings)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()


def test_a_long_address_takes_no_time(settings: ServeSettings) -> None:
    """Neither do its ways to be cut in two, of which there are as many as the square of its length."""
    begin = time.perf_counter()
    with pytest.raises(BadRequest, match="is no data: URI"):
        images.decoded(["data:" + "a" * 40_000], settings)
    assert time.perf_counter() - begin < 1


def test_a_jpeg_of_many_scans(settings: ServeSettings) -> None:
    scans = base64.b64encode(base64.b64decode(uri(RED, "JPEG").partition(",")[2]) + b"\xff\xda" * 101).decode()
    with pytest.raises(BadRequest, match="cannot be read"):
        images.decoded([f"data:image/jpeg;base64,{scans}"], settings)


def test_room_for_images() -> None:
    held = limits.Held(10, "images")
    with held.hold(20), held.hold(0), pytest.raises(Busy, match="images of other requests"), held.hold(1):
        raise AssertionError("it is refused before")
    with pytest.raises(LookupError), held.hold(4), held.hold(6):
        assert held.bytes == 10
        raise LookupError("as where a client leaves")
    assert held.bytes == 0


def test_a_processor_that_cannot_be_loaded(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "processor_config.json").write_text("{")
    found, reason = loading.read_processor(str(tmp_path))
    assert found is None and "log says why" in reason and "cannot be loaded" in caplog.text
    assert loading.read_processor(GPT2) == (None, "takes text only")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "PIL", None)
        assert loading.read_processor(folder)[0] is None and "pip install pillow" in caplog.text


@pytest.mark.usefixtures("forks")
def test_a_model_in_a_process_of_its_own(folder: str) -> None:
    (text,), length = expected(folder, RED, TEXT)
    app = create_app(ServeSettings(models=(("llava", folder),), warm_up=False, max_images=1))
    with in_thread(app) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        until(lambda: app.state.models.get("llava").is_ready)
        answer = ask(client, RED, TEXT)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, length)
        (text,), _ = expected(folder, TEXT)
        assert ask(client, TEXT).choices[0].message.content == text
        with pytest.raises(openai.BadRequestError, match="has 2 images: this server takes 1"):
            ask(client, RED, BLUE)


def test_a_model_in_16_bits(folder: str) -> None:
    settings = ServeSettings(models=(("llava", folder),), dtype="bf16", warm_up=False)
    model, processor = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16), loaded(folder)[1]
    inputs = processor(text="<image> light", images=[Image.new("RGB", *RED)], return_tensors="pt")
    served = LocalModel("llava", settings)
    given = {name: value.numpy() for name, value in inputs.items()}
    tokens = tuple(given.pop("input_ids")[0].tolist())
    found = asyncio.run(served.generate(Generate(tokens, {"max_new_tokens": 4}, inputs=given)))
    served.close()
    with fastgen.disabled():
        whole = model.generate(**inputs.to(torch.bfloat16), max_new_tokens=4)[0].tolist()
    assert list(found.sequences[0].tokens) == whole[len(tokens) :]
