"""The text that a model is calibrated and measured with, and its samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fastgen.pipeline.errors import SetupError, explained
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.inputs import Inputs


class Text(NamedTuple):
    source: str
    target: str | None = None


Sample = dict[str, Any]
"""The model's arguments: a single sequence, or a source with its target."""


class Texts:
    """The texts of a file. Empty ones are left out; any other bad record is a SetupError."""

    def __init__(self, settings: RunOptions) -> None:
        self._inputs = Inputs(settings)
        self.name = settings.input

    def identity(self) -> dict[str, Any]:
        return self._inputs.identity()

    def __iter__(self) -> Iterator[Text]:
        """Yields sources with their targets, for an encoder-decoder: from the references, or the text after a TAB."""
        for record in self._inputs:
            if record.problem:
                if record.problem.kind == "empty":
                    continue
                raise SetupError(f"{self.name}, line {record.line}: {record.problem.message}")
            source, tab, target = record.text.partition("\t")
            if record.reference is not None or not tab:
                yield Text(record.text, record.reference)
            else:
                yield Text(source, target)


class PlainTexts:
    """Sentences that replace calibration text for methods that need none: they show which layers exist, and how
    rounding changes them.
    """

    name = "built-in sentences"
    _SENTENCES = (
        "The train to the coast leaves at nine, and the last one back is at half past six.",
        "Water boils at a lower temperature on a mountain, because the air presses on it less.",
        "She wrote the report in the morning, read it again after lunch, and sent it before the meeting.",
        "def area(width, height): return width * height",
        "Prices rose by two percent in May, after they had been stable for most of the year.",
        "Put the flour in a bowl, add three eggs and a cup of milk, and stir until it is smooth.",
        "Which of the two routes is shorter depends on where you start and how you travel.",
        "The museum is closed on Mondays; on other days it opens at ten and costs nothing.",
    )

    def identity(self) -> dict[str, Any]:
        return {"text": self.name}

    def __iter__(self) -> Iterator[Text]:
        return map(Text, self._SENTENCES)


def samples(loaded: LoadedModel, texts: Texts | PlainTexts, count: int, length: int) -> list[Sample]:
    """Returns at most `count` samples of at most `length` tokens, on the model's device.

    Raises `SetupError` if the file has no text, or text that the tokenizer refuses.
    """
    with explained(f"{texts.name} cannot be tokenised"):
        if loaded.encoder_decoder:
            made = [_pair(loaded, text, length) for text in itertools.islice(texts, count)]
        else:
            made = [{"input_ids": ids} for ids in itertools.islice(sequences(loaded, texts, length), count)]
    if not made:
        raise SetupError(f"{texts.name} has no text")
    return made


def sequences(loaded: LoadedModel, texts: Iterable[Text], length: int) -> Iterator[Any]:
    """Yields the concatenated texts in sequences of `length` tokens: int64 [1, length]; the last may be shorter.

    A token that the tokenizer puts at the beginning of every text begins every sequence.
    """
    import torch

    tokenizer = loaded.tokenizer
    length = min(length, loaded.positions or length)
    first = tokenizer("a").input_ids[:1]
    beginning = first if first == [tokenizer.bos_token_id] else []
    taken = max(1, length - len(beginning))
    waiting: list[int] = []

    def sequence(ids: list[int]) -> Any:
        return torch.tensor([[*beginning, *ids]], device=loaded.device)

    for source, target in texts:
        text = source if target is None else f"{source}\t{target}"
        waiting += tokenizer(f"{text}\n", add_special_tokens=False, verbose=False).input_ids
        while len(waiting) >= taken:
            yield sequence(waiting[:taken])
            del waiting[:taken]
    if len(waiting) > 1:
        yield sequence(waiting)


def _pair(loaded: LoadedModel, text: Text, length: int) -> Sample:
    """Returns a source with its target; if there is none, the model writes it."""
    import torch

    longest = {"truncation": True, "max_length": min(length, loaded.positions or length), "return_tensors": "pt"}
    found = loaded.tokenizer(loaded.prefix + text.source, **longest)
    sample = {name: found[name].to(loaded.device) for name in ("input_ids", "attention_mask")}
    if text.target is not None:
        labels = loaded.tokenizer(text_target=text.target, **longest).input_ids
    else:
        with torch.no_grad():
            written = loaded.model.generate(**sample, num_return_sequences=1, return_dict_in_generate=False)
        labels = written[:1, 1 : length + 1]  # without the token that starts the decoder
    if not labels.numel():
        raise SetupError(f"the target of {text.source[:40]!r} has no tokens")
    return sample | {"labels": labels.to(loaded.device)}
