"""Generation as FairSeq's tasks do it: with language tokens at the beginning, in the prefix, or as the end."""

from __future__ import annotations

import argparse
import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.models import transformer
from fairseq.models.multilingual_transformer import base_multilingual_architecture
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

import fastgen
from tests.fairseq import models
from tests.fairseq.check import accelerated, assert_same

pytestmark = [pytest.mark.usefixtures("strict"), pytest.mark.sampled(2)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a dictionary for each of three languages."""
    for language in ("xx", "yy", "zz"):
        models.dictionary().save(str(tmp_path / f"dict.{language}.txt"))
    return tmp_path


def check(task: Any, model: Any, **options: Any) -> Any:
    """Asserts that the task gives the same hypotheses with FastGen and without, and returns them."""
    sentences = [torch.randint(4, 60, (length,)) for length in (9, 3, 6, 5)]
    sentences = [torch.cat([words, torch.tensor([2])]) for words in sentences]
    dataset = task.build_dataset_for_inference(sentences, torch.tensor([len(words) for words in sentences]))
    (sample,) = task.get_batch_iterator(dataset, max_sentences=8, disable_iterator_cache=True).next_epoch_itr(
        shuffle=False
    )

    def run() -> Any:
        generator = task.build_generator([model], Namespace(beam=4, max_len_a=0, max_len_b=15, **options))
        torch.manual_seed(0)
        return task.inference_step(generator, [model], copy.deepcopy(sample))

    with fastgen.disabled():
        original = run()
    ours = run()
    assert_same(original, ours)
    assert accelerated() == 1 and len(ours) == len(sentences)
    return ours


def parsed(kind: Any, data: Path, *words: str) -> Namespace:
    parser = argparse.ArgumentParser()
    kind.add_args(parser)
    return parser.parse_args([str(data), "-s", "xx", "-t", "yy", *words])


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "a model for each pair"])
@pytest.mark.parametrize(
    "words",
    [["--encoder-langtok", "tgt", "--decoder-langtok"], ["--decoder-langtok"], ["--encoder-langtok", "src"], []],
    ids=["both", "decoder", "encoder", "none"],
)
def test_multilingual_transformer(data, words, shared):
    args = parsed(MultilingualTranslationTask, data, "--lang-pairs", "xx-yy,yy-zz", *words)
    vars(args).update(vars(models.sizes(share_encoders=shared, share_decoders=shared)))
    base_multilingual_architecture(args)
    args.arch = "multilingual_transformer"
    task = MultilingualTranslationTask.setup_task(args)
    model = models.lively(task.build_model(args))
    check(task, model)


@pytest.mark.parametrize(
    "words",
    [
        ["--encoder-langtok", "src", "--decoder-langtok"],
        ["--decoder-langtok", "--lang-tok-replacing-bos-eos"],
        ["--decoder-langtok", "--keep-inference-langtok"],
    ],
    ids=["prefix", "first token", "kept"],
)
def test_one_transformer_for_many_languages(data, words):
    args = parsed(TranslationMultiSimpleEpochTask, data, "--lang-pairs", "xx-yy,yy-zz", *words)
    vars(args).update(vars(models.sizes(share_all_embeddings=True)), seed=1, train_subset="train", valid_subset="valid")
    task = TranslationMultiSimpleEpochTask.setup_task(args)
    transformer.base_architecture(args)
    model = models.lively(transformer.TransformerModel.build_model(args, task))
    check(task, model, keep_inference_langtok=args.keep_inference_langtok)


def test_mbart_ends_with_the_target_language(data):
    args = parsed(TranslationFromPretrainedBARTTask, data, "--langs", "xx,yy", "--prepend-bos")
    task = TranslationFromPretrainedBARTTask.setup_task(args)
    found = check(task, models.mbart_model(words=task))
    assert all(each["tokens"][-1] == task.target_dictionary.index("[yy]") for row in found for each in row)
