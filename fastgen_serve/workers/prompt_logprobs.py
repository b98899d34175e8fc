"""Log-probabilities of the tokens of a prompt, each given those before it, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastgen.memory import free_host_memory
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import TokenLogprob
from fastgen_serve.workers.watching import token_logprobs

# The part of the free memory that the logits of a prompt may take.
_SHARE = 0.25
# Positions whose log-probabilities are computed at a time.
_BLOCK = 64


def check_size(model: Any, tokens: int) -> None:
    """Raises BadRequest if the logits of a prompt of this many tokens do not fit into the host's memory."""
    if model.device.type != "cpu":  # where memory runs out there, this request fails alone
        return
    size = tokens * model.config.get_text_config(decoder=True).vocab_size * model.dtype.itemsize
    most = _SHARE * free_host_memory()
    if size > most:
        raise BadRequest(
            f"the log-probabilities of a prompt of {tokens} tokens take {size / 2**30:.1f} GiB, and there are "
            f"{most / 2**30:.1f}: give a shorter prompt, or leave logprobs out",
            param="prompt",
        )


@torch.inference_mode()
def prompt_logprobs(model: Any, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Returns the log-probability of each token but the first, and those of the `count` likeliest at its position.

    Raises:
        Failed: they are not numbers.
    """
    ids = torch.tensor([tokens], device=model.device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    made: list[TokenLogprob] = []
    for first in range(1, len(tokens), _BLOCK):
        following = tokens[first : first + _BLOCK]
        scores = torch.log_softmax(logits[first - 1 : first - 1 + len(following)].float(), dim=-1)
        made += token_logprobs(scores, following, count)
    return tuple(made)
