"""The hook around Transformers' `model.generate_batch`: the requests run on the engine's executor.

The library's own version generates greedy or sampled tokens whatever the options are, and serves decoder-only models
alone.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from fastgen import counters, patching
from fastgen.engine import ENTRY_POINT
from fastgen.engine.calls import written
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.engine import ROWS
from fastgen.engine.models import why_by_itself
from fastgen.engine.options import make
from fastgen.engine.requests import Request
from fastgen.engine.waiting import turns

_log = logging.getLogger("transformers.generation.continuous_batching")


def generate_batch(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps `ContinuousMixin.generate_batch`: returns a dict of request id to `GenerationOutput`, in order.

    The id of an input is "req_0", "req_1", ...; its further sequences are "req_0__child#0", ..., and come before it, as
    in the library. A failed request has the status FAILED, and `error`.

    Raises:
        ValueError: `generate` would refuse one of the inputs, or the options.
    """
    bound = patching.bound(wrapped, args, kwargs) if patching.is_active() else None
    if bound is None:
        return wrapped(*args, **kwargs)
    given = bound.arguments
    inputs, config, options = given["inputs"], given.get("generation_config"), given.get("kwargs", {})
    options = {name: value for name, value in options.items() if value is not None}
    reason = _unsupported(model, given, config, options)
    if reason is not None:
        counters.count_fallback(ENTRY_POINT, reason)
    if reason is not None or not inputs:
        return wrapped(*args, **kwargs)
    rows = max(ROWS, *(_option(model, config, options, name) or 1 for name in ("num_beams", "num_return_sequences")))
    made = [make(model, _whole(model, each), config, options, None, rows) for each in inputs]
    outputs = _run(ContinuousBatches(model, rows), made, bool(given.get("progress_bar")))
    counters.count_accelerated(ENTRY_POINT)
    return outputs


def _unsupported(model: Any, given: dict[str, Any], config: Any, options: dict[str, Any]) -> str | None:
    """Returns why the call is left to the library: only it has the feature, or only it draws the same tokens."""
    implementations = (_option(model, config, options, "cache_implementation"), model.config._attn_implementation)
    has_beams = (_option(model, config, options, "num_beams") or 1) > 1
    is_librarys = not (model.config.is_encoder_decoder or has_beams)  # the library's own version handles it correctly
    # The library draws according to the config alone, and reads only one option.
    draws = _option(model, config, {}, "do_sample") and options.keys() <= {"max_new_tokens"}
    reasons = {
        "record_timestamps": given.get("record_timestamps"),
        "persistent_manager": given.get("persistent_manager"),
        "log-probabilities": getattr(given.get("continuous_batching_config"), "return_logprobs", False),
        "a model with a generate of its own": why_by_itself(model),
        "a model sharded over processes": getattr(model, "_device_mesh", None) is not None,
        "a paged cache": any(str(each).startswith("paged") for each in implementations),
        "sampling: a seed gives the tokens that it gives there": is_librarys and draws,
        "no limit for new tokens": is_librarys and _option(model, config, options, "max_new_tokens") is None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _option(model: Any, config: Any, options: dict[str, Any], name: str) -> Any:
    values = (options.get(name), *(getattr(source, name, None) for source in (config, model.generation_config)))
    return next((value for value in values if value is not None), None)


def _whole(model: Any, tokens: Any) -> Any:
    """Returns a prompt without padding: the library's version reads every token, even the padding token."""
    if model.config.is_encoder_decoder or not isinstance(tokens, (list, tuple, Tensor)) or len(tokens) == 0:
        return tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(torch.as_tensor(tokens))}


def _run(executor: ContinuousBatches, made: list[Request], shows_progress: bool) -> dict[str, GenerationOutput]:
    """Runs the requests in this thread."""
    created, ended = time.perf_counter(), dict[Request, float]()
    with tqdm(total=len(made), disable=not shows_progress, desc=f"Solving {len(made)} requests", unit="request") as bar:
        for turn in turns(executor, made):
            ended |= dict.fromkeys(turn.finished, time.perf_counter())
            bar.update(len(turn.finished))
    outputs: dict[str, GenerationOutput] = {}
    for number, request in enumerate(made):
        of_request = _outputs(f"req_{number}", request, created, ended[request])
        outputs |= {each.request_id: each for each in (*of_request[1:], of_request[0])}
    failed = [name for name, output in outputs.items() if output.error is not None]
    if failed:
        _log.error(f"Requests {failed} failed during generation.")
    return outputs


def _outputs(name: str, request: Request, created: float, ended: float) -> list[GenerationOutput]:
    """Returns the outputs of a request, the best first."""
    span = request.future.begun or created, ended
    common: dict[str, Any] = {"prompt_ids": request.token_list, "created_time": created, "lifespan": span}
    error = request.future.exception()
    if error is not None:
        return [GenerationOutput(name, error=f"{type(error).__name__}: {error}", status=RequestStatus.FAILED, **common)]
    result = request.future.result()
    generated = (result if isinstance(result, Tensor) else result.sequences)[:, request.prompt :]
    outputs = []
    for index, (row, count) in enumerate(zip(generated, written(generated, request.config), strict=True)):
        own_name = name if index == 0 else f"{name}__child#{index - 1}"
        tokens = row[:count].tolist()
        outputs.append(GenerationOutput(own_name, generated_tokens=tokens, status=RequestStatus.FINISHED, **common))
    return outputs
