"""ProphetNet for FairSeq against the port in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen import releases
from fastgen.models.prophetnet.model import ProphetNetModel
from tests.models.prophetnet.tiny import PAD, TOKENS, WORDS, arguments, sources, task

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


@torch.no_grad()
def test_scores_are_those_of_the_port_in_transformers(seed=0):
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
            **releases.with_cache(cache),
            use_cache=True,
        )
        cache = releases.cache_in(theirs)
        ours, _ = model.decoder(targets[:, : step + 1], encoded, incremental_state=state)
        torch.testing.assert_close(ours[:, -1], theirs.logits[:, -1], atol=1e-4, rtol=1e-4)
