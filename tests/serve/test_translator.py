"""Sentences on their way through models that are full, many, or damaged."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fastgen_serve.errors import Busy, TimedOut
from fastgen_serve.jobs import Generate, Generated, ModelInfo, Sequence
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation import sentences, translator
from fastgen_serve.translation.translator import Translator
from fastgen_serve.workers import loading
from tests.serve import servers


class Tokenizer:
    """A token is a character."""

    def __call__(self, texts: list[str], verbose: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))

    def get_vocab(self) -> dict[str, int]:
        return {}


class Echo:
    """A `ServedModel` whose translation is the text itself.

    Args:
        answers: of its calls, in turn: True for a translation, False for Busy. Those after them are as the last one.
    """

    def __init__(self, *answers: bool, name: str = "echo") -> None:
        self.name, self.tokenizer = name, Tokenizer()
        self.info = ModelInfo(name, "encoder-decoder", ("generate",), None)
        self._answers = list(answers) or [True]
        self.tasks = 0

    async def generate(self, job: Generate) -> Generated:
        self.tasks = max(self.tasks, len(asyncio.all_tasks()))
        if not (self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]):
            raise Busy("it is full", retry_after=60)
        await asyncio.sleep(0)
        return Generated((Sequence(job.tokens, "stop"),))


def translated(text: str, model: Any, slots: int = 1, **settings: Any) -> str:
    served = ServeSettings(
        models=(("echo", servers.BART),), slots=slots, languages={"echo": frozenset({("en", "de")})}, **settings
    )
    made = Translator(Models([model]), served)
    ((best, *_),) = asyncio.run(made.translate([sentences.cut(text)], ["en"], "de"))
    return "".join(piece.text for piece in best)


def test_a_long_text_is_no_task_for_each_sentence():
    model = Echo()
    text = " ".join(f"It is {number}." for number in range(1000, 3000))
    assert translated(text, model, slots=4) == text
    assert model.tasks < 10


@pytest.mark.parametrize("slots", [1, 4])
def test_a_text_that_has_begun_waits_for_room(slots, monkeypatch):
    monkeypatch.setattr(translator, "_PAUSE", 0.01)
    text = "One is here. Two is there. Three are nowhere. Four."
    assert translated(text, Echo(True, False, False, True, False, False, False, True), slots=slots) == text


def test_a_text_that_finds_no_room_is_refused():
    for slots in (1, 4):
        with pytest.raises(Busy):
            translated("One is here. Two is there.", Echo(False), slots=slots)


def test_a_text_waits_no_longer_than_a_request_may_take(monkeypatch):
    monkeypatch.setattr(translator, "_PAUSE", 0.01)
    with pytest.raises(TimedOut):
        translated("One is here. Two is there.", Echo(True, False), request_timeout_s=0.2)


def test_a_model_whose_files_are_damaged_leaves_the_others(tmp_path, caplog):
    (tmp_path / "config.json").write_text("{")
    settings = ServeSettings(
        models=(("bad", str(tmp_path)), ("echo", servers.BART)), languages={"echo": frozenset({("en", "de")})}
    )
    with caplog.at_level(logging.WARNING, "fastgen_serve"):
        found = Translator(Models([Echo(name="bad"), Echo()]), settings)
    assert found.languages == {"en": ["de"]}
    assert "model bad" in caplog.text


def test_the_types_of_models_that_are_fastgens_own_are_known(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unilm"}))
    assert loading.read_config(str(tmp_path)).model_type == "unilm"
