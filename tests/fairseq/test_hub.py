"""FairSeq's hub interfaces: from a folder with a checkpoint, a dictionary and BPE files, with FastGen and without."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from fairseq.models.bart import BARTModel
from fairseq.models.transformer_lm import TransformerLanguageModel

import fastgen
from tests.fairseq import models
from tests.fairseq.check import accelerated

pytestmark = pytest.mark.usefixtures("strict")

SENTENCES = ["In the beginning", " a", "And the earth was without form, and void;"]


def write_checkpoint(path: Path, model: Any, arguments: Namespace, **about: Any) -> None:
    """A checkpoint as FairSeq's published models have it: the arguments in a namespace."""
    for name, value in about.items():
        setattr(arguments, name, value)
    torch.save(models.checkpoint(args=arguments, model=model.state_dict()), path)


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What comes of it without FastGen and with it, from the same random state."""

    def run() -> Any:
        torch.manual_seed(0)
        return work()

    with fastgen.disabled():
        original = run()
    assert accelerated() == 0
    return original, run()


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """BART as its users have it: GPT-2's BPE, of which only a few merges are known here."""
    folder = tmp_path_factory.mktemp("bart")
    merges = ["t h", "Ġ th", "i n", "Ġth e", "a n"]
    units = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    (folder / "encoder.json").write_text(json.dumps({unit: number for number, unit in enumerate(units)}))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    words = Dictionary()
    for number in range(len(units)):
        words.add_symbol(str(number))
    words.save(str(folder / "dict.txt"))
    words.add_symbol("<mask>")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    write_checkpoint(
        folder / "model.pt", models.bart_model(words=task), models.bart_arguments(), arch="bart_base", task="denoising",
        criterion="cross_entropy", tokens_per_sample=128, seed=1, data="",
    )  # fmt: skip
    files = {"gpt2_encoder_json": str(folder / "encoder.json"), "gpt2_vocab_bpe": str(folder / "vocab.bpe")}
    return BARTModel.from_pretrained(str(folder), **files).eval()


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 4, "lenpen": 2.0, "max_len_b": 30, "min_len": 5, "no_repeat_ngram_size": 3},
        {"beam": 1, "max_len_b": 20, "min_len": 8},
        {"beam": 3, "max_len_b": 20, "sampling": True, "sampling_topk": 10},
        {"beam": 4, "max_len_b": 20, "diverse_beam_groups": 2},
    ],
    ids=["summary", "greedy", "sampling", "diverse"],
)
def test_bart_samples(bart, options):
    bart.model.set_beam_size(options["beam"])
    original, ours = both(lambda: bart.sample(SENTENCES, **options))
    assert ours == original and len(ours) == len(SENTENCES) and any(ours)
    assert accelerated() == 1


def test_a_language_model_samples(tmp_path):
    words = models.dictionary()
    words.save(str(tmp_path / "dict.txt"))
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    arguments = models.language_model_arguments()
    about = {"arch": "transformer_lm", "task": "language_modeling", "criterion": "cross_entropy", "data": ""}
    write_checkpoint(tmp_path / "model.pt", models.language_model(words=task), arguments, **about)
    hub = TransformerLanguageModel.from_pretrained(str(tmp_path), tokenizer="space").eval()
    for options in ({"beam": 3}, {"beam": 2, "sampling": True, "sampling_topp": 0.8}):
        fastgen.reset_stats()
        original, ours = both(lambda options=options: hub.sample(["w1 w2 w3 w4", "w5"], max_len_b=15, **options))
        assert ours == original and ours[0].startswith("w1 w2 w3 w4") and accelerated() == 1
