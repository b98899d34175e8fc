"""UniLM as a Transformers model.

Source and target share one stack of layers, and the attention mask distinguishes them: source tokens see the whole
source and nothing else, target tokens see the source, the target before them, and themselves. A [MASK] in the place of
the next token predicts it. Every step therefore computes two positions, the last token and a [MASK] after it, and
keeps only the first in the KV cache.

For `generate` this is an encoder-decoder model. The encoder is the embedding of the source. The decoder's first step
reads the source and the [MASK] together, and leaves the source's keys and values in the cache, before the target's.
The source is thus a prefix, which FastGen's hooks store once per input.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.bert.modeling_bert import BertLayer, BertLMPredictionHead

from fastgen import releases
from fastgen.models.unilm import published


class UniLMConfig(BertConfig):
    """The shape and special tokens of a UniLM: BERT's, and these. The defaults are UniLM v1's, base, cased.

    Attributes:
        max_position_embeddings: positions that a source and its target have together.
        type_vocab_size: number of segment embeddings.
        source_type_id, target_type_id: the segments of source and target: 4 and 5 in UniLM v1; 0 and 1 in models
            fine-tuned with s2s-ft, unless their configuration says otherwise.
        layer_norm_eps: added to the variance. The authors' decoders always use this default, whatever a published
            configuration says.
        pad_token_id, bos_token_id, eos_token_id, mask_token_id: [PAD], [CLS], [SEP] and [MASK] of BERT's English
            vocabularies.
        decoder_start_token_id: the first token of the results of `generate`. The model never reads it: a target has no
            token before its first.
    """

    model_type = "unilm"
    # The target's positions follow the source's, which leaves fewer for new tokens.
    target_follows_source: ClassVar[bool] = True

    vocab_size: int = 28996
    type_vocab_size: int = 6
    source_type_id: int = 4
    target_type_id: int = 5
    layer_norm_eps: float = 1e-5
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    bos_token_id: int | None = 101
    eos_token_id: int | list[int] | None = 102
    mask_token_id: int = 103
    decoder_start_token_id: int | None = 0
    is_encoder_decoder: bool = True

    @classmethod
    def large(cls, **changes: Any) -> UniLMConfig:
        """Returns the shape of UniLM v1, large: 24 layers of width 1024."""
        shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        return cls(**shape | changes)


class UniLMEmbeddings(nn.Module):
    """Token, position and segment embeddings. Called as a module, it embeds sources: the encoder of `generate`."""

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.source_type_id = config.source_type_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> BaseModelOutput:
        """Embeds the source, [batch, N, hidden]. Padding, on either side, takes no positions."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = (attention_mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        embedded = self.embed(input_ids, positions, self.source_type_id, end=input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=embedded)

    def embed(self, tokens: Tensor, positions: Tensor, segment: int, end: int | None) -> Tensor:
        """Embeds tokens at [rows, T] positions, all before `end` and of one segment -> [rows, T, hidden].

        `end` is None if the positions are known to be valid. Raises ValueError for too many positions.
        """
        known = self.position_embeddings.num_embeddings
        # Reads the positions only if they may be too many, because that waits for the device.
        if end is not None and end > known and int(positions.max()) >= known:
            raise ValueError(
                f"source and target have {int(positions.max()) + 1} positions together, but the model has {known}: "
                "shorten the source, generate less, or load with a larger max_position_embeddings"
            )
        embedded = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.LayerNorm(embedded + self.token_type_embeddings.weight[segment])


class UniLMLayer(BertLayer):
    """A BERT layer that also returns its attention weights."""

    def forward(self, hidden: Tensor, mask: Tensor, cache: DynamicCache | None) -> tuple[Tensor, Tensor | None]:
        """[rows, Q, hidden] -> the same, and the attention weights [rows, heads, Q, K] if they were computed."""
        attended, weights = self.attention(hidden, attention_mask=mask, **releases.with_cache(cache))
        return self.feed_forward_chunk(attended), weights


class UniLMForSeq2SeqLM(PreTrainedModel, GenerationMixin):
    """UniLM with its language-model head, for `generate`.

    It is for inference only, without dropout and loss (fine-tune with the authors' s2s-ft; `from_published` reads the
    result). Sources are tokenised as [CLS] ... [SEP]; a batch may be padded on either side, with an attention mask.
    Options of the authors' decoders are options of `generate`: their `forbid_duplicate_ngrams` is
    `no_repeat_ngram_size`, `not_predict_token` is `suppress_tokens`, `min_len` is `min_new_tokens`.
    """

    config_class = UniLMConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    # For FastGen's captured step: a step stores the last token and the [MASK], and crops the latter.
    step_positions: ClassVar[int] = 2
    _no_split_modules = ["UniLMEmbeddings", "UniLMLayer"]
    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: UniLMConfig) -> None:
        """Raises ValueError for an inconsistent configuration."""
        super().__init__(config)
        _check(config)
        layers = nn.ModuleList(UniLMLayer(config, index) for index in range(config.num_hidden_layers))
        encoder = nn.ModuleDict({"layer": layers})
        self.bert: Any = nn.ModuleDict({"embeddings": UniLMEmbeddings(config), "encoder": encoder})
        self.cls: Any = nn.ModuleDict({"predictions": BertLMPredictionHead(config)})
        self.post_init()

    @classmethod
    def from_published(cls, path: str | os.PathLike[str], **changes: Any) -> UniLMForSeq2SeqLM:
        """Loads a checkpoint as published by the authors or written by s2s-ft, in float32 and ready for inference.

        Two ways of fine-tuning leave no trace in a checkpoint, and are not supported: `--pos_shift`, which predicts
        from the previous token instead of a [MASK], and `--s2s_add_segment`, which gives a source two segments.

        Args:
            path: a file of weights, or a directory with one and optionally a `config.json`. Without a configuration the
                segments are 4 and 5 (UniLM v1); with one, as it says, by default 0 and 1 (s2s-ft).
            **changes: to the `UniLMConfig`, such as the special tokens of another vocabulary, `source_type_id`, or
                `num_attention_heads` if heads are not 64 wide and no configuration says so. With a larger
                `max_position_embeddings`, the additional positions repeat the first ones, as in the authors'
                fine-tuning; with a smaller one, the last positions are dropped.

        Raises:
            FileNotFoundError: there are no weights at `path`.
            ValueError: the file does not hold tensors only, or not the tensors of a UniLM.
        """
        settings, weights, file = published.read(path, **changes)
        model = cls(UniLMConfig(**settings))
        published.fill(model, weights, file)
        return model.eval()

    @releases.takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        cache: DynamicCache | EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Computes the logits of the token that follows the target so far.

        Args:
            input_ids: [rows, N], the sources. Not needed with `encoder_outputs`.
            attention_mask: [rows, N], 0 for padding; None for no padding.
            decoder_input_ids: [rows, 1 + T]: the start token, which is not read, and the target so far; None for the
                start token alone. Once the cache holds the source: the target's tokens that it does not hold.
            encoder_outputs: the embedded source, as `get_encoder()` returns it.
            cache: keys and values of the source and of the target so far; this call appends those of the new tokens.
            use_cache: fill a cache, a new one if none is given. The default is the configuration's.
            output_attentions: return `decoder_attentions`, [rows, heads, positions, all positions] per layer. Needs
                attn_implementation="eager".
            output_hidden_states: return `decoder_hidden_states`, [rows, positions, hidden] of each layer, and before
                the first.
            return_dict: False for a tuple.
            token_type_ids: ignored. BERT's tokenizers make them, but UniLM's segments are in the configuration.

        Returns:
            `logits`, [rows, 1, vocabulary], and the cache.

        Raises:
            ValueError: a shape, the length or the cache does not fit.
        """
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("UniLM needs the source: input_ids or encoder_outputs")
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        source = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = source.new_ones(source.shape[:2], dtype=torch.long)
        if attention_mask.shape != source.shape[:2]:
            raise ValueError(
                f"the attention mask is {list(attention_mask.shape)} for a source of {list(source.shape[:2])} "
                "(a source cannot be read in chunks: leave prefill_chunk_size out)"
            )
        if decoder_input_ids is None:
            decoder_input_ids = attention_mask.new_full((source.shape[0], 1), self.config.decoder_start_token_id)
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError('attention weights are computed with attn_implementation="eager" only')
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache and cache is None:
            cache = DynamicCache()

        # Without cross-attention, the other part of an encoder-decoder cache stays empty.
        own: Any = getattr(cache, "self_attention_cache", cache)
        if own is not None and not getattr(own, "drops_last", isinstance(own, DynamicCache)):
            kind = type(own).__name__
            raise ValueError(f"UniLM drops the [MASK] of each step from its cache; a {kind} cannot do that")
        stored = own.get_seq_length() if own is not None else 0
        target = decoder_input_ids if stored else decoder_input_ids[:, 1:]
        hidden = self._embed_target(target, attention_mask, stored)
        if not stored:
            hidden = torch.cat([source, hidden], dim=1)
        keys = stored + hidden.shape[1]
        if isinstance(stored, Tensor):  # a captured step: a fixed-size cache, with its length on the device
            keys, _ = own.get_mask_sizes(hidden.shape[1], 0)
        mask = _mask(attention_mask, hidden.shape[1], keys, hidden.dtype, stored)

        # Kept only on request: those of a long source are large.
        states, attentions = [hidden], []
        for layer in self.bert["encoder"]["layer"]:
            hidden, weights = layer(hidden, mask, own)
            if output_hidden_states:
                states.append(hidden)
            if output_attentions:
                attentions.append(weights)
        if own is not None:
            own.crop(-1)  # the [MASK] is not part of the target
        output = Seq2SeqLMOutput(
            logits=self.cls["predictions"](hidden[:, -1:]),
            **releases.with_cache(cache),
            decoder_hidden_states=tuple(states) if output_hidden_states else None,
            decoder_attentions=tuple(attentions) if output_attentions else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _embed_target(self, target: Tensor, source_mask: Tensor, stored: int | Tensor) -> Tensor:
        """Embeds the new tokens of the target, and a [MASK] after them: [rows, T + 1, hidden].

        Their positions follow the last token of the source; padding in between takes none.
        """
        length = source_mask.shape[1]
        before = max(stored - length, 0)
        tokens = F.pad(target, (0, 1), value=self.config.mask_token_id)
        steps = torch.arange(tokens.shape[1], device=tokens.device) + before
        positions = source_mask.long().sum(dim=1, keepdim=True) + steps
        end = None if isinstance(stored, Tensor) else length + before + tokens.shape[1]
        return self.bert["embeddings"].embed(tokens, positions, self.config.target_type_id, end)

    @staticmethod
    def create_masks_for_generate(**unused: Any) -> None:
        """Returns None: `generate` would make causal masks for a fixed-size cache, but `forward` makes its own."""

    def get_encoder(self, modality: str | None = None) -> Any:
        """Returns the embedding, which `generate` calls once per source."""
        return self.bert["embeddings"]

    def get_input_embeddings(self) -> Any:
        return self.bert["embeddings"].word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.bert["embeddings"].word_embeddings = value

    def get_output_embeddings(self) -> Any:
        return self.cls["predictions"].decoder

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.cls["predictions"].decoder = new_embeddings
        self.cls["predictions"].bias = new_embeddings.bias

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BertLMPredictionHead):
            init.zeros_(module.bias)


def _mask(source_mask: Tensor, queries: int, keys: int, dtype: torch.dtype, first: int | Tensor) -> Tensor:
    """Returns the mask [rows, 1, queries, keys] of the `queries` positions from `first` on: 0 for visible keys,
    otherwise the lowest number of `dtype`. Source tokens, which come first, see the source; target tokens also the
    target up to them.
    """
    length = source_mask.shape[1]
    key = torch.arange(keys, device=source_mask.device)
    query = key[:queries].unsqueeze(1) + first
    visible = (key < length) | (key <= query)
    tokens = F.pad(source_mask.bool(), (0, keys - length), value=True)
    hidden = (visible & tokens[:, None, None, :]).logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def _check(config: UniLMConfig) -> None:
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads "
            f"({config.num_attention_heads})"
        )
    for name in ("source_type_id", "target_type_id"):
        if not 0 <= getattr(config, name) < config.type_vocab_size:
            raise ValueError(f"{name} is {getattr(config, name)}, but type_vocab_size is {config.type_vocab_size}")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(f"mask_token_id is {config.mask_token_id}, but vocab_size is {config.vocab_size}")
