"""Tiny random encoders, by architecture, with heads, and inputs that fit them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import transformers

import fastgen
from tests.equivalence.models import padded

VOCABULARY, PAD, FIRST_WORD = 120, 1, 5
LONGEST = 40
TOLERANCE = 1e-5

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
_BERT = {
    **_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "cls_token_id": 0, "sep_token_id": 2,
}  # fmt: skip
_BART = {
    **_TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 24}
# By the prefix of the classes' names, what their configuration takes. Their stack runs without padding.
WITHOUT_PADDING: dict[str, dict[str, Any]] = {
    "Albert": {**_BERT, "embedding_size": 16},
    "Bert": _BERT,
    "Camembert": _BERT,
    "Data2VecText": _BERT,
    "Deberta": _DEBERTA,
    "DebertaV2": {**_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                  "conv_kernel_size": 3, "conv_act": "gelu"},
    "DistilBert": {**_BERT, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "Electra": {**_BERT, "embedding_size": 16},
    "Ernie": _BERT,
    "EuroBert": {**_BERT, "num_key_value_heads": 2, "mask_token_id": 4},
    "LayoutLM": _BERT,
    "MPNet": _BERT,
    "MegatronBert": _BERT,
    "MobileBert": {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "ModernBert": {**_BERT, "local_attention": 8, "global_attn_every_n_layers": 2},
    "NomicBert": _BERT,
    "RemBert": {**_BERT, "input_embedding_size": 16, "output_embedding_size": 16},
    "RoFormer": {**_BERT, "embedding_size": 32},
    "Roberta": _BERT,
    "RobertaPreLayerNorm": _BERT,
    "Splinter": {**_BERT, "question_token_id": 4},
    "SqueezeBert": {**_BERT, "embedding_size": 32},
    "XLMRoberta": _BERT,
    "XLMRobertaXL": _BERT,
}  # fmt: skip
# The encoders of encoder-decoder models.
_LIKE_BART = ("Bart", "Blenderbot", "BlenderbotSmall", "M2M100", "MBart", "Marian", "Pegasus")
OF_SEQ2SEQ: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LIKE_BART, _BART),
    **dict.fromkeys(("MT5", "T5", "UMT5"), _T5),
}
_XLNET = {name: size for name, size in _BERT.items() if name != "max_position_embeddings"}
_FUNNEL = {name: size for name, size in _BERT.items() if name != "num_hidden_layers"}
# Their stacks are not known, and they run as they are.
OTHERS: dict[str, dict[str, Any]] = {
    "BigBird": {**_BERT, "block_size": 4, "num_random_blocks": 1},
    "Canine": {**_BERT, "num_hash_buckets": 50},
    "ConvBert": {**_BERT, "embedding_size": 32},
    "Esm": {**_BERT, "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4},
    "FNet": _BERT,
    "Flaubert": {**_BERT, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY},
    "Funnel": {**_FUNNEL, "d_model": 32, "d_inner": 64, "block_sizes": [1, 1], "n_head": 4, "d_head": 8},
    "IBert": _BERT,
    "Lilt": {**_BERT, "channel_shrink_ratio": 2, "hidden_size": 48},
    "Longformer": {**_BERT, "attention_window": 8},
    "Luke": {**_BERT, "entity_vocab_size": 20},
    "Xmod": {**_BERT, "languages": ["en_XX"], "default_language": "en_XX"},
    "XLM": {**_BERT, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": VOCABULARY},
    "XLNet": {**_XLNET, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
}
# Of random weights. Without norms, or with rounding of another kind, a large one makes rounding grow.
GAINS = {"MobileBert": 0.5, "SqueezeBert": 1.0}
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM", "MultipleChoice")


def class_of(architecture: str, head: str = "") -> Any:
    """The class in Transformers; None where the architecture has no such head."""
    suffix = f"For{head}" if head else "Model"
    if architecture in OF_SEQ2SEQ:
        suffix = suffix if head or architecture not in ("T5", "MT5", "UMT5") else "EncoderModel"
    return getattr(transformers, architecture + suffix, None)


@functools.cache
@torch.inference_mode(False)  # all tests have the same model, and some need its gradients
def build(architecture: str, head: str = "", attention: str | None = None) -> Any:
    """A model with random weights that make its results depend on the whole text."""
    kind = class_of(architecture, head)
    attention = attention or ("sdpa" if kind._supports_sdpa else "eager")
    sizes = {**WITHOUT_PADDING, **OF_SEQ2SEQ, **OTHERS}[architecture]
    torch.manual_seed(0)
    labels = 2 if head == "QuestionAnswering" else 3
    config = kind.config_class(**sizes, num_labels=labels, attn_implementation=attention)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, GAINS.get(architecture, 1.5) / parameter.shape[-1] ** 0.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    return model.get_encoder() if architecture in OF_SEQ2SEQ and not head and hasattr(model, "decoder") else model


class Head(transformers.BertPreTrainedModel):
    """A head of the user's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        self.post_init()

    def states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.bert(ids, attention_mask=mask)[0]


inputs = functools.partial(padded, words=(FIRST_WORD, VOCABULARY), pad=PAD)


def both(model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """What the model gives with FastGen, and without."""
    with torch.inference_mode():
        with fastgen.disabled():
            expected = model(**given)
        return model(**given), expected


def tensors(result: Any) -> list[torch.Tensor]:
    """Those of a result, in whatever it has them."""
    if isinstance(result, torch.Tensor):
        return [result]
    parts = list(result.values()) if isinstance(result, dict) else result
    return [each for part in parts for each in tensors(part)] if isinstance(parts, tuple | list) else []


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE, at: torch.Tensor | None = None) -> None:
    """Asserts that two results have the same tensors, relative to the largest number of each.

    Args:
        at: a mask of the positions that count.
    """
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        if at is not None:
            one, other = one[at.bool()], other[at.bool()]
        largest = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one / largest, other / largest, rtol=0.0, atol=tolerance)


def tokenizer(side: str = "right") -> Any:
    """A tokenizer of the words "w5", "w6" and so on, with <s> and </s> around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "<pad>": PAD, "</s>": 2, "<unk>": 3, "<mask>": 4}
    words |= {f"w{number}": number for number in range(FIRST_WORD, VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>", unk_token="<unk>",
        pad_token="<pad>", mask_token="<mask>", padding_side=side, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def texts(lengths: list[int], masked: bool = False) -> list[str]:
    """Random texts of so many words; with `masked`, one word of each is <mask>."""
    generator = random.Random(1)
    found = [[f"w{generator.randrange(FIRST_WORD, VOCABULARY)}" for _ in range(length)] for length in lengths]
    for words in found if masked else ():
        words[generator.randrange(len(words))] = "<mask>"
    return [" ".join(words) for words in found]
