"""The hooks of an accelerated call on FairSeq's attention, and on the log-probabilities of a step.

`MultiheadAttention` concatenates to its K/V in every step, and copies all of them when the beams are reordered. Here it
uses a `GrowingKV`, which stores the source's K/V once per source, and appends new K/V in place.

`BeamSearch.step`, which the other searches also use, makes two copies of all log-probabilities to add the scores of the
sequences and to find the best.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import counters, patching
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.ops.search_step import best_candidates
from fastgen.optimizer.fairseq.call import Call, State, Unsupported, inside_call


@inside_call
def attention(
    call: Call,
    wrapped: Any,
    module: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None = None,
    incremental_state: State | None = None,
    need_weights: bool = True,
    static_kv: bool = False,
    attn_mask: Tensor | None = None,
    before_softmax: bool = False,
    need_head_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Wrapper of `MultiheadAttention.forward`: query [positions, rows, dim], key, value [positions, sources, dim]."""
    state = call.state(module, incremental_state)
    if state is None:
        return NotImplemented  # the encoder, or a language model that contributes to the scores
    if module.self_attention:
        new = module.k_proj(query), module.v_proj(query)
        keys, values = call.extend(module, state, *(_heads(module, each) for each in new))
        mask = attn_mask if call.prefilled is not None else call.own_mask(key_padding_mask, query.dtype)
    else:
        keys, values = _of_source(call, module, key, state)
        mask = call.source_mask(key_padding_mask, query.dtype) if key_padding_mask is not None else None
    queries = _heads(module, module.q_proj(query))
    if need_head_weights:  # only for a layer whose weights the decoder returns
        context, weights = _with_weights(queries, keys, values, mask)
    else:
        context, weights = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), None
    return module.out_proj(context.permute(2, 0, 1, 3).flatten(2)), weights


@inside_call
def extend(
    call: Call, wrapped: Any, module: Any, keys: Tensor, values: Tensor, incremental_state: State | None
) -> tuple[Tensor, Tensor]:
    """Wrapper of ProphetNet's `NgramSelfAttention.extend`: K and V of the main stream, which all streams read."""
    state = call.state(module, incremental_state)
    return NotImplemented if state is None else call.extend(module, state, keys, values)


def _of_source(call: Call, module: Any, key: Tensor | None, state: State) -> tuple[Tensor, Tensor]:
    """Returns K and V of the encoder output, which the first step computes."""
    layer, is_new = call.layer(module, state)
    if is_new:
        if key is None or key.shape[1] != call.beams.batch:
            raise Unsupported("the encoder output does not have a row for each source")
        layer.extend(_heads(module, module.k_proj(key)).contiguous(), _heads(module, module.v_proj(key)).contiguous())
        if call.is_expanded:
            layer.expand(call.beams)
    return layer.read()


def _heads(module: Any, x: Tensor) -> Tensor:
    """Reshapes [positions, rows, dim] -> [rows, heads, positions, head dim]."""
    return x.unflatten(2, (module.num_heads, module.head_dim)).permute(1, 2, 0, 3)


def _with_weights(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the context, and the weights as [heads, rows, queries, keys]."""
    scores = torch.matmul(queries * queries.shape[-1] ** -0.5, keys.transpose(-1, -2))
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.matmul(weights.type_as(queries), values), weights.transpose(0, 1)


# ---- log-probabilities: repeated n-grams, the best continuations

_NGRAM_ENTRY_POINT = "fairseq.no_repeat_ngram"


def no_repeat_ngram(wrapped: Any, blocker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of `NGramRepeatBlock.forward(tokens, lprobs, bsz, beam_size, step)`."""
    if not patching.is_active():
        return wrapped(*args, **kwargs)
    blocked = counters.decided(_NGRAM_ENTRY_POINT, lambda: _block(blocker, *args, **kwargs))
    return wrapped(*args, **kwargs) if blocked is None else blocked


def _block(blocker: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor | None:
    """Blocks repeated n-grams in `lprobs` and returns it; returns None, and counts why, if nothing has been written."""
    n = blocker.no_repeat_ngram_size
    if blocker.use_extension:
        reason = "FairSeq's own CUDA extension is there"
    elif n < 2:
        reason = "n-grams of one token"
    elif tokens.shape[1] < max(step + 1, n) or lprobs.shape[0] != bsz * beam_size:
        reason = f"tokens of shape {tuple(tokens.shape)}, scores of shape {tuple(lprobs.shape)}"
    else:
        try:
            # The library compares the n-grams so far with the last columns of `tokens`, generated or not yet.
            no_repeat_ngram_(lprobs, tokens, n, context=tokens[:, : step + 1])
            counters.count_accelerated(_NGRAM_ENTRY_POINT)
            return lprobs
        except RuntimeError as error:  # the operator refuses them, and has written nothing
            reason = str(error).splitlines()[0]
    counters.count_fallback(_NGRAM_ENTRY_POINT, reason)
    return None


@inside_call
def step(
    call: Call,
    wrapped: Any,
    beam: Any,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
    candidate_multiple: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Wrapper of `BeamSearch.step`, in one pass over the scores of all words (`fastgen.ops.search_step`).

    Returns scores, words and sequences of the candidates, [sources, candidates] each, best first. fairseq-fixed sets
    their number for each sequence.
    """
    _, sequences, words = lprobs.shape
    if step == 0 or scores is None or lprobs.dtype is not torch.float32 or lprobs.device.type != "cpu":
        return NotImplemented
    count = min(candidate_multiple * sequences, sequences * words - 1)  # excludes padding from the candidates
    best, indices = best_candidates(lprobs.reshape(-1, words), scores[:, :, step - 1], count)
    return best, indices % words, indices // words
