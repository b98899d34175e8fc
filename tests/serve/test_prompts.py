"""From texts to tokens: languages, cuts, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import NllbTokenizer

from fastgen_serve.api import prompts
from fastgen_serve.api.openai_schema import Cutting, Templating
from fastgen_serve.errors import BadRequest, TooLong
from fastgen_serve.jobs import ModelInfo
from fastgen_serve.settings import ServeSettings
from tests.pipeline import tiny


def served(tokenizer: Any, kind: str = "encoder-decoder", **info: Any) -> Any:
    made = ModelInfo("m", kind, ("generate",), **{"positions": 8, **info})
    return SimpleNamespace(name="m", tokenizer=tokenizer, processor=None, info=made)


@pytest.fixture
def nllb() -> Any:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b", "▁", "a", "b"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return served(NllbTokenizer(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")]))


def test_a_source_is_marked_with_its_language(nllb: Any) -> None:
    def written(text: str) -> list[str]:
        return nllb.tokenizer.convert_ids_to_tokens(prompts.tokens_of(nllb, text, Cutting(), "prompt"))

    before = written("a b")
    with prompts.source_language(nllb, "deu_Latn"):
        assert written("a b") == ["deu_Latn", "▁a", "▁b", "</s>"]
    assert written("a b") == before == ["eng_Latn", "▁a", "▁b", "</s>"]
    with prompts.source_language(nllb, None):
        assert written("a b") == before


def test_the_token_of_a_language(nllb: Any) -> None:
    assert nllb.tokenizer.convert_ids_to_tokens(prompts.language_token(nllb, "fra_Latn", "tgt_lang")) == "fra_Latn"
    for language in ("fra", "▁a", "<s>"):
        with pytest.raises(BadRequest, match="tgt_lang is no language of m: it has ace_Arab") as refused:
            prompts.language_token(nllb, language, "tgt_lang")
        assert refused.value.param == "tgt_lang"
    with pytest.raises(BadRequest, match="src_lang"), prompts.source_language(nllb, "fra"):
        raise AssertionError("it is refused before")
    with pytest.raises(BadRequest, match="leave tgt_lang out"):
        prompts.language_token(served(tiny.tokenizer(True)), "deu_Latn", "tgt_lang")


TEXT = "in the beginning god created"


@pytest.mark.parametrize(
    ("kind", "cut", "left"),
    [
        ("decoder-only", Cutting(truncate_prompt_tokens=2), [-2, -1]),
        ("decoder-only", Cutting(truncate_prompt_tokens=2, truncation_side="right"), [0, 1]),
        ("encoder-decoder", Cutting(truncate_prompt_tokens=2), [0, 1]),
        ("encoder-decoder", Cutting(truncate_prompt_tokens=2, truncation_side="left"), [-2, -1]),
        ("encoder-decoder", Cutting(truncate_prompt_tokens=100), None),
        ("encoder-decoder", Cutting(), None),
    ],
)
def test_cuts(kind: str, cut: Cutting, left: list[int] | None) -> None:
    tokenizer = tiny.tokenizer(False)
    ids = tokenizer(TEXT)["input_ids"]
    expected = tuple(ids if left is None else [ids[index] for index in left])
    for prompt in (TEXT, ids):
        assert prompts.tokens_of(served(tokenizer, kind), prompt, cut, "prompt") == expected
    assert tokenizer.truncation_side == "right" and tuple(tokenizer(TEXT)["input_ids"]) == tuple(ids)


def test_special_tokens_stay_when_a_text_is_cut() -> None:
    tokenizer = tiny.tokenizer(True)
    ids = tokenizer(TEXT)["input_ids"]
    model = served(tokenizer)
    assert prompts.tokens_of(model, TEXT, Cutting(truncate_prompt_tokens=4), "prompt") == (*ids[:3], ids[-1])
    assert prompts.tokens_of(model, TEXT, Cutting(add_special_tokens=False), "prompt") == tuple(ids[1:-1])
    with pytest.raises(BadRequest, match="give 3 or more"):
        prompts.tokens_of(model, TEXT, Cutting(truncate_prompt_tokens=2), "prompt")


def test_as_many_tokens_as_the_model_reads() -> None:
    tokenizer, long, cut = tiny.tokenizer(False), [5] * 20, Cutting(truncate_prompt_tokens=-1)
    assert len(prompts.tokens_of(served(tokenizer, "decoder-only"), long, cut, "prompt", room=3)) == 5
    assert len(prompts.tokens_of(served(tokenizer), long, cut, "prompt", room=3)) == 8
    endless = served(tokenizer, positions=None)
    assert len(prompts.tokens_of(endless, long, cut, "prompt", room=3)) == 20
    prompts.check_length(endless, 10**6, 10**6, "prompt")
    prompts.check_length(served(tokenizer), 5, 3, "prompt")
    with pytest.raises(
        TooLong, match=r"8 tokens. However, you requested 9 tokens \(5 in the messages, 4 in the completion"
    ):
        prompts.check_length(served(tokenizer), 5, 4, "messages")


def test_lower_case_where_the_models_files_say_so() -> None:
    tokenizer = tiny.tokenizer(False)
    lower = prompts.tokens_of(served(tokenizer, lower_case=True), "God SAW", Cutting(), "input")
    assert lower == tuple(tokenizer("god saw")["input_ids"])
    assert prompts.tokens_of(served(tokenizer), "God SAW", Cutting(), "input") != lower


@pytest.mark.parametrize("prompt", ["", [], [5, -1], [10**6]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        prompts.tokens_of(served(tiny.tokenizer(False)), prompt, Cutting(), "prompt")
    assert refused.value.param == "prompt"


def test_what_is_far_too_long_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = served(tiny.tokenizer(False)), "the day " * 2000
    all_tokens = tuple(model.tokenizer(text)["input_ids"])
    assert prompts.tokens_of(model, text, Cutting(), "prompt", any_length=True) == all_tokens
    assert prompts.tokens_of(model, text, Cutting(truncate_prompt_tokens=4), "prompt") == all_tokens[:4]
    assert (
        prompts.tokens_of(served(model.tokenizer, positions=len(all_tokens)), text, Cutting(), "prompt") == all_tokens
    )

    def encoded(*arguments: Any) -> Any:
        raise AssertionError("it takes the tokenizer")

    monkeypatch.setattr(prompts, "_encoded", encoded)
    with pytest.raises(TooLong, match="context length is 8 tokens. However, the input has 16000 characters") as refused:
        prompts.tokens_of(model, text, Cutting(), "input")
    assert refused.value.param == "input"
    with pytest.raises(TooLong, match="the text_2 has 16001 characters"):
        prompts.pair_of(model, (text, "a"), Cutting(), "text_2")


@pytest.mark.parametrize(
    ("template", "size"),
    [
        ("{{ raise_exception('no') }}", 0), ("{{ 1 // size }}", 0), ("{{ 10.0 ** size }}", 400),
        ("{{ {'a': 1}.pop(size) }}", 0),
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_the_requests(template: str, size: int) -> None:
    tokenizer = tiny.tokenizer(False)
    tokenizer.chat_template = template
    with pytest.raises(BadRequest, match="chat template refuses the messages: ") as refused:
        chat, variables = prompts.Chat([{"role": "user", "content": "a"}], [], ServeSettings()), {"size": size}
        asyncio.run(prompts.chat_inputs(served(tokenizer), chat, Templating(chat_template_kwargs=variables), Cutting()))
    assert refused.value.param == "messages"


def test_messages_without_a_text_count() -> None:
    assert prompts.size_of([{"role": "user", "content": ""}] * 1000) > prompts._MANY


def test_work_on_a_tokenizer_is_done_one_at_a_time() -> None:
    model, has_begun, may_end, order = served(tiny.tokenizer(False)), threading.Event(), threading.Event(), list[str]()

    def long() -> threading.Thread:
        has_begun.set()
        assert may_end.wait(60)
        order.append("long")
        return threading.current_thread()

    def short() -> threading.Thread:
        order.append("short")
        return threading.current_thread()

    async def run() -> list[threading.Thread]:
        first = asyncio.ensure_future(prompts.in_turn(model, 10**6, long))
        await asyncio.to_thread(has_begun.wait, 60)
        second = asyncio.ensure_future(prompts.in_turn(model, 5, short))
        await asyncio.sleep(0)  # the second one has asked, and the event loop goes on
        may_end.set()
        return await asyncio.gather(first, second)

    assert threading.main_thread() not in asyncio.run(run())
    assert order == ["long", "short"]
    assert asyncio.run(prompts.in_turn(model, 5, short)) is threading.main_thread(), "a thread would cost more"
