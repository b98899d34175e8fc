"""ProphetNet's encoder, decoder and model."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel, FairseqIncrementalDecoder
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout, LayerNorm, LearnedPositionalEmbedding, TransformerSentenceEncoderLayer
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from fastgen.models.prophetnet import pretrained
from fastgen.models.prophetnet.attention import NgramSelfAttention, relate
from fastgen.models.prophetnet.pretrained import store_as


class ProphetNetEncoder(FairseqEncoder):
    """BERT's encoder: learned positions, post-norm."""

    def __init__(self, args: Namespace, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        self.register_buffer("version", torch.Tensor([3]))
        dim, pad = embed_tokens.embedding_dim, int(dictionary.pad())
        self.padding_idx = pad
        self.max_source_positions = args.max_source_positions
        self.embed_tokens = embed_tokens
        self.embed_positions = LearnedPositionalEmbedding(args.max_source_positions + pad + 1, dim, pad)
        self.emb_layer_norm = LayerNorm(dim)
        self.dropout_module = FairseqDropout(args.dropout, module_name=type(self).__name__)
        self.layers = nn.ModuleList(
            TransformerSentenceEncoderLayer(
                embedding_dim=args.encoder_embed_dim,
                ffn_embedding_dim=args.encoder_ffn_embed_dim,
                num_attention_heads=args.encoder_attention_heads,
                dropout=args.dropout,
                attention_dropout=args.attention_dropout,
                activation_dropout=args.activation_dropout,
                activation_fn=args.activation_fn,
            )
            for _ in range(args.encoder_layers)
        )
        self.apply(init_bert_params)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: Any) -> dict[str, list[Tensor]]:
        """
        Args:
            src_tokens: [batch, S].

        Returns:
            `encoder_out`: [S, batch, dim]; `encoder_padding_mask`: [batch, S], true for padding. Each in a list, as in
            FairSeq's encoders.
        """
        padding = src_tokens.eq(self.padding_idx)
        x = self.embed_tokens(src_tokens) + self.embed_positions(src_tokens)
        x = self.dropout_module(self.emb_layer_norm(x)).transpose(0, 1)
        hidden = padding if bool(padding.any()) else None  # attention without a mask is faster
        for layer in self.layers:
            x, _ = layer(x, self_attn_padding_mask=hidden)
        return {"encoder_out": [x], "encoder_padding_mask": [padding]}

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """Makes row r row `new_order[r]`."""
        rows = {"encoder_out": 1, "encoder_padding_mask": 0}  # the batch dimension
        return {name: [part.index_select(rows[name], new_order) for part in encoder_out[name]] for name in rows}

    def max_positions(self) -> int:
        return self.max_source_positions


class ProphetNetDecoderLayer(TransformerDecoderLayerBase):
    """FairSeq's post-norm decoder layer, with self-attention over all streams."""

    def __init__(self, args: Namespace) -> None:
        self._num_buckets = args.num_buckets
        super().__init__(TransformerConfig.from_namespace(args))
        # Uses the published name, and keeps it first: optimizer states depend on the order of parameters.
        self._modules: dict[str, nn.Module | None] = {
            "ngram_self_attn": self._modules.pop("self_attn"),
            **self._modules,
        }
        self.normalize_before = self.need_attn = False

    @property
    def self_attn(self) -> NgramSelfAttention:
        return self.ngram_self_attn

    def build_self_attention(self, embed_dim: int, cfg: Any, **unused: Any) -> NgramSelfAttention:
        return NgramSelfAttention(embed_dim, cfg.decoder.attention_heads, cfg.attention_dropout, self._num_buckets)


class ProphetNetDecoder(FairseqIncrementalDecoder):
    """The decoder, with its main stream and `args.ngram` predicting streams."""

    def __init__(self, args: Namespace, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        self.register_buffer("version", torch.Tensor([3]))
        dim, pad = embed_tokens.embedding_dim, int(dictionary.pad())
        self.ngram = args.ngram
        self.num_buckets = args.num_buckets
        self.relative_max_distance = args.relative_max_distance
        self.padding_idx = pad
        self.max_target_positions = args.max_target_positions
        self.embed_tokens = embed_tokens
        # A predicting stream is one position ahead.
        self.embed_positions = LearnedPositionalEmbedding(args.max_target_positions + pad + 2, dim, pad)
        self.ngram_input_embed = nn.Embedding(args.ngram, dim)
        self.emb_layer_norm = LayerNorm(dim)
        self.dropout_module = FairseqDropout(args.dropout, module_name=type(self).__name__)
        layers = [ProphetNetDecoderLayer(args) for _ in range(args.decoder_layers)]
        self.layers = nn.ModuleList(layers)
        self.output_projection = nn.Linear(dim, len(dictionary), bias=False)
        self.apply(init_bert_params)
        for layer in layers:
            nn.init.xavier_uniform_(layer.self_attn.in_proj.weight)
        if args.share_decoder_input_output_embed:
            self.output_projection.weight = embed_tokens.weight
            store_as(self, {"output_projection.weight": "embed_tokens.weight"})
        else:
            nn.init.normal_(self.output_projection.weight, std=dim**-0.5)
            store_as(self, {"output_projection.weight": "embed_out"})

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]],
        incremental_state: dict[str, Any] | None = None,
        **unused: Any,
    ) -> tuple[Tensor | list[Tensor], dict[str, Any]]:
        """
        Args:
            prev_output_tokens: [rows, T], the tokens so far; with `incremental_state` only the last of them is new.
            encoder_out: the encoder's output.

        Returns:
            Without `incremental_state` a list with the logits of each predicting stream, [rows, T, vocabulary]; with it
            the logits of the next token, [rows, 1, vocabulary]. And `attn`: the first predicting stream's attention
            weights over the source in the last layer, a list with [rows, T, S], if
            `make_generation_fast_(need_attn=True)` has enabled them.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        scores = [self.output_layer(stream) for stream in features]
        return (scores if incremental_state is None else scores[0]), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]],
        incremental_state: dict[str, Any] | None = None,
        **unused: Any,
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """Computes `forward` up to the projection to the vocabulary: [rows, T, dim] for each predicting stream."""
        length = prev_output_tokens.shape[1]
        if incremental_state is None:
            tokens, predictions = prev_output_tokens, self.ngram
            positions = utils.make_positions(tokens, self.padding_idx)
        else:
            tokens, predictions = prev_output_tokens[:, -1:], 1
            positions = torch.full_like(tokens, self.padding_idx + length)
        new = tokens.shape[1]
        x = self._embed(tokens, positions, predictions)
        relations = relate(predictions, new, length, self.num_buckets, self.relative_max_distance, x)
        source, padding = encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
        last, weights = self.layers[-1], None
        for layer in self.layers:
            need_weights = layer is last and layer.need_attn and not self.training
            x, weights, _ = layer(
                x, source, padding, incremental_state, self_attn_mask=relations, need_head_weights=need_weights
            )
        if weights is not None:
            weights = weights.float().mean(dim=0)[:, new : 2 * new]
        _, *features = x.transpose(0, 1).split(new, dim=1)
        return features, {"attn": [weights] if weights is not None else None}

    def _embed(self, tokens: Tensor, positions: Tensor, predictions: int) -> Tensor:
        """Returns the first layer's input, [streams * T, rows, dim]."""
        table, pad = self.embed_positions.weight, self.padding_idx
        ahead = F.embedding(positions + 1, table, pad)
        streams = [self.embed_tokens(tokens) + F.embedding(positions, table, pad)]
        # The published weights have the first predicting stream in the last row.
        streams += [self.ngram_input_embed.weight[stream - 1] + ahead for stream in range(predictions)]
        x = torch.cat(streams, dim=1).transpose(0, 1)
        return self.dropout_module(self.emb_layer_norm(x))

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Projects [..., dim] -> [..., vocabulary]."""
        return self.output_projection(features)

    def get_normalized_probs(self, net_output: tuple[Any, ...], log_probs: bool, sample: Any = None) -> Tensor:
        """Returns the probabilities of the next token, which FairSeq's other criteria need."""
        scores, *rest = net_output
        return super().get_normalized_probs((scores[0] if isinstance(scores, list) else scores, *rest), log_probs)

    def max_positions(self) -> int:
        return self.max_target_positions


class ProphetNetModel(FairseqEncoderDecoderModel):
    """ProphetNet (Qi et al. 2020)."""

    @staticmethod
    def add_args(parser: Any) -> None:
        """Adds the model's options to FairSeq's command lines."""

        def add(name: str, kind: type, text: str) -> None:
            parser.add_argument(name, type=kind, metavar="N" if kind is int else "D", help=text)

        add("--ngram", int, "number of predicting streams")
        add("--num_buckets", int, "number of buckets of relative distances")
        add("--relative_max_distance", int, "distance from which on all are in the last bucket")
        parser.add_argument(
            "--activation-fn", choices=utils.get_available_activation_fns(), help="activation of the feed-forward layer"
        )
        add("--dropout", float, "dropout probability")
        add("--attention-dropout", float, "dropout probability of attention weights")
        add("--activation-dropout", float, "dropout probability after the activation")
        for part in ("encoder", "decoder"):
            add(f"--{part}-embed-dim", int, f"dimension of the {part}")
            add(f"--{part}-ffn-embed-dim", int, f"dimension of the {part}'s feed-forward layers")
            add(f"--{part}-layers", int, f"layers of the {part}")
            add(f"--{part}-attention-heads", int, f"attention heads of the {part}")
        parser.add_argument(
            "--share-all-embeddings", action="store_true", help="encoder, decoder and output share their embeddings"
        )
        parser.add_argument("--load-from-pretrained-model", metavar="FILE", help="begin with these weights")
        parser.add_argument(
            "--load-sep", action="store_true", help="the pre-trained embedding of [SEP] is that of [X_SEP], too"
        )

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> ProphetNetModel:
        """Builds a model; if `args.load_from_pretrained_model` names a file, loads its weights and clears the argument.

        Raises ValueError if embeddings are to be shared between different dictionaries or dimensions.
        """
        ARCHITECTURES["ngram_transformer_prophet"](args)  # fills in arguments that an older version lacks
        source, target = task.source_dictionary, task.target_dictionary
        encoder_tokens = _embedding(source, args.encoder_embed_dim)
        if args.share_all_embeddings:
            if source != target:
                raise ValueError("--share-all-embeddings needs one dictionary for source and target")
            if args.encoder_embed_dim != args.decoder_embed_dim:
                raise ValueError("--share-all-embeddings needs --encoder-embed-dim and --decoder-embed-dim to be equal")
            args.share_decoder_input_output_embed = True
            decoder_tokens = encoder_tokens
        else:
            decoder_tokens = _embedding(target, args.decoder_embed_dim)
        model = cls(ProphetNetEncoder(args, source, encoder_tokens), ProphetNetDecoder(args, target, decoder_tokens))
        if args.load_from_pretrained_model is not None:
            pretrained.load(model, args.load_from_pretrained_model, args.load_sep)
            args.load_from_pretrained_model = None  # a checkpoint of the new model does not need that file
        return model


def _embedding(dictionary: Any, dim: int) -> nn.Embedding:
    return nn.Embedding(len(dictionary), dim, padding_idx=dictionary.pad())


def _width(dim: int) -> dict[str, int]:
    """Returns the shape of a model: heads are 64 wide, feed-forward layers four times as wide as the model."""
    names = {"embed_dim": dim, "ffn_embed_dim": 4 * dim, "attention_heads": dim // 64}
    return {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in names.items()}


_SMALL: dict[str, Any] = _width(512) | {
    "ngram": 2,
    "num_buckets": 32,
    "relative_max_distance": 128,
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "load_from_pretrained_model": None,
    "load_sep": False,
    "max_source_positions": 512,
    "max_target_positions": 512,
}
_BASE = (
    _SMALL
    | _width(768)
    | {"activation_fn": "gelu", "attention_dropout": 0.1, "activation_dropout": 0.1}
    | {"share_decoder_input_output_embed": True, "share_all_embeddings": True}
)
_MIDDLE = _BASE | _width(1024)
_LARGE = _MIDDLE | {"encoder_layers": 12, "decoder_layers": 12}


def _set_defaults(defaults: dict[str, Any], args: Namespace) -> None:
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


ARCHITECTURES = {
    "ngram_transformer_prophet": partial(_set_defaults, _SMALL),
    "ngram_transformer_prophet_base": partial(_set_defaults, _BASE),
    "ngram_transformer_prophet_middle": partial(_set_defaults, _MIDDLE),
    "ngram_transformer_prophet_large": partial(_set_defaults, _LARGE),
}
"""{name: function that sets missing `args`}: the shapes that the authors have named. The large one is published."""
