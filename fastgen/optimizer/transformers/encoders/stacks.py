"""The stacks of layers that run without padding.

The stacks listed here are known to ignore padding in everything that they compute for tokens: equivalence tests run
them. Other encoders read neighbouring positions, in blocks or convolutions, or adapt to the length of the batch.
"""

from __future__ import annotations

from typing import Any

VARLEN, BUCKETED, RIGHT_PADDED = "varlen", "bucketed", "right-padded"

_LIBRARY = "transformers.models."
_STATES = ("hidden_states", "attention_mask")
_TOKENS = ("input_ids", "attention_mask", "inputs_embeds")
# By way and parameters: files and classes.
_BY_WAY = {
    (VARLEN, _STATES): """
        albert.AlbertTransformer bert.BertEncoder camembert.CamembertEncoder data2vec_text.Data2VecTextEncoder
        distilbert.Transformer electra.ElectraEncoder ernie.ErnieEncoder layoutlm.LayoutLMEncoder
        mobilebert.MobileBertEncoder roberta.RobertaEncoder roberta_prelayernorm.RobertaPreLayerNormEncoder
        splinter.SplinterEncoder xlm_roberta.XLMRobertaEncoder xlm_roberta_xl.XLMRobertaXLEncoder
    """,
    (BUCKETED, _STATES): """
        deberta.DebertaEncoder deberta_v2.DebertaV2Encoder megatron_bert.MegatronBertEncoder mpnet.MPNetEncoder
        rembert.RemBertEncoder squeezebert.SqueezeBertEncoder
    """,
    (RIGHT_PADDED, _STATES): """
        roformer.RoFormerEncoder
    """,
    (RIGHT_PADDED, _TOKENS): """
        bart.BartEncoder blenderbot.BlenderbotEncoder blenderbot_small.BlenderbotSmallEncoder eurobert.EuroBertModel
        m2m_100.M2M100Encoder marian.MarianEncoder mbart.MBartEncoder modernbert.ModernBertModel mt5.MT5Stack
        nomic_bert.NomicBertModel pegasus.PegasusEncoder t5.T5Stack umt5.UMT5Stack
    """,
}
STACKS = {
    (f"{file.removesuffix('_text')}.modeling_{file}", name): way
    for way, stacks in _BY_WAY.items()
    for file, _, name in (stack.partition(".") for stack in stacks.split())
}
"""By module, relative to "transformers.models.", and class: how the stack runs, and parameters of its forward pass.

VARLEN: takes the states of tokens, and reads other tokens only in the library's attention functions, wherever they
are. All sequences are packed in one row.
BUCKETED: takes states, and has its own attention code or relative positions. Sequences of similar length form a batch.
RIGHT_PADDED: likewise, but counts positions from the first column: padding must come after the tokens.
"""


def way_of(module: Any) -> str | None:
    """Returns how a module runs without padding; None if it is no known stack."""
    kind = type(module)
    is_librarys = kind.__module__.startswith(_LIBRARY)
    found = STACKS.get((kind.__module__.removeprefix(_LIBRARY), kind.__name__)) if is_librarys else None
    return found[0] if found is not None else None
