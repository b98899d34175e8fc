"""ProphetNet's dictionary and architectures, and what is registered with FairSeq under the authors' names."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import models

from fastgen.models.prophetnet.task import BertDictionary

ROOT = Path(__file__).parents[3]


def test_the_dictionary_names_special_tokens_where_they_are(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text(
        "[PAD] 0\n[unused0] 1\n[X_SEP] 2\n[UNK] 100\n[CLS] 101\n[SEP] 102\nthe 7\n\u3000 8\n", encoding="utf-8"
    )
    words = BertDictionary.load_from_file(str(path))
    assert (words.pad(), words.unk(), words.bos(), words.eos(), len(words)) == (0, 3, 4, 5, 8)
    assert words.index("\u3000") == 7 and words.index("nowhere") == words.unk()
    assert words.string(torch.tensor([6, 5])) == "the"
    words.save(str(tmp_path / "saved.txt"))
    assert (tmp_path / "saved.txt").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert BertDictionary([("a", 1)]).symbols == ["a", "[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    path.write_text("the 7\nbroken\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.txt, line 2: expected a token and its count, found 'broken'"):
        BertDictionary.load_from_file(str(path))


def test_its_modules_may_be_imported_first() -> None:
    """Then they import FairSeq, which registers its own models meanwhile."""
    command = [sys.executable, "-c", "import fastgen.models.prophetnet.attention"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_architectures_are_the_published_shapes():
    def shape(name: str, **given: Any) -> tuple[Any, ...]:
        args = Namespace(**given)
        models.ARCH_CONFIG_REGISTRY[f"ngram_transformer_prophet{name}"](args)
        names = "decoder_embed_dim encoder_ffn_embed_dim decoder_layers encoder_attention_heads activation_fn"
        return tuple(getattr(args, each) for each in [*names.split(), "share_all_embeddings", "ngram"])

    assert shape("") == (512, 2048, 6, 8, "relu", False, 2)
    assert shape("_base") == (768, 3072, 6, 12, "gelu", True, 2)
    assert shape("_middle") == (1024, 4096, 6, 16, "gelu", True, 2)
    assert shape("_large") == (1024, 4096, 12, 16, "gelu", True, 2)
    assert shape("_large", ngram=3, decoder_layers=2)[2::4] == (2, 3)


PLUG_IN = """
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationTask
@register_task("translation_prophetnet")
class TranslationProphetnetTask(TranslationTask): pass
@register_model("ngram_transformer_prophet")
class NgramTransformerProphetModel(FairseqEncoderDecoderModel): pass
@register_model_architecture("ngram_transformer_prophet", "ngram_transformer_prophet_large")
def large(args): pass
@register_criterion("ngram_language_loss")
class NgramLmLoss(FairseqCriterion): pass
"""
ITS_OWN = """
from fairseq import criterions, models, tasks
assert models.ARCH_MODEL_REGISTRY["ngram_transformer_prophet_large"] is NgramTransformerProphetModel
assert "ngram_transformer_prophet_base" not in models.ARCH_MODEL_REGISTRY
assert tasks.TASK_REGISTRY["translation_prophetnet"] is TranslationProphetnetTask
assert criterions.CRITERION_REGISTRY["ngram_language_loss"] is NgramLmLoss
"""
OURS = """
from fairseq import models
assert models.ARCH_MODEL_REGISTRY["ngram_transformer_prophet_large"].__module__ == "fastgen.models.prophetnet.model"
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "code",
    [
        "import fastgen, fairseq" + OURS + "fastgen.disable()" + OURS + "fastgen.enable()" + OURS,
        "import fastgen, fairseq.sequence_generator" + OURS,
        "import fastgen, fairseq" + PLUG_IN + ITS_OWN,
        "import os; os.environ['FASTGEN_DISABLE'] = '1'; import fastgen; from fastgen import _patches\n"
        "from fastgen.optimizer.fairseq import compat\nfrom fastgen.patching import PatchSet\n"
        "PatchSet(compat.patches()).enable(); import fairseq" + PLUG_IN + "\nfastgen.enable()" + ITS_OWN,
    ],
    ids=["first", "a module of it", "authors after", "authors before"],
)
def test_registered_once_and_the_authors_own_code_comes_first(code, programs):
    done = subprocess.run([str(programs / "python"), "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
