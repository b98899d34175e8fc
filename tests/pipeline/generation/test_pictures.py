"""Models that take more than text: their folders name a class, and are loaded by it to generate from text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from fastgen.pipeline import generate_dataset
from fastgen.pipeline.generation.loading import class_named, class_of_type
from fastgen.pipeline.inputs import reads_parts_only
from fastgen_serve.workers.loading import generates
from tests.pipeline import tiny

TEXTS = ["let there be light", "in the beginning"]


@pytest.fixture(scope="module", params=["Llava", "Gemma3", "Qwen3VL", "SmolVLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(transformers, f"{request.param}ForConditionalGeneration"):
        pytest.skip("this release has no such model")
    return tiny.pictures(tmp_path_factory.mktemp(request.param), request.param)


def expected(folder: Path, prompts: list[list[int]], tokenizer: Any) -> list[str]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    rows = [
        model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6)[0, len(ids) :]
        for ids in prompts
    ]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


@pytest.mark.parametrize("chat", [False, True], ids=["prompts", "chats"])
def test_a_model_of_pictures_generates_from_text(folder: Path, tmp_path: Path, chat: bool) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(TEXTS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = tokenizer([f"user: {text}\nassistant: " for text in TEXTS] if chat else TEXTS)["input_ids"]
    options: dict[str, Any] = {"generation": {"max_new_tokens": 6}, "device": "cpu", "quiet": True}
    generate_dataset(str(folder), source, target, chat=chat, **options)
    found = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert found == expected(folder, prompts, tokenizer)


def test_the_class_that_a_configuration_names(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert generates(str(folder))
    for chosen in (class_named(config), class_of_type(config)):
        assert chosen.from_pretrained(folder).__class__.__name__ == config.architectures[0]
    config.architectures = ["AnotherForClassification"]
    assert class_named(config) is None


def test_a_head_for_text_alone_is_not_taken_for_one_of_pictures() -> None:
    config = transformers.MllamaConfig(architectures=["MllamaForConditionalGeneration"])
    assert class_named(config) is transformers.AutoModelForMultimodalLM
    config.architectures = ["MllamaForCausalLM"]
    assert class_named(config) is transformers.AutoModelForCausalLM


def test_an_encoder_decoder_is_not_taken_for_its_decoder() -> None:
    config = transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"])
    assert class_named(config) is None
    assert class_of_type(config) is transformers.AutoModelForSeq2SeqLM, "which says that it does not know it"


def test_templates_that_read_parts_only() -> None:
    tokenizer = tiny.tokenizer(encoder_decoder=False)
    for template, parts_only in (
        (tiny.IMAGE_TEMPLATE, True),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", False),
        ("{{ raise_exception('nothing is right') }}", False),
        ("{% if messages[0]['content'] is string %}{{ messages[0]['content'] }}{% else %}text{% endif %}", False),
    ):
        tokenizer.chat_template = template
        assert reads_parts_only(tokenizer, template) is parts_only
