"""GGUF files whose blocks are kept, against what the library makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import fastgen
from benchmarks import smollm2
from fastgen import settings
from fastgen.optimizer.transformers.quantized.replacing import QuantizedConv1D
from fastgen.quantization.formats import BLOCK_TYPES
from fastgen.quantization.layers import QuantizedWeight
from tests.noting import noted
from tests.optimizer.transformers.quantized.checkpoints import VOCABULARY, inputs_of
from tests.quantization.definitions import random_blocks

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("transformers.quantizers.quantizer_gguf")  # which releases before 5.17 lack

ENTRY_POINT = "transformers.from_pretrained"
HIDDEN, INNER, LAYERS, HEADS = 256, 512, 2, 4
TYPES = tuple(kind.name for kind in BLOCK_TYPES.values())


@pytest.fixture(autouse=True)
def blocks_are_kept() -> Iterator[None]:
    fastgen.reset_stats()
    with settings.changed(keep_bits=True):
        yield


class Writer:
    """A GGUF file with a tiny model, whose weights are of these types by turns."""

    def __init__(self, file: Path, architecture: str, types: tuple[str, ...], vocabulary: int = VOCABULARY) -> None:
        self.writer = gguf.GGUFWriter(file, architecture)
        self.types, self.count, self.vocabulary = types, 0, vocabulary
        self.writer.add_block_count(LAYERS)
        self.writer.add_context_length(64)
        self.writer.add_embedding_length(HIDDEN)
        self.writer.add_feed_forward_length(INNER)
        self.writer.add_head_count(HEADS)
        self.writer.add_vocab_size(vocabulary)

    def blocks(self, name: str, rows: int, inputs: int) -> None:
        kind = self.types[self.count % len(self.types)]
        self.count += 1
        data = random_blocks(kind, rows, inputs).numpy()
        self.writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def tokens(self, tokenizer: Any) -> None:
        """Of a byte-pair tokenizer, whose first four tokens are the beginning, padding, the end, and the unknown."""
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
        self.writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (self.vocabulary - 4))
        self.writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
        self.writer.add_bos_token_id(0)
        self.writer.add_pad_token_id(1)
        self.writer.add_eos_token_id(2)

    def floats(self, name: str, *shape: int, around: float = 0.0) -> None:
        self.writer.add_tensor(name, (around + torch.randn(shape) * 0.02).numpy())

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_llama(
    file: Path, types: tuple[str, ...] = TYPES, *, tied: bool = True, kv_heads: int = 2, tokenizer: Any = None
) -> None:
    writer = Writer(file, "llama", types, len(tokenizer) if tokenizer else VOCABULARY)
    if tokenizer:
        writer.tokens(tokenizer)
    writer.writer.add_head_count_kv(kv_heads)
    writer.writer.add_layer_norm_rms_eps(1e-5)
    writer.writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.blocks("token_embd", writer.vocabulary, HIDDEN)
    for layer in range(LAYERS):
        keys = HIDDEN // HEADS * kv_heads
        sizes = {"q": (HIDDEN, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN), "output": (HIDDEN, HIDDEN)}
        for name, (rows, inputs) in sizes.items():
            writer.blocks(f"blk.{layer}.attn_{name}", rows, inputs)
        writer.blocks(f"blk.{layer}.ffn_gate", INNER, HIDDEN)
        writer.blocks(f"blk.{layer}.ffn_up", INNER, HIDDEN)
        writer.blocks(f"blk.{layer}.ffn_down", HIDDEN, INNER)
        for norm in ("attn_norm", "ffn_norm"):
            writer.floats(f"blk.{layer}.{norm}.weight", HIDDEN, around=1.0)
    writer.floats("output_norm.weight", HIDDEN, around=1.0)
    if not tied:
        writer.blocks("output", writer.vocabulary, HIDDEN)
    writer.close()


def write_gpt2(file: Path, types: tuple[str, ...] = TYPES) -> None:
    writer = Writer(file, "gpt2", types)
    writer.writer.add_layer_norm_eps(1e-5)
    writer.blocks("token_embd", VOCABULARY, HIDDEN)
    # The library takes the size of the vocabulary from here, and has 1024 positions.
    writer.writer.add_tokenizer_model("gpt2")
    writer.writer.add_token_list([f"token{number}" for number in range(VOCABULARY)])
    writer.floats("position_embd.weight", 1024, HIDDEN)
    for layer in range(LAYERS):
        for name, rows, inputs in (
            ("attn_qkv", 3 * HIDDEN, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_up", 4 * HIDDEN, HIDDEN),
            ("ffn_down", HIDDEN, 4 * HIDDEN),
        ):
            writer.blocks(f"blk.{layer}.{name}", rows, inputs)
            writer.floats(f"blk.{layer}.{name}.bias", rows)
        for norm in ("attn_norm", "ffn_norm"):
            writer.floats(f"blk.{layer}.{norm}.weight", HIDDEN, around=1.0)
            writer.floats(f"blk.{layer}.{norm}.bias", HIDDEN)
    writer.floats("output_norm.weight", HIDDEN, around=1.0)
    writer.floats("output_norm.bias", HIDDEN)
    writer.close()


def load(file: Path, **named: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **named)


def read_both(file: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """As FastGen reads it, and as the library does."""
    with fastgen.disabled():
        theirs = load(file)
    assert not any(isinstance(module, QuantizedWeight) for module in theirs.modules())
    assert fastgen.stats().get(ENTRY_POINT) is None
    return load(file), theirs


def check_equal(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    inputs = inputs_of(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-4, atol=1e-5)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


def blocks_in(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("types", [(name,) for name in TYPES] + [TYPES], ids="-".join)
def test_llama(types: tuple[str, ...], kv_heads: int, tmp_path: Path) -> None:
    """llama.cpp stores the rows of queries and keys in another order than the library."""
    write_llama(tmp_path / "model.gguf", types, kv_heads=kv_heads)
    ours, theirs = read_both(tmp_path / "model.gguf")
    assert fastgen.stats()[ENTRY_POINT] == {"accelerated": 1, "fallback": {}}
    layers = {name for name, module in theirs.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    assert blocks_in(ours) == layers
    check_equal(ours, theirs)


def test_output_layer_of_its_own(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", ("Q4_0",), tied=False)
    ours, theirs = read_both(tmp_path / "model.gguf")
    check_equal(ours, theirs)
    assert not torch.equal(ours.get_input_embeddings().weight, ours.get_output_embeddings().weight)


def test_gpt2(tmp_path: Path) -> None:
    """Its weights are transposed, and its output layer has those of the embedding."""
    write_gpt2(tmp_path / "model.gguf")
    ours, theirs = read_both(tmp_path / "model.gguf")
    kinds = (nn.Linear, Conv1D)
    assert blocks_in(ours) == {n for n, m in theirs.named_modules() if isinstance(m, kinds)} | {"transformer.wte"}
    layer = ours.transformer.h[0].attn.c_attn
    assert type(layer) is QuantizedConv1D and isinstance(layer, Conv1D) and (layer.nf, layer.nx) == (3 * HIDDEN, HIDDEN)
    assert torch.equal(layer.weight, theirs.transformer.h[0].attn.c_attn.weight)
    check_equal(ours, theirs)


def test_other_types_are_unpacked(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", ("Q4_K", "IQ4_NL"))
    ours, theirs = read_both(tmp_path / "model.gguf")
    found = fastgen.stats()[ENTRY_POINT]
    assert found["accelerated"] == 1
    assert found["not used"] == {"gguf: weights of type IQ4_NL, which are unpacked": 1}
    assert 0 < len(blocks_in(ours)) < 2 + 7 * LAYERS
    check_equal(ours, theirs)


def test_nothing_to_keep(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", ("IQ4_NL",))
    with pytest.warns(UserWarning, match="does not keep the bits of this checkpoint.*no weight of a type"):
        ours, theirs = read_both(tmp_path / "model.gguf")
    reason = "gguf: no weight of a type that is kept in blocks"
    assert fastgen.stats()[ENTRY_POINT] == {"accelerated": 0, "fallback": {reason: 1}}
    assert blocks_in(ours) == set()
    check_equal(ours, theirs)


def test_dequantize_asked_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip("this release has no configuration for GGUF")
    write_llama(tmp_path / "model.gguf")
    with pytest.warns(UserWarning, match="the call has a quantization_config of its own"):
        model = load(tmp_path / "model.gguf", quantization_config=transformers.GgufConfig(dequantize=True))
    assert blocks_in(model) == set()
    assert fastgen.stats()[ENTRY_POINT]["fallback"] == {"the call has a quantization_config of its own": 1}


@pytest.mark.parametrize("part", [0, 0.01, 0.999])
def test_truncated_files(part: float, tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match="model.gguf cannot be read .* fetch it again") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep_bits", [True, False])
def test_the_library_reads_plain_arrays_and_makes_names_once(
    keep_bits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model.gguf")
    made = noted(monkeypatch, gguf.tensor_mapping.TensorNameMap, "__init__")
    parts = noted(monkeypatch, gguf.GGUFReader, "_push_field", lambda reader, field, *more, **named: field)
    with settings.changed(keep_bits=keep_bits):
        load(tmp_path / "model.gguf")
    assert len(made) == 1
    assert parts and {type(part) for field in parts for part in field.parts} == {np.ndarray}


def test_other_readers_stay_as_they_are(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert type(reader) is gguf.GGUFReader and isinstance(reader.data, np.memmap)
    (tmp_path / "short.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:20])
    with pytest.raises(Exception) as error:
        gguf.GGUFReader(tmp_path / "short.gguf")
    assert "cannot be read" not in str(error.value)


def test_smollm2() -> None:
    """A trained model that a package ships, in Q4_1 and Q8_0."""
    folder = smollm2.folder()
    if folder is None:
        pytest.skip(smollm2.MISSING)
    ours, theirs = read_both(folder / smollm2.GGUF)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 12))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    size = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in (*ours.parameters(), *ours.buffers())}.values())
    assert size < 1.15 * (folder / smollm2.GGUF).stat().st_size
