"""ProphetNet for FairSeq: against a plain computation, the port in Transformers, and FairSeq's own generation."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastgen
from fastgen import settings

if importlib.util.find_spec("fairseq") is None and not os.environ.get("FASTGEN_REQUIRE_FAIRSEQ"):
    pytest.skip("FairSeq is not installed", allow_module_level=True)

from fairseq import checkpoint_utils, models, options
from fairseq.criterions import cross_entropy
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq_cli import generate as generate_command
from fairseq_cli import preprocess as preprocess_command
from fairseq_cli import train as train_command

from fastgen.models.prophetnet import architectures, attention, pretrained
from fastgen.models.prophetnet.criterion import NgramLanguageLoss
from fastgen.models.prophetnet.model import ProphetNetDecoder, ProphetNetModel
from fastgen.models.prophetnet.task import BertDictionary, TranslationProphetNetTask
from tests.fairseq.check import accelerated, check, fallbacks
from tests.fairseq.models import lively
from tests.fairseq.test_generate import OPTIONS, generator_for
from tests.models.prophetnet_reference import Reference

ROOT = Path(__file__).parents[2]
PAD, CLS, SEP, UNK, WORDS = 0, 1, 2, 3, 60
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
TOKENS = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """FastGen is enabled, its counts start at zero, and its settings are put back afterwards."""
    before = settings.current()
    fastgen.enable()
    fastgen.reset_stats()
    yield
    settings.change(strict=before.strict)
    fastgen.enable()


@pytest.fixture
def strict(counted: None) -> None:
    """A fallback fails the test."""
    fastgen.enable(strict=True)


def dictionary(*more: str) -> BertDictionary:
    return BertDictionary((token, 1) for token in [*TOKENS, *more])


def arguments(**changes: Any) -> Namespace:
    """Of a tiny model whose distances reach into the last bucket."""
    size: dict[str, Any] = {"num_buckets": 8, "relative_max_distance": 16, "dropout": 0.1}
    size |= {"max_source_positions": 128, "max_target_positions": 128}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_embed_dim": 32, f"{part}_ffn_embed_dim": 48, f"{part}_layers": 2}
        size[f"{part}_attention_heads"] = 4
    args = Namespace(**size | changes)
    architectures.ARCHITECTURES["ngram_transformer_prophet_base"](args)
    return args


def task(words: BertDictionary | None = None) -> Any:
    words = dictionary() if words is None else words
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def model_of(args: Namespace, seed: int = 0) -> Any:
    return lively(ProphetNetModel.build_model(args, task()), seed)


def sources(batch: int = 4, length: int = 12, left_pad: bool = True, seed: int = 0) -> dict[str, Any]:
    """A batch as FairSeq's data sets make it: sources of different lengths, which end in [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 4 + WORDS, (batch, length), generator=generator)
    lengths = torch.tensor([length - 3 * i % (length - 2) for i in range(batch)])
    for row, count in enumerate(lengths.tolist()):
        tokens[row, count - 1], tokens[row, count:] = SEP, PAD
        if left_pad:
            tokens[row] = tokens[row].roll(length - count)
    return {"id": torch.arange(batch), "net_input": {"src_tokens": tokens, "src_lengths": lengths}}


def rows(tokens: Tensor) -> list[list[int]]:
    """Each row without its padding."""
    return [row[row != PAD].tolist() for row in tokens]


VARIANTS: dict[str, dict[str, Any]] = {
    "two streams": {},
    "three streams": {"ngram": 3},
    "one stream": {"ngram": 1},
    "own embeddings": {
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": False,
        "activation_fn": "relu",
    },
    "deeper encoder": {
        "encoder_layers": 3,
        "encoder_embed_dim": 24,
        "share_all_embeddings": False,
        "num_buckets": 32,
        "relative_max_distance": 128,
    },
}


# ---- against the plain computation


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_every_stream_is_what_the_paper_defines(changes):
    args = arguments(**changes)
    model = model_of(args)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(3, 9)["net_input"]
    targets = torch.randint(4, 4 + WORDS, (3, 14))
    streams, extra = model(**sample, prev_output_tokens=targets)
    assert len(streams) == args.ngram and extra["attn"] is None
    for row, source in enumerate(rows(sample["src_tokens"])):
        expected = reference.decode(reference.encode(source), targets[row].tolist())
        torch.testing.assert_close(torch.stack(streams)[:, row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("enabled", [True, False], ids=["fastgen", "fairseq"])
@torch.no_grad()
def test_generation_is_that_of_the_plain_computation_step_by_step(changes, enabled):
    args = arguments(**changes)
    model = model_of(args)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(2, 7)
    generator = generator_for([model], beam_size=1, max_len_b=11)
    if enabled:
        fastgen.enable(strict=True)
        found = generator.generate([], sample)
    else:
        with fastgen.disabled():
            found = generator.generate([], sample)
    for source, (hypothesis,) in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        encoded, tokens, scores = reference.encode(source), [SEP], []
        while len(tokens) < 13 and (len(tokens) == 1 or tokens[-1] != SEP):
            log_probs = reference.decode(encoded, tokens)[0, -1].log_softmax(0)
            log_probs[PAD] = -torch.inf
            if len(tokens) == 12:
                log_probs = log_probs.where(torch.arange(len(log_probs)) == SEP, -torch.inf)
            elif len(tokens) == 1:
                log_probs[SEP] = -torch.inf  # `min_len` is 1
            scores.append(log_probs.max())
            tokens.append(int(log_probs.argmax()))
        assert hypothesis["tokens"].tolist() == tokens[1:]
        torch.testing.assert_close(hypothesis["positional_scores"], torch.stack(scores), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_scores_of_beam_search_are_those_of_the_plain_computation(strict):
    args = arguments()
    model = model_of(args, seed=1)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(2, 7)
    found = generator_for([model], beam_size=3, max_len_b=24).generate([], sample)
    assert max(len(hypothesis["tokens"]) for hypotheses in found for hypothesis in hypotheses) > 20
    for source, hypotheses in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        encoded = reference.encode(source)
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            log_probs = reference.decode(encoded, [SEP, *tokens[:-1].tolist()])[0].log_softmax(1)
            expected = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 16), (2, 3)])
def test_buckets(buckets, furthest):
    reference = Reference({}, Namespace(num_buckets=buckets, relative_max_distance=furthest), PAD)
    found = attention.distance_buckets(torch.arange(-2, 600), buckets, furthest).tolist()
    assert found == [reference.bucket(max(distance, 0)) for distance in range(-2, 600)]


def test_gradients_are_those_of_the_plain_computation():
    args = arguments(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, share_all_embeddings=False)
    model = model_of(args).train()
    words = dictionary()
    sample = training_sample()
    criterion = NgramLanguageLoss(SimpleNamespace(target_dictionary=words), label_smoothing=0.1)
    loss, size, logged = criterion(model, sample)
    loss.backward()
    assert size == 2 * int(sample["target"].ne(PAD).sum()) == logged["sample_size"]

    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.state_dict().items()}
    reference = Reference(leaves, args, PAD)
    expected = torch.zeros(())
    inputs = sample["net_input"]
    for source, before, target in zip(
        rows(inputs["src_tokens"]), inputs["prev_output_tokens"], sample["target"], strict=True
    ):
        target = target[target != PAD]
        log_probs = reference.decode(reference.encode(source), before[: len(target)].tolist()).log_softmax(2)
        expected = expected - 0.9 * log_probs[:, range(len(target)), target].sum() - 0.1 * log_probs.mean(2).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-5)
    for name, parameter in model.named_parameters():
        # This layer's parameter has another name in checkpoints, and both tables of the decoder are one.
        stored = name.replace("in_proj.", "in_proj_")
        torch.testing.assert_close(
            parameter.grad, leaves[stored].grad, atol=2e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def training_sample() -> dict[str, Any]:
    inputs = sources(3, 8)["net_input"]
    target = torch.randint(4, 4 + WORDS, (3, 6))
    target[0, 5], target[1, 2], target[1, 3:], target[2, 4], target[2, 5:] = SEP, SEP, PAD, SEP, PAD
    before = torch.cat([torch.full((3, 1), SEP), target[:, :-1]], dim=1).masked_fill_(target == PAD, PAD)
    return {
        "net_input": {**inputs, "prev_output_tokens": before},
        "target": target,
        "ntokens": int(target.ne(PAD).sum()),
        "nsentences": 3,
    }


@torch.no_grad()
def test_the_loss_without_the_ngrams_is_that_of_the_next_token():
    model = model_of(arguments()).eval()
    sample = training_sample()
    words = SimpleNamespace(target_dictionary=dictionary())
    loss, size, _ = NgramLanguageLoss(words, disable_ngram_loss=True)(model, sample)
    scores = model(**sample["net_input"])[0][0]
    assert size == sample["ntokens"]
    torch.testing.assert_close(
        loss, F.cross_entropy(scores.transpose(1, 2), sample["target"], ignore_index=PAD, reduction="sum")
    )


@torch.no_grad()
def test_other_criteria_get_the_next_token():
    model = model_of(arguments())
    sample = training_sample()
    criterion = cross_entropy.CrossEntropyCriterion(SimpleNamespace(target_dictionary=dictionary()), False)
    scores = model(**sample["net_input"])[0][0]
    expected = F.cross_entropy(scores.transpose(1, 2), sample["target"], ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(criterion(model, sample)[0], expected)


# ---- against Transformers' port

_PORT = {
    "self_attn_layer_norm": "self_attn_layer_norm",
    "cross_attn_layer_norm": "encoder_attn_layer_norm",
    "feed_forward_layer_norm": "final_layer_norm",
    "feed_forward.intermediate": "fc1",
    "feed_forward.output": "fc2",
    "cross_attn": "encoder_attn",
    "self_attn.relative_pos_embeddings": "ngram_self_attn.relative_linear",
    "query_proj": "q_proj",
    "key_proj": "k_proj",
    "value_proj": "v_proj",
    "word_embeddings": "embed_tokens",
    "position_embeddings": "embed_positions",
    "ngram_embeddings": "ngram_input_embed",
    "embeddings_layer_norm": "emb_layer_norm",
}


def from_port(port: Any) -> dict[str, Tensor]:
    """The weights of Transformers' ProphetNet under the names of the authors' checkpoints."""
    state = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for name, weight in port.state_dict().items():
        side, _, rest = name.removeprefix("prophetnet.").partition(".")
        if side not in ("encoder", "decoder"):
            continue
        for theirs, ours in _PORT.items():
            rest = rest.replace(theirs, ours, 1) if f".{theirs}." in f".{rest}" else rest
        if side == "decoder":
            rest = rest.replace(".self_attn.", ".ngram_self_attn.")
        state[f"{side}.{rest}"] = weight
    for layer in range(port.config.num_decoder_layers):
        name = f"decoder.layers.{layer}.ngram_self_attn"
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{name}.{part}_proj.{kind}") for part in "qkv"]
            state[f"{name}.in_proj_{kind}"] = torch.cat(parts)
    return state


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_scores_are_those_of_the_port_in_transformers(seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.ProphetNetConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
        num_buckets=8,
        relative_max_distance=16,
        init_std=0.3,
        pad_token_id=PAD,
        ngram=2,
    )
    port = transformers.ProphetNetForConditionalGeneration(config).eval()
    model = ProphetNetModel.build_model(arguments(max_source_positions=63, max_target_positions=62), task()).eval()
    model.load_state_dict(from_port(port))
    sources_ = sources(3, 15, left_pad=False, seed=seed)["net_input"]["src_tokens"]
    targets = torch.randint(4, 4 + WORDS, (3, 30))
    encoded, state = model.encoder(sources_), {}
    hidden = port.get_encoder()(input_ids=sources_, attention_mask=(sources_ != PAD).long())
    known = sources_ != PAD
    torch.testing.assert_close(
        encoded["encoder_out"][0].transpose(0, 1)[known], hidden.last_hidden_state[known], atol=1e-4, rtol=1e-4
    )
    cache = None
    # Token by token: over several at once the port mixes up positions and streams of its relative terms.
    for step in range(targets.shape[1]):
        theirs = port(
            encoder_outputs=hidden,
            attention_mask=known.long(),
            decoder_input_ids=targets[:, step : step + 1],
            past_key_values=cache,
            use_cache=True,
        )
        cache = theirs.past_key_values
        ours, _ = model.decoder(targets[:, : step + 1], encoded, incremental_state=state)
        torch.testing.assert_close(ours[:, -1], theirs.logits[:, -1], atol=1e-4, rtol=1e-4)


# ---- with FastGen and without


@pytest.fixture(scope="module")
def pool() -> dict[str, Any]:
    return {name: model_of(arguments(**changes), seed=2) for name, changes in VARIANTS.items()}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hypotheses_are_the_same(pool, strict, options):
    check(lambda: generator_for([pool["two streams"]], **options), sources(5))
    assert accelerated() == 1


@pytest.mark.parametrize("shape", [(1, 5), (7, 40), (3, 90)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_and_sources_of_all_shapes(pool, strict, variant, shape):
    check(lambda: generator_for([pool[variant]], beam_size=4, max_len_b=40), sources(*shape, left_pad=False))
    assert accelerated() == 1


def test_ensembles_prefixes_and_half_precision(pool, strict):
    pair = [pool["two streams"], pool["three streams"]]
    check(lambda: generator_for(pair, beam_size=4), sources(5, 50))
    check(
        lambda: generator_for(pair[:1], beam_size=3), sources(3), prefix_tokens=torch.tensor([[5, 6], [7, 2], [8, 0]])
    )
    half = model_of(arguments()).bfloat16()
    assert len(generator_for([half], beam_size=2).generate([], sources(3, 40))) == 3
    assert accelerated() == 3


@torch.no_grad()
def test_attention_to_the_source_is_that_of_the_stream_of_the_next_token(strict):
    args = arguments()
    model = model_of(args)
    plain = generator_for([model], beam_size=3).generate([], sources(3))
    assert plain[0][0]["attention"].numel() == 0  # as with the authors' code, only when asked for
    model.make_generation_fast_(need_attn=True)
    sample = sources(3, left_pad=False)
    found = check(lambda: generator_for([model], SequenceGeneratorWithAlignment, beam_size=3), sample)
    reference = Reference(model.state_dict(), args, PAD)
    for source, hypotheses in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        tokens = hypotheses[0]["tokens"].tolist()
        _, expected = reference.decode_and_look(reference.encode(source), [SEP, *tokens[:-1]])
        have = hypotheses[0]["attention"][: len(source)]
        torch.testing.assert_close(have, expected.T, atol=1e-4, rtol=1e-4)


def test_one_predicting_stream_is_computed_in_a_step():
    model = model_of(arguments(ngram=3))
    encoded = model.encoder(**sources(2)["net_input"])
    seen = []
    model.decoder.layers[0].register_forward_hook(lambda layer, args, output: seen.append(args[0].shape[0]))
    model.decoder(torch.full((2, 1), 9), encoded, incremental_state={})
    model.decoder(torch.full((2, 5), 9), encoded)
    assert seen == [2, 4 * 5]  # the main stream and one besides it, against all for all positions


class OwnDecoder(ProphetNetDecoder):
    def extract_features(self, *args: Any, **kwargs: Any) -> Any:
        return super().extract_features(*args, **kwargs)


def test_what_is_not_known_falls_back():
    model = model_of(arguments())
    model.decoder.__class__ = OwnDecoder
    check(lambda: generator_for([model], beam_size=2), sources(2))
    assert not accelerated() and fallbacks() == {"OwnDecoder has a extract_features of its own": 1}
    fastgen.reset_stats()
    model.decoder.__class__ = ProphetNetDecoder
    attention_ = model.decoder.layers[1].ngram_self_attn
    attention_.extend = lambda *args, original=attention_.extend: original(*args)
    generator_for([model], beam_size=2).generate([], sources(2))
    assert fallbacks() == {"attention of type NgramSelfAttention": 1}


# ---- checkpoints

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
    """Arguments as FairSeq 0.9 saved them with a model that was fine-tuned by the authors' instructions."""
    saved = {
        "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-08, "arch": "ngram_transformer_prophet_large",
        "best_checkpoint_metric": "loss", "bpe": None, "bucket_cap_mb": 25, "clip_norm": 0.1, "cpu": False,
        "criterion": "ngram_language_loss", "curriculum": 0, "data": "cnndm/processed", "dataset_impl": None,
        "ddp_backend": "no_c10d", "device_id": 0, "disable_ngram_loss": False, "disable_validation": False,
        "distributed_backend": "nccl", "distributed_init_method": "tcp://localhost:15000",
        "distributed_no_spawn": False, "distributed_port": -1, "distributed_rank": 0, "distributed_world_size": 8,
        "empty_cache_freq": 0, "fast_stat_sync": False, "find_unused_parameters": False, "fix_batches_to_gpus": False,
        "fixed_validation_seed": None, "fp16": True, "fp16_init_scale": 128, "fp16_scale_tolerance": 0.0,
        "fp16_scale_window": None, "keep_interval_updates": -1, "keep_last_epochs": 10, "label_smoothing": 0.1,
        "lazy_load": False, "left_pad_source": "True", "left_pad_target": "False", "load_alignments": False,
        "load_from_pretrained_model": None, "load_sep": True, "log_format": None, "log_interval": 1000,
        "lr": [0.0001], "lr_scheduler": "inverse_sqrt", "max_epoch": 10, "max_sentences": 2,
        "max_sentences_valid": 2, "max_tokens": None, "max_tokens_valid": None, "max_update": 0,
        "maximize_best_checkpoint_metric": False, "memory_efficient_fp16": False, "min_loss_scale": 0.0001,
        "min_lr": -1, "no_epoch_checkpoints": False, "no_last_checkpoints": False, "no_progress_bar": False,
        "no_save": False, "no_save_optimizer_state": False, "num_workers": 4, "optimizer": "adam",
        "optimizer_overrides": "{}", "raw_text": False, "required_batch_size_multiple": 8, "reset_dataloader": False,
        "reset_lr_scheduler": False, "reset_meters": False, "reset_optimizer": False,
        "restore_file": "checkpoint_last.pt", "save_dir": "cnndm/finetune", "save_interval": 1,
        "save_interval_updates": 0, "seed": 1, "sentence_avg": False, "skip_invalid_size_inputs_valid_test": True,
        "source_lang": "src", "target_lang": "tgt", "task": "translation_prophetnet",
        "tensorboard_logdir": "cnndm/tensorboard", "threshold_loss_scale": None, "tokenizer": None,
        "train_subset": "train", "truncate_source": False, "update_freq": [32], "upsample_primary": 1,
        "use_bmuf": False, "user_dir": "./prophetnet", "valid_subset": "valid", "validate_interval": 1,
        "warmup_init_lr": 1e-07, "warmup_updates": 1000, "weight_decay": 0.01,
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


# ---- dictionary, architectures, registration


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


def test_architectures_are_the_published_shapes():
    def shape(name: str, **given: Any) -> tuple[Any, ...]:
        args = Namespace(**given)
        models.ARCH_CONFIG_REGISTRY[f"ngram_transformer_prophet{name}"](args)
        return (
            args.decoder_embed_dim,
            args.encoder_ffn_embed_dim,
            args.decoder_layers,
            args.encoder_attention_heads,
            args.activation_fn,
            args.share_all_embeddings,
            args.ngram,
        )

    assert shape("") == (512, 2048, 6, 8, "relu", False, 2)
    assert shape("_base") == (768, 3072, 6, 12, "gelu", True, 2)
    assert shape("_middle") == (1024, 4096, 6, 16, "gelu", True, 2)
    assert shape("_large") == (1024, 4096, 12, 16, "gelu", True, 2)
    assert shape("_large", ngram=3, decoder_layers=2)[2::4] == (2, 3)


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
def test_registered_once_and_the_authors_own_code_comes_first(code):
    python(code)


# ---- the whole way


def test_from_text_to_a_trained_model_to_its_output(tmp_path, capsys):
    """A model that is taught to copy does so, through FairSeq's own commands."""
    words = [f"w{i}" for i in range(6)]
    lines = [" ".join(words[(i * k + k) % 6] for k in range(1, 4)) for i in range(6)]
    for language in ("src", "tgt"):
        for split in ("train", "valid"):
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    split = ["--trainpref", str(tmp_path / "train"), "--validpref", str(tmp_path / "valid"), "--joined-dictionary"]
    languages = ["-s", "src", "-t", "tgt"]
    binary, saved = str(tmp_path / "binary"), str(tmp_path / "saved")
    preprocess = ["--task", "translation_prophetnet", *languages, *split, "--destdir", binary, "--workers", "1"]
    preprocess_command.main(options.get_preprocessing_parser().parse_args(preprocess))
    train = [
        binary, *languages, "--task", "translation_prophetnet", "--arch", "ngram_transformer_prophet_base",
        "--criterion", "ngram_language_loss", "--optimizer", "adam", "--lr", "0.003", "--max-sentences", "6",
        "--max-update", "120", "--cpu", "--save-dir", saved, "--num-workers", "0", "--no-progress-bar",
        "--no-epoch-checkpoints", "--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0",
        "--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "32", "--decoder-embed-dim", "32",
        "--encoder-ffn-embed-dim", "64", "--decoder-ffn-embed-dim", "64", "--encoder-attention-heads", "4",
        "--decoder-attention-heads", "4", "--disable-validation", "--required-batch-size-multiple", "1",
    ]  # fmt: skip
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=train)
    train_command.main(convert_namespace_to_omegaconf(args))
    fastgen.enable(strict=True)
    generate = [binary, *languages, "--path", f"{saved}/checkpoint_last.pt", "--gen-subset", "valid", "--beam", "3"]
    generate += [
        "--task",
        "translation_prophetnet",
        "--cpu",
        "--num-workers",
        "0",
        "--required-batch-size-multiple",
        "1",
    ]
    parser = options.get_generation_parser()
    capsys.readouterr()
    generate_command.main(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=generate)))
    output = capsys.readouterr().out
    assert accelerated() >= 1
    assert {line.split("\t")[2] for line in output.splitlines() if line.startswith("H-")} == set(lines)
