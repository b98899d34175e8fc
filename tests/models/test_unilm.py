"""UniLM against a computation of its own: all positions anew at every step, without cache, batch or padding."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, StaticCache

import fastgen
from fastgen import releases
from fastgen.decoding.kv import growing as kv
from fastgen.models.unilm import UniLMConfig, UniLMForSeq2SeqLM
from tests.models.tiny_unilm import CLS, PAD, SEP, SHAPE, VOCABULARY, batch, plain_logits, sources, tiny_model

LENGTHS = (12, 40, 7, 33)


@pytest.fixture(params=["plain", "with FastGen"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """On the library's own code and on FastGen's, which shares a prefix however small."""
    monkeypatch.setattr(kv, "MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(kv, "MIN_SHARED_PREFIX", 1)
    fastgen.enable()
    with fastgen.disabled() if request.param == "plain" else nullcontext():
        yield request.param


both_ways = pytest.mark.usefixtures("way")


def plain_greedy(model: UniLMForSeq2SeqLM, source: list[int], steps: int) -> list[int]:
    target: list[int] = []
    while len(target) < steps and SEP not in target:
        target.append(int(plain_logits(model, source, target).argmax()))
    return target


def targets(generated: Tensor) -> list[list[int]]:
    """What `generate` returned, without the start token and the padding behind the end."""
    rows = []
    for row in generated.tolist():
        assert row[0] == PAD
        row = row[1:]
        rows.append(row[: row.index(SEP) + 1] if SEP in row else row)
    return rows


@both_ways
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_of_each_step(side: str, use_cache: bool) -> None:
    model, rows = tiny_model(), sources(*LENGTHS)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    result = model.generate(**batch(rows, side), **options, use_cache=use_cache)
    made = result.sequences[:, 1:].tolist()
    for step, logits in enumerate(result.logits):
        for row, source in enumerate(rows):
            expected = plain_logits(model, source, made[row][:step])
            torch.testing.assert_close(logits[row].double(), expected, atol=2e-4, rtol=0)
    assert len({tuple(row) for row in made}) == len(rows), "the model says the same for every source"


@both_ways
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy(side: str) -> None:
    model, rows = tiny_model(end=3.0), sources(*LENGTHS)
    expected = [plain_greedy(model, source, 12) for source in rows]
    assert len({len(row) for row in expected}) > 1, "all targets end at the same step"
    assert targets(model.generate(**batch(rows, side), max_new_tokens=12)) == expected


@both_ways
def test_beam_search_that_keeps_everything_finds_the_best() -> None:
    words = 12
    model = tiny_model(vocab_size=words)
    rows = [[CLS, *(token % 8 + 4 for token in row[1:-1]), SEP] for row in sources(9, 35)]
    found = model.generate(**batch(rows), num_beams=words, max_new_tokens=2, min_new_tokens=2)
    for row, source in zip(found.tolist(), rows, strict=True):
        first = plain_logits(model, source, []).log_softmax(-1)
        scores = {}
        for one, two in itertools.product(range(words), range(words)):
            if SEP not in (one, two):  # an end is banned for two tokens
                second = plain_logits(model, source, [one]).log_softmax(-1)
                scores[one, two] = float(first[one] + second[two])
        assert tuple(row[1:]) == max(scores, key=scores.__getitem__)


@both_ways
def test_samples_are_drawn_from_the_scores() -> None:
    model, rows, steps = tiny_model(), sources(8, 36), 6
    torch.manual_seed(5)
    drawn = {"do_sample": True, "top_k": 0, "temperature": 1.5, "num_return_sequences": 3}
    found = model.generate(**batch(rows), **drawn, max_new_tokens=steps, min_new_tokens=steps)
    torch.manual_seed(5)
    made: list[list[int]] = [[] for _ in range(6)]
    for _ in range(steps):
        logits = torch.stack([plain_logits(model, rows[row // 3], made[row]) for row in range(6)]).float()
        logits[:, SEP] = -torch.inf
        chosen = torch.multinomial((logits / 1.5).softmax(-1), 1).squeeze(1)
        for row, token in zip(made, chosen.tolist(), strict=True):
            row.append(token)
    assert found[:, 1:].tolist() == made
    assert len({tuple(row) for row in made}) == 6


@both_ways
def test_an_end_at_the_first_step() -> None:
    model = tiny_model(end=100.0)
    for options in ({}, {"num_beams": 3}, {"do_sample": True}):
        assert model.generate(**batch(sources(9, 34)), max_new_tokens=5, **options)[:, :2].tolist() == [[PAD, SEP]] * 2


@both_ways
def test_a_target_that_is_given_is_continued() -> None:
    model, rows = tiny_model(), sources(10, 35)
    start = torch.tensor([[PAD, 20, 21, 22], [PAD, 30, 31, 32]])
    found = model.generate(**batch(rows), decoder_input_ids=start, max_new_tokens=3, min_new_tokens=3, num_beams=1)
    for row, source in zip(found.tolist(), rows, strict=True):
        for step in range(4, 7):
            assert row[step] == int(plain_logits(model, source, row[1:step])[4:].argmax()) + 4


def test_several_tokens_behind_a_cache() -> None:
    model, (source,) = tiny_model(), sources(11)
    with torch.no_grad():
        output = model(torch.tensor([source]), decoder_input_ids=torch.tensor([[PAD, 9]]))
        cache = releases.with_cache(releases.cache_in(output))
        output = model(torch.tensor([source]), decoder_input_ids=torch.tensor([[8, 7]]), **cache)
    assert releases.cache_in(output).get_seq_length() == len(source) + 3
    torch.testing.assert_close(output.logits[0, 0].double(), plain_logits(model, source, [9, 8, 7]), atol=2e-4, rtol=0)


@both_ways
def test_what_a_tokenizer_of_bert_gives() -> None:
    model, inputs = tiny_model(), batch(sources(10, 30))
    expected = model.generate(**inputs, max_new_tokens=6, num_beams=2)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    assert model.generate(**inputs, max_new_tokens=6, num_beams=2).tolist() == expected.tolist()


def test_attentions_and_hidden_states() -> None:
    model, rows = tiny_model(attn_implementation="eager"), sources(6, 9)
    targets, returned = torch.tensor([[PAD, 8], [PAD, 9]]), {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        output = model(**batch(rows), decoder_input_ids=targets, **returned)
    assert [states.shape for states in output.decoder_hidden_states] == [(2, 11, 32)] * 4
    for weights in output.decoder_attentions:
        assert weights.shape == (2, 4, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 11))
        assert not weights[:, :, :9, 9:].any(), "the source sees the target"
        assert not weights[:, :, 9, 10:].any(), "the target sees what comes"
        assert not weights[0, :, :, 6:9].any(), "padding is seen"
        assert weights[1, :, 10, :].all(), "the [MASK] does not see everything"


# ---- configuration, saving, loading


def test_shapes_of_the_paper() -> None:
    with torch.device("meta"):
        base, large = UniLMForSeq2SeqLM(UniLMConfig()), UniLMForSeq2SeqLM(UniLMConfig.large())
    # BERT's, cased and without the pooler, with six segments and the head for masked words.
    assert sum(parameter.numel() for parameter in base.parameters()) == 108_343_876
    assert sum(parameter.numel() for parameter in large.parameters()) == 333_614_404
    assert (large.config.num_hidden_layers, large.config.num_attention_heads) == (24, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size \\(30\\) is not a multiple of num_attention_heads \\(4\\)"),
        ({"type_vocab_size": 2}, "source_type_id is 4, but type_vocab_size is 2"),
        ({"mask_token_id": 60}, "mask_token_id is 60, but vocab_size is 60"),
    ],
)
def test_a_configuration_that_does_not_fit_together(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UniLMForSeq2SeqLM(UniLMConfig(**SHAPE | changes))


def test_saved_and_loaded(tmp_path) -> None:
    model, inputs = tiny_model(source_type_id=1, target_type_id=3), batch(sources(10, 30))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is UniLMConfig and (config.source_type_id, config.target_type_id) == (1, 3)
    expected = model.generate(**inputs, num_beams=3, max_new_tokens=6).tolist()
    for kind in (UniLMForSeq2SeqLM, AutoModelForSeq2SeqLM):
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is UniLMForSeq2SeqLM
        assert loaded.generate(**inputs, num_beams=3, max_new_tokens=6).tolist() == expected
        for name, value in model.state_dict().items():
            assert torch.equal(value, loaded.state_dict()[name]), name
        head = loaded.cls["predictions"]
        assert head.decoder.weight is loaded.get_input_embeddings().weight and head.decoder.bias is head.bias
    # The file has the published names.
    assert UniLMForSeq2SeqLM.from_published(tmp_path, **_tokens(), source_type_id=1, target_type_id=3).config.vocab_size


def test_more_tokens() -> None:
    model, (source,) = tiny_model(), sources(9)
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    with torch.no_grad():
        logits = model(torch.tensor([source])).logits[0, 0]
    torch.testing.assert_close(logits.double(), plain_logits(model, source, []), atol=2e-4, rtol=0)
    assert len(logits) == VOCABULARY + 5
    model.set_output_embeddings(torch.nn.Linear(32, VOCABULARY + 5))
    assert model.cls["predictions"].bias is model.get_output_embeddings().bias


# ---- the authors' checkpoints


def _tokens() -> dict[str, int]:
    """What no checkpoint tells: the special tokens and, for want of 64 dimensions, the heads."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id", "num_attention_heads")
    return {name: SHAPE[name] for name in names}


def _published(types: int = 6, layers: int = 2) -> dict[str, Tensor]:
    """A state dict with the names and shapes of UniLM v1's, pooler and sentence head included."""
    torch.manual_seed(0)
    width, inner = 32, 64
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (VOCABULARY, width),
        "bert.embeddings.position_embeddings.weight": (48, width),
        "bert.embeddings.token_type_embeddings.weight": (types, width),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    norm("bert.embeddings.LayerNorm")
    for index in range(layers):
        layer = f"bert.encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}.attention.{name}", width, width)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, width)
        linear(f"{layer}.output.dense", width, inner)
        norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", width, width)
    shapes["cls.predictions.bias"] = (VOCABULARY,)
    linear("cls.predictions.transform.dense", width, width)
    norm("cls.predictions.transform.LayerNorm")
    linear("cls.seq_relationship", 2, width)
    weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    return weights


def _load(path: Path, weights: Any, **options: Any) -> UniLMForSeq2SeqLM:
    """The model of a file with these weights."""
    torch.save(weights, path)
    return UniLMForSeq2SeqLM.from_published(path, **_tokens() | options)


def _assert_loaded(model: UniLMForSeq2SeqLM, weights: dict[str, Tensor]) -> None:
    found = model.state_dict()
    used = {name for name in weights if "pooler" not in name and "seq_relationship" not in name}
    for name in used:
        assert torch.equal(found[name], weights[name]), name
    assert set(found) - used == {"cls.predictions.decoder.bias"}, "weights that come from nowhere"
    (source,) = sources(13)
    with torch.no_grad():
        logits = model(torch.tensor([source]), decoder_input_ids=torch.tensor([[PAD, 8, 9]])).logits[0, 0]
    torch.testing.assert_close(logits.double(), plain_logits(model, source, [8, 9]), atol=2e-4, rtol=0)
    assert not model.training


def test_a_file_of_unilm_v1(tmp_path) -> None:
    weights = _published()
    model = _load(tmp_path / "unilm1.bin", weights)
    _assert_loaded(model, weights)
    config = model.config
    assert (config.source_type_id, config.target_type_id, config.layer_norm_eps) == (4, 5, 1e-5)
    assert (config.num_hidden_layers, config.intermediate_size, config.max_position_embeddings) == (2, 64, 48)
    tokens = {name: value for name, value in _tokens().items() if name != "num_attention_heads"}
    # Heads are 64 wide unless something says otherwise.
    assert UniLMForSeq2SeqLM.from_published(tmp_path / "unilm1.bin", **tokens).config.num_attention_heads == 1


@pytest.mark.parametrize("found", [{}, {"source_type_id": 3, "target_type_id": 2}])
def test_a_directory_of_s2s_ft(tmp_path, found: dict) -> None:
    weights = _published()
    saved = {name: value for name, value in weights.items() if not name.startswith(("bert.pooler", "cls.seq"))}
    saved["cls.predictions.decoder_weight"] = saved.pop("cls.predictions.decoder.weight")
    saved["crit_mask_lm_smoothed.one_hot"] = torch.zeros(1, VOCABULARY)
    torch.save(saved, tmp_path / "pytorch_model.bin")
    config = {"num_attention_heads": 4, "hidden_act": "relu", "layer_norm_eps": 1e-12, "type_vocab_size": 6, **found}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = {name: value for name, value in _tokens().items() if name != "num_attention_heads"}
    model = UniLMForSeq2SeqLM.from_published(tmp_path, **tokens, hidden_act="gelu")
    _assert_loaded(model, weights)
    assert (model.config.source_type_id, model.config.target_type_id) == ((3, 2) if found else (0, 1))
    assert (model.config.num_attention_heads, model.config.layer_norm_eps) == (4, 1e-5)
    assert UniLMForSeq2SeqLM.from_published(tmp_path, **tokens).config.hidden_act == "relu"


def test_a_bert_in_half_precision_with_its_oldest_names(tmp_path) -> None:
    weights = {name: value.half() for name, value in _published(types=2).items()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    model = _load(tmp_path / "weights.bin", old)
    _assert_loaded(model, {name: value.float() for name, value in weights.items()})
    assert (model.config.source_type_id, model.config.target_type_id) == (0, 1)


def test_one_matrix_for_query_key_and_value(tmp_path) -> None:
    """As in the pre-trained files that s2s-ft converts when it reads them. They have no bias of the key."""
    weights = _published()
    fused = dict(weights)
    for layer in range(2):
        prefix = f"bert.encoder.layer.{layer}.attention.self."
        weights[f"{prefix}key.bias"].zero_()
        parts = [fused.pop(f"{prefix}{part}.weight") for part in ("query", "key", "value")]
        fused[f"{prefix}qkv_linear.weight"] = torch.cat(parts)
        fused[f"{prefix}q_bias"], fused[f"{prefix}v_bias"] = (
            fused.pop(f"{prefix}{part}.bias").view(1, 1, -1) for part in ("query", "value")
        )
        del fused[f"{prefix}key.bias"]
    _assert_loaded(_load(tmp_path / "unilm1.2.bin", fused), weights)


@pytest.mark.parametrize("length", [20, 48, 110])
def test_more_positions_and_fewer(tmp_path, length: int) -> None:
    weights = _published()
    model = _load(tmp_path / "weights.bin", weights, max_position_embeddings=length)
    old = weights["bert.embeddings.position_embeddings.weight"]
    assert torch.equal(model.bert["embeddings"].position_embeddings.weight, torch.cat([old] * 3)[:length])


def _without(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: _without(w, "layer.1.output.dense") | {"bert.rel_pos_bias.weight": torch.zeros(12, 32)},
            "missing: bert.encoder.layer.1.output.dense.weight, bert.encoder.layer.1.output.dense.bias; "
            "unknown: bert.rel_pos_bias.weight$",
        ),
        (
            lambda w: w | {"cls.predictions.transform.dense.weight": torch.zeros(128, 32)},
            "of another shape: cls.predictions.transform.dense.weight \\[128, 32\\] instead of \\[32, 32\\]$",
        ),
        (lambda w: _without(w, "layer.1.attention"), "missing: .* and 6 more$"),
        (
            lambda w: w | {"cls.predictions.decoder.weight": torch.zeros(VOCABULARY, 32)},
            "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight",
        ),
        (lambda w: _without(w, "bert."), "is not a UniLM: it has no bert.embeddings.word_embeddings.weight$"),
        (lambda w: {"model": w}, "is not a file of tensors by name"),
    ],
)
def test_weights_that_are_not_those_of_a_unilm(tmp_path, change, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _load(tmp_path / "weights.bin", change(_published()))
    assert "\n" not in str(caught.value)


class _Command:
    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


@pytest.mark.parametrize("name", ["weights.bin", "weights.safetensors", "code.bin"])
def test_files_that_hold_no_tensors(tmp_path, name: str) -> None:
    """Code in a checkpoint is not run."""
    (tmp_path / name).write_bytes(b"not a checkpoint")
    if name == "code.bin":
        torch.save({"bert": _Command(str(tmp_path / "made"))}, tmp_path / name)
    with pytest.raises(ValueError, match="is not a file of tensors: ") as caught:
        UniLMForSeq2SeqLM.from_published(tmp_path / name)
    assert "\n" not in str(caught.value) and not (tmp_path / "made").exists()


def test_paths_without_weights(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        UniLMForSeq2SeqLM.from_published(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no weights: expected model.safetensors or pytorch_model.bin"):
        UniLMForSeq2SeqLM.from_published(tmp_path)
    torch.save(_published(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not a configuration"):
        UniLMForSeq2SeqLM.from_published(tmp_path)


# ---- what cannot be done


@both_ways
def test_more_positions_than_there_are() -> None:
    model, rows = tiny_model(max_position_embeddings=32), sources(30, 8)
    with pytest.raises(ValueError, match="have 33 positions together, but the model has 32"):
        model.generate(**batch(rows), max_new_tokens=6, min_new_tokens=6)
    with pytest.raises(ValueError, match="have 35 positions together"):
        model.generate(**batch(sources(35)), max_new_tokens=1)
    # Padding takes no positions.
    inputs = {name: torch.nn.functional.pad(value, (0, 30)) for name, value in batch(rows[1:]).items()}
    assert targets(model.generate(**inputs, max_new_tokens=6)) == [plain_greedy(model, rows[1], 6)]


def test_a_mask_or_a_cache_that_does_not_fit() -> None:
    model, inputs = tiny_model(), batch(sources(9))
    with pytest.raises(ValueError, match=r"the attention mask is \[1, 8\] for a source of \[1, 9\]"):
        model(
            **{**inputs, "attention_mask": torch.ones(1, 8)}, encoder_outputs=model.get_encoder()(inputs["input_ids"])
        )
    with pytest.raises(ValueError, match='attn_implementation="eager" only'):
        model(**inputs, output_attentions=True)
    with pytest.raises(ValueError, match="needs the source"):
        model(decoder_input_ids=torch.tensor([[PAD]]))
    with pytest.raises(ValueError, match="a StaticCache cannot do that"):
        model(**inputs, **releases.with_cache(StaticCache(config=model.config, max_cache_len=32)))
