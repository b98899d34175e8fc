"""The stacks of layers that run without padding.

Those here are known to leave padding out of everything that they compute of tokens: equivalence tests run them. Other
encoders look at neighbouring positions, in blocks or in convolutions, or adapt to the length of the batch.
"""

from __future__ import annotations

from typing import Any

VARLEN, BUCKETED, RIGHT_PADDED = "varlen", "bucketed", "right-padded"

_STATES = ("hidden_states", "attention_mask")
_TOKENS = ("input_ids", "attention_mask", "inputs_embeds")


def _stacks(way: str, given: tuple[str, ...], **names: str) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    found = {}
    for module, name in names.items():
        folder = module.removesuffix("_text")
        found[f"{folder}.modeling_{module}", name] = way, given
    return found


# By the module, behind "transformers.models.", and the name of the class: the way, and parameters of its forward pass.
#
# VARLEN: it takes the states of tokens, and looks at other tokens in the library's attention functions alone, wherever
# they are. All sequences are packed in one row.
# BUCKETED: it takes states, and has attention code of its own or positions that are relative. Sequences of about the
# same length are one batch.
# RIGHT_PADDED: likewise, and it counts positions from the first column: padding must be behind the tokens.
STACKS = {
    **_stacks(
        VARLEN,
        _STATES,
        albert="AlbertTransformer",
        bert="BertEncoder",
        camembert="CamembertEncoder",
        data2vec_text="Data2VecTextEncoder",
        distilbert="Transformer",
        electra="ElectraEncoder",
        ernie="ErnieEncoder",
        layoutlm="LayoutLMEncoder",
        mobilebert="MobileBertEncoder",
        roberta="RobertaEncoder",
        roberta_prelayernorm="RobertaPreLayerNormEncoder",
        splinter="SplinterEncoder",
        xlm_roberta="XLMRobertaEncoder",
        xlm_roberta_xl="XLMRobertaXLEncoder",
    ),
    **_stacks(
        BUCKETED,
        _STATES,
        deberta="DebertaEncoder",
        deberta_v2="DebertaV2Encoder",
        megatron_bert="MegatronBertEncoder",
        mpnet="MPNetEncoder",
        rembert="RemBertEncoder",
        squeezebert="SqueezeBertEncoder",
    ),
    **_stacks(RIGHT_PADDED, _STATES, roformer="RoFormerEncoder"),
    **_stacks(
        RIGHT_PADDED,
        _TOKENS,
        bart="BartEncoder",
        blenderbot="BlenderbotEncoder",
        blenderbot_small="BlenderbotSmallEncoder",
        eurobert="EuroBertModel",
        m2m_100="M2M100Encoder",
        marian="MarianEncoder",
        mbart="MBartEncoder",
        modernbert="ModernBertModel",
        mt5="MT5Stack",
        nomic_bert="NomicBertModel",
        pegasus="PegasusEncoder",
        t5="T5Stack",
        umt5="UMT5Stack",
    ),
}
# Where positions come from that nobody has given, in embeddings that take each token by itself, and whose sums their
# model hands to a VARLEN stack as they are.
#
# COLUMNS: a token's column, counted from the first one.
# FROM_IDS: the embeddings work them out, from what is padding by its id.
COLUMNS, FROM_IDS = "columns", "from ids"


def _embeddings(positions: str, **names: str) -> dict[tuple[str, str], str]:
    folders = {module: module.removesuffix("_text") for module in names}
    return {(f"{folders[module]}.modeling_{module}", name): positions for module, name in names.items()}


EMBEDDINGS = {
    **_embeddings(
        COLUMNS,
        albert="AlbertEmbeddings",
        bert="BertEmbeddings",
        distilbert="Embeddings",
        ernie="ErnieEmbeddings",
        layoutlm="LayoutLMEmbeddings",
        splinter="SplinterEmbeddings",
    ),
    **_embeddings(
        FROM_IDS,
        camembert="CamembertEmbeddings",
        data2vec_text="Data2VecTextEmbeddings",
        roberta="RobertaEmbeddings",
        roberta_prelayernorm="RobertaPreLayerNormEmbeddings",
        xlm_roberta="XLMRobertaEmbeddings",
        xlm_roberta_xl="XLMRobertaXLEmbeddings",
    ),
}
_LIBRARY = "transformers.models."


def way_of(module: Any) -> str | None:
    """How a module runs without padding; None for one that is no known stack."""
    found = STACKS.get(_place(module))
    return found[0] if found is not None else None


def positions_of(embeddings: Any) -> str:
    """Where embeddings that are known here have their positions from."""
    return EMBEDDINGS[_place(embeddings)]


def _place(module: Any) -> tuple[str, str]:
    """The file of the library and the name of a module's class; of another class, nothing that is known."""
    kind = type(module)
    known = kind.__module__.startswith(_LIBRARY)
    return (kind.__module__[len(_LIBRARY) :], kind.__name__) if known else ("", "")
