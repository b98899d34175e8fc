"""Measures a model's quality on held-out text, and its speed."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastgen.pipeline.errors import SetupError, check_installed
from fastgen.pipeline.generation import generate_dataset
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.quantizing.texts import Text, sequences
from fastgen.pipeline.run import RunReport

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
