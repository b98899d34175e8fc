"""Models to serve, as folders: shapes of well-known models, with random weights and numbers as words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks import smollm2
from benchmarks.workloads import encoders
from benchmarks.workloads.shapes import opus_mt

SHORTEST, LONGEST = 5, 60  # words in a sentence
_FIRST = 10  # token of the first word
# The pairs of dimensions that encode a word's position: those of the highest frequencies. The others encode the word.
_PLACES = 32
# How sharply cross-attention focuses on the next word's position.
_SHARP = 20.0
# How strongly its result outweighs the previous word, and the scale of the LM head: right words have probabilities of
# about 0.9.
_FOUND, _SURE = 4.0, 0.7


def bert_base(folder: Path, **changes: Any) -> Path:
    """Writes a model of BERT-base's shape: 12 layers of width 768."""
    torch.manual_seed(0)
    model = encoders.bert_base(**changes).eval()
    model.save_pretrained(folder)
    _words(model.config.vocab_size, ends=None, pads=0).save_pretrained(folder)
    return folder


def translator(folder: Path, **changes: Any) -> Path:
    """Writes a model of opus-mt's shape. It translates each word separately, and ends where the sentence ends.

    Its weights are random except for this behaviour. The last layer's cross-attention attends to the source word at the
    next position, and the LM head outputs that word. The other beams therefore differ from the best one in a word here
    or there, and end at about the same length, as in a trained model.
    """
    torch.manual_seed(0)
    # Keeps layers from changing the embeddings much.
    model = opus_mt(init_std=0.005, tie_word_embeddings=False, **changes).eval()
    with torch.no_grad():
        _plant(model)
    model.generation_config.max_length, model.generation_config.num_beams = 2 * LONGEST, 4
    model.save_pretrained(folder)
    config = model.config
    _words(config.vocab_size, config.eos_token_id, config.pad_token_id).save_pretrained(folder)
    return folder


def _plant(model: Any) -> None:
    config, width = model.config, model.config.d_model
    # Sines of all frequencies come first, then cosines.
    places = [*range(_PLACES), *range(width // 2, width // 2 + _PLACES)]
    # Sines that are about 0 at all positions: after a layer norm they show how much all dimensions were shifted.
    still = [*range(width // 2 - _PLACES, width // 2)]
    directions = torch.randn(config.vocab_size, width)
    directions[:, [*places, *still]] = 0
    directions = torch.nn.functional.normalize(directions, dim=-1)
    directions[config.pad_token_id] = 0
    for embedding in (model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        embedding.weight.copy_(2 * directions)  # `scale_embedding` multiplies them further
    model.lm_head.weight.copy_(_SURE * directions)
    attention = model.model.decoder.layers[-1].encoder_attn
    where = torch.zeros(attention.head_dim, width)
    where[range(len(places)), places] = _SHARP
    where[:, still] = -_SHARP / len(still)
    for linear, weight in (
        (attention.q_proj, where.repeat(attention.num_heads, 1)),
        (attention.k_proj, where.repeat(attention.num_heads, 1)),
        (attention.v_proj, torch.eye(width)),
        (attention.out_proj, _FOUND * torch.eye(width)),
    ):
        linear.weight.copy_(weight)
        linear.bias.zero_()


def sentences(count: int, seed: int = 0) -> list[str]:
    """Returns sentences of 5 to 60 words for `translator`."""
    numbers = random.Random(seed)
    lengths = [numbers.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [" ".join(f"w{numbers.randrange(_FIRST, 50_000)}" for _ in range(length)) for length in lengths]


def translation(sentence: str) -> str:
    """Returns `translator`'s translation of a sentence, without EOS."""
    return sentence


def smollm2_from_bfloat16(folder: Path) -> Path:
    """Writes SmolLM2-135M-Instruct in float32, with weights rounded to bfloat16, as in its checkpoint.

    Raises:
        RuntimeError: it does not exist.
    """
    from benchmarks.workloads.smollm2_chat import smollm2_instruct_from_bfloat16, tokenizer_of

    source = smollm2.folder()
    if source is None:
        raise RuntimeError(smollm2.MISSING)
    model = smollm2_instruct_from_bfloat16().float()
    model.save_pretrained(folder)
    tokenizer_of(source).save_pretrained(folder)
    return folder


def _words(size: int, ends: int | None, pads: int) -> Any:
    """Creates a tokenizer whose word for token 7 is "w7", and which appends EOS to each text if there is one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Special tokens would also be found within words.
    special = {"pad_token": ("<pad>", pads), "unk_token": ("<unk>", 1)}
    special |= {} if ends is None else {"eos_token": ("</s>", ends)}
    names = {number: name for name, number in special.values()}
    raw = Tokenizer(models.WordLevel({names.get(n, f"w{n}"): n for n in range(size)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends is not None:
        raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", ends)])
    called = {kind: name for kind, (name, _) in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, **called)
