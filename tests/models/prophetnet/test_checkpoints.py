"""Checkpoints of ProphetNet: those of the authors, copies, and what fine-tuning begins with."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from torch import Tensor

import fastgen
from fastgen.models.prophetnet import pretrained
from fastgen.models.prophetnet.model import ProphetNetModel
from fastgen.models.prophetnet.task import TranslationProphetNetTask
from tests.fairseq.test_generate import generator_for
from tests.models.prophetnet.tiny import SEP, VARIANTS, arguments, dictionary, model_of, sources, task

ENCODER_LAYER = (
    "self_attn.k_proj self_attn.v_proj self_attn.q_proj self_attn.out_proj self_attn_layer_norm fc1 fc2 "
    "final_layer_norm"
)
DECODER_LAYER = (
    "ngram_self_attn.relative_linear ngram_self_attn.out_proj self_attn_layer_norm encoder_attn.k_proj "
    "encoder_attn.v_proj encoder_attn.q_proj encoder_attn.out_proj encoder_attn_layer_norm fc1 fc2 final_layer_norm"
)


def published_names(layers: int) -> set[str]:
    """The parameters of the authors' checkpoints."""
    names = {"decoder.ngram_input_embed.weight"}
    for side, parts in (("encoder", ENCODER_LAYER), ("decoder", DECODER_LAYER)):
        names |= {f"{side}.{name}" for name in ("version", "embed_tokens.weight", "embed_positions.weight")}
        names |= {f"{side}.emb_layer_norm.{kind}" for kind in ("weight", "bias")}
        for layer in range(layers):
            names |= {f"{side}.layers.{layer}.{part}.{kind}" for part in parts.split() for kind in ("weight", "bias")}
    for layer in range(layers):
        names |= {f"decoder.layers.{layer}.ngram_self_attn.in_proj_{kind}" for kind in ("weight", "bias")}
    return names


def fairseq_09(**changes: Any) -> Namespace:
    """Arguments as FairSeq 0.9 saved them with a model that was fine-tuned by the authors' instructions, mostly."""
    saved = {
        "adam_betas": "(0.9, 0.999)", "arch": "ngram_transformer_prophet_large", "bpe": None, "cpu": False,
        "criterion": "ngram_language_loss", "data": "cnndm/processed", "dataset_impl": None, "ddp_backend": "no_c10d",
        "disable_ngram_loss": False, "distributed_world_size": 8, "fp16": True, "label_smoothing": 0.1,
        "lazy_load": False, "left_pad_source": "True", "left_pad_target": "False", "load_from_pretrained_model": None,
        "load_sep": True, "lr": [0.0001], "lr_scheduler": "inverse_sqrt", "max_sentences": 2, "max_tokens": None,
        "min_lr": -1, "optimizer": "adam", "optimizer_overrides": "{}", "raw_text": False, "source_lang": "src",
        "target_lang": "tgt", "task": "translation_prophetnet", "tokenizer": None, "truncate_source": False,
        "update_freq": [32], "upsample_primary": 1, "user_dir": "./prophetnet", "warmup_updates": 1000,
    }  # fmt: skip
    return Namespace(**saved | vars(arguments(**changes)))


def checkpoint_09(path: Path, state: dict[str, Tensor], **more: Any) -> Path:
    history = {"criterion_name": "NgramLmLoss", "optimizer_name": "FP16Optimizer", "num_updates": 9}
    torch.save(
        {
            "args": fairseq_09(),
            "model": state,
            "optimizer_history": [{**history, "lr_scheduler_state": {"best": None}}],
            "extra_state": {"train_iterator": {"epoch": 9, "iterations_in_epoch": 0}, "val_loss": 3.5},
            "last_optimizer_state": None,
            **more,
        },
        path,
    )
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the dictionaries."""
    for language in ("src", "tgt"):
        dictionary().save(str(tmp_path / f"dict.{language}.txt"))
    return tmp_path


def test_a_published_checkpoint_is_loaded_and_saved_under_its_names(data, strict):
    model = model_of(arguments())
    state = model.state_dict()
    assert set(state) == published_names(2)
    assert state["decoder.embed_positions.weight"].shape[0] == 128 + 2
    assert state["encoder.embed_positions.weight"].shape[0] == 128 + 1
    path = checkpoint_09(data / "checkpoint9.pt", state)
    (loaded,), saved_args, loaded_task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )
    assert isinstance(loaded, ProphetNetModel) and isinstance(loaded_task, TranslationProphetNetTask)
    assert loaded_task.target_dictionary.eos() == SEP and saved_args.task.left_pad_source is True
    again = loaded.state_dict()
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    # What shares its weights goes on to do so.
    assert loaded.decoder.output_projection.weight is loaded.decoder.embed_tokens.weight
    want = generator_for([model], beam_size=3).generate([], sources(3))
    have = generator_for([loaded.eval()], beam_size=3).generate([], sources(3))
    assert [h["tokens"].tolist() for h in want[0]] == [h["tokens"].tolist() for h in have[0]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_weights_under_the_same_names(copied):
    model = model_of(arguments())
    other = copied(model)
    assert set(other.state_dict()) == published_names(2)
    other.load_state_dict(model_of(arguments(), seed=1).state_dict())
    assert other.decoder.output_projection.weight is other.encoder.embed_tokens.weight
    assert not torch.equal(other.decoder.output_projection.weight, model.decoder.output_projection.weight)


def test_own_output_embeddings_have_the_published_name():
    model = model_of(arguments(**VARIANTS["own embeddings"]))
    state = model.state_dict()
    assert set(state) == published_names(2) | {"decoder.embed_out"}
    other = model_of(arguments(**VARIANTS["own embeddings"]), seed=1)
    other.load_state_dict(state)
    assert torch.equal(other.decoder.output_projection.weight, model.decoder.output_projection.weight)
    del state["decoder.embed_out"]
    with pytest.raises(RuntimeError, match="output_projection"):
        other.load_state_dict(state)


class Foreign:
    """What no checkpoint contains."""


def test_a_checkpoint_with_code_is_refused(data):
    model = model_of(arguments())
    path = checkpoint_09(data / "foreign.pt", model.state_dict(), extra=Foreign())
    with pytest.raises(Exception, match=r"contains .*Foreign, which is not among the types of a FairSeq checkpoint"):
        checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(data)})
    with pytest.raises(Exception, match=r"contains .*Foreign, which is not among the types of a FairSeq checkpoint"):
        ProphetNetModel.build_model(arguments(load_from_pretrained_model=str(path)), task())
    fastgen.disable()
    with pytest.raises(Exception, match="Weights only load failed"):
        pretrained.read(str(path))


@pytest.mark.parametrize("bare", [True, False], ids=["weights", "checkpoint"])
def test_fine_tuning_begins_with_pretrained_weights(tmp_path, bare):
    words = dictionary("[X_SEP]")
    small = ProphetNetModel.build_model(arguments(max_source_positions=20, max_target_positions=40), task(words))
    state = small.state_dict()
    path = tmp_path / "pretrained.pt"
    if bare:
        torch.save(state, path)
    else:
        checkpoint_09(path, state)
    args = arguments(
        load_from_pretrained_model=str(path), load_sep=True, max_source_positions=50, max_target_positions=30
    )
    model = ProphetNetModel.build_model(args, task(dictionary("[X_SEP]", "new", "newer")))
    assert args.load_from_pretrained_model is None
    tokens, before = model.encoder.embed_tokens.weight, state["encoder.embed_tokens.weight"]
    x_sep = words.index("[X_SEP]")
    assert torch.equal(tokens[:x_sep], before[:x_sep]) and torch.equal(tokens[x_sep], before[SEP])
    assert tokens.shape[0] == len(words) + 2 and 0 < tokens[-2:].std() < 1
    assert model.decoder.output_projection.weight is tokens
    assert torch.equal(model.decoder.embed_positions.weight, state["decoder.embed_positions.weight"][:32])
    positions, few = model.encoder.embed_positions.weight, state["encoder.embed_positions.weight"]
    assert torch.equal(positions[:21], few)
    assert torch.equal(positions[21:42], torch.cat([few[:, 1:], few[:, :1]], dim=1))
    assert torch.equal(positions[42:], torch.cat([few[:, 2:], few[:, :2]], dim=1)[:9])
    assert torch.equal(
        model.decoder.layers[1].ngram_self_attn.in_proj.bias, state["decoder.layers.1.ngram_self_attn.in_proj_bias"]
    )


def test_unfit_pretrained_weights_are_named(tmp_path):
    path = tmp_path / "other.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"other\.pt holds no ProphetNet weights"):
        ProphetNetModel.build_model(arguments(load_from_pretrained_model=str(path)), task())
    torch.save(model_of(arguments()).state_dict(), path)
    with pytest.raises(ValueError, match="--load-sep needs a dictionary with"):
        ProphetNetModel.build_model(arguments(load_from_pretrained_model=str(path), load_sep=True), task())


def test_embeddings_that_cannot_be_shared_are_named():
    different = SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary("more"))
    with pytest.raises(ValueError, match="one dictionary"):
        ProphetNetModel.build_model(arguments(), different)
    with pytest.raises(ValueError, match="to be equal"):
        ProphetNetModel.build_model(arguments(encoder_embed_dim=16), task())
    with pytest.raises(ValueError, match="32 dimensions cannot have 5 heads"):
        ProphetNetModel.build_model(arguments(decoder_attention_heads=5), task())
