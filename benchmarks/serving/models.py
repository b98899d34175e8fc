"""Models to serve, as folders: shapes of well-known ones, with random weights and words that are numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks import smollm2
from benchmarks.workloads.shapes import opus_mt

BERT_VOCABULARY = 30522
# What `translator` makes of a sentence is as long as its words say: such a word is one of these.
SHORTEST, LONGEST = 5, 60
_FIRST = 10  # token of length 0
# How far the LM head is from chance. With a little doubt, long translations would win: scores are divided by lengths.
_SURE = 4.0
# Of ten words, so many say how long the translation is.
_TELLING = 8


def bert_base(folder: Path, **changes: Any) -> Path:
    """BERT-base's shape: 12 layers of width 768."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**changes)).eval().save_pretrained(folder)
    _words(BERT_VOCABULARY, ends=None, pads=0).save_pretrained(folder)
    return folder


def translator(folder: Path, **changes: Any) -> Path:
    """opus-mt's shape. Its translations end by themselves, after as many tokens as the words of the sentence say.

    Weights are random, but for what makes it count. The embedding of the word for length k is a direction of its own.
    The LM head answers the direction of k with the word for k - 1, and that of 1 with EOS. Cross-attention of the last
    layer adds the direction of the sentence's words to each position, which decides the first token. Behind any other
    word comes EOS, so that beams beside the best end, too.
    """
    torch.manual_seed(0)
    # Layers add little to what the embedding says.
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
    # The first one is of all other words.
    directions = torch.nn.functional.normalize(torch.randn(LONGEST + 1, width), dim=-1)
    words = 3 * directions[:1] + 0.02 * torch.randn(config.vocab_size, width)
    words[_FIRST + 1 : _FIRST + LONGEST + 1] = 3 * directions[1:]
    words[config.eos_token_id] = words[config.pad_token_id] = 0
    head = 0.005 * torch.randn(config.vocab_size, width)
    head[_FIRST + 1 : _FIRST + LONGEST] += _SURE * directions[2:]
    head[config.eos_token_id] += _SURE * (directions[0] + directions[1])
    for embedding in (model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
        embedding.weight.copy_(words)
    model.lm_head.weight.copy_(head)
    attention = model.model.decoder.layers[-1].encoder_attn
    for linear, times in ((attention.q_proj, 0.0), (attention.v_proj, 1.0), (attention.out_proj, 0.5)):
        linear.weight.copy_(times * torch.eye(width))
        linear.bias.zero_()


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of 5 to 60 words for `translator`, each as long as its translation."""
    numbers = random.Random(seed)
    return [_sentence(numbers.randint(SHORTEST, LONGEST), numbers) for _ in range(count)]


def _sentence(length: int, numbers: random.Random) -> str:
    others = range(_FIRST + LONGEST + 1, 50_000)
    telling = (place % 10 < _TELLING for place in range(length))
    return " ".join(f"w{_FIRST + length if tells else numbers.choice(others)}" for tells in telling)


def translation(sentence: str) -> str:
    """What `translator` makes of a sentence, without EOS."""
    length = len(sentence.split())
    return " ".join(f"w{_FIRST + left}" for left in range(length - 1, 0, -1))


def smollm2_from_bfloat16(folder: Path) -> Path:
    """SmolLM2-135M-Instruct in float32, with weights that are numbers of bfloat16, as those of its checkpoint are.

    Raises:
        RuntimeError: it is not there.
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
    """A tokenizer whose word for token 7 is "w7", with EOS behind each text if there is one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Special tokens are found within words, too.
    special = {"pad_token": ("<pad>", pads), "unk_token": ("<unk>", 1)}
    special |= {} if ends is None else {"eos_token": ("</s>", ends)}
    names = {number: name for name, number in special.values()}
    raw = Tokenizer(models.WordLevel({names.get(n, f"w{n}"): n for n in range(size)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends is not None:
        raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", ends)])
    called = {kind: name for kind, (name, _) in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, **called)
