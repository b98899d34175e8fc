"""The text that a model is calibrated and measured with: its samples, the model's quality on held-out text, and its
speed.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastgen.pipeline.errors import SetupError, check_installed, explained
from fastgen.pipeline.generation import generate_dataset
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.inputs import Inputs
from fastgen.pipeline.run import RunReport


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


_WINDOW = 1024  # tokens that are predicted from each other, for the perplexity
_SPEED = {"max_new_tokens": 32, "min_new_tokens": 32, "num_beams": 1, "do_sample": False}
_SPEED_TEXTS, _SPEED_WORDS = 8, 32


class Quality(NamedTuple):
    measure: str  # perplexity (lower is better) or bleu (higher is better)
    value: float
    measured_on: int  # predicted tokens, or texts


def check_texts(texts: Iterable[Text], name: str, encoder_decoder: bool) -> list[Text]:
    """Returns the texts of a file to measure with. Raises SetupError if the model cannot be measured with them."""
    found = list(texts)
    if not found:
        raise SetupError(f"{name} has no text")
    if encoder_decoder:
        check_installed("sacrebleu", "BLEU")
        if any(text.target is None for text in found):
            raise SetupError(f"{name} has sources without references: give --reference FILE, or a TAB and a reference")
    return found


def quality(loaded: LoadedModel, texts: list[Text]) -> Quality:
    """Returns the perplexity of a decoder-only model on the texts, or the BLEU of an encoder-decoder's outputs."""
    if not loaded.encoder_decoder:
        return _perplexity(loaded, texts)
    report = _generate(loaded, texts, metrics=("bleu",))
    return Quality("bleu", report.metrics["bleu"], report.metrics_samples)


def speed(loaded: LoadedModel, texts: list[Text]) -> float:
    """Returns new tokens per second: 32 for each of 8 inputs in one batch, greedy. The first of two runs warms up."""
    some = [Text(" ".join(text.source.split()[:_SPEED_WORDS])) for text in itertools.islice(texts, _SPEED_TEXTS)]
    for _ in range(2):
        report = _generate(loaded, some, generation=_SPEED, batch_size=len(some))
    return report.tokens_per_second


def _perplexity(loaded: LoadedModel, texts: list[Text]) -> Quality:
    import torch

    total, count = 0.0, 0
    with torch.no_grad():
        for ids in sequences(loaded, texts, _WINDOW):
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    if not count:
        raise SetupError("the text to measure with has fewer than two tokens")
    return Quality("perplexity", math.exp(min(total / count, 700.0)), count)


def _line(text: str | None) -> str:
    """Returns a text on one line."""
    return " ".join((text or "").split())


def _generate(loaded: LoadedModel, texts: list[Text], **options: Any) -> RunReport:
    """Runs the model over texts as `fastgen-generate` does. The model's own generation config is restored."""
    own = loaded.model.generation_config
    with tempfile.TemporaryDirectory() as folder:
        source, reference, output = (Path(folder, name) for name in ("in.txt", "reference.txt", "out.txt"))
        source.write_text("".join(f"{_line(text.source)}\n" for text in texts), encoding="utf-8")
        if "metrics" in options:
            reference.write_text("".join(f"{_line(text.target)}\n" for text in texts), encoding="utf-8")
            options["reference"] = str(reference)
        try:
            return generate_dataset(
                loaded.model, source, output, tokenizer=loaded.tokenizer, device=str(loaded.device), workers=0,
                quiet=True, truncation=True, prefix=loaded.prefix, **options,
            )  # fmt: skip
        finally:
            loaded.model.generation_config = own
