"""Generates: submits jobs as requests of `fastgen.Engine`, with the observers of their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import fastgen
from fastgen.engine.models import positions_of
from fastgen.pipeline.errors import one_line
from fastgen.pipeline.generation.model import SequenceScores
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import MOST_TOKENS, Delta, Generate, Generated, Sequence
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.engine import EngineWorker
from fastgen_serve.workers.loading import read_generating
from fastgen_serve.workers.penalties import CountPenalties
from fastgen_serve.workers.prompt_logprobs import check_size, prompt_logprobs
from fastgen_serve.workers.watching import (
    BeamWatcher,
    Ends,
    Recorder,
    RowWatcher,
    StopTexts,
    TokenStreamer,
    check_numbers,
)

# Options whose values are token ids, lists of them, or nested lists.
_TOKEN_OPTIONS = (
    "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
)  # fmt: skip
_OPTIONS = GenerationConfig().to_dict().keys() - {"transformers_version", "_from_model_config"}
# Common options of the warm-up's requests.
_WARM_UP = {"num_return_sequences": 1, "max_new_tokens": 4, "min_new_tokens": 4}
# Number of cached grammars: programs request the same form again and again.
_GRAMMARS = 32
# Default of new tokens if neither the request nor the model sets it: the library's own.
_DEFAULT_LENGTH = 20


class GenerationWorker(EngineWorker):
    """Runs jobs that generate from tokens.

    Args:
        path: of the model.
        progress: called with a short description of each stage.

    Raises:
        SetupError: the model cannot be loaded.
    """

    def __init__(
        self, path: str, settings: ServeSettings, progress: Callable[[str], object] = lambda text: None
    ) -> None:
        model, self._tokenizer = read_generating(path, settings.dtype)
        self._config = model.config
        self._grammar = lru_cache(maxsize=_GRAMMARS)(self._new_grammar)
        # Translators and the like do not copy their source, so that prompt lookup would not pay.
        lookup = 0 if self._config.is_encoder_decoder else settings.prompt_lookup_num_tokens
        super().__init__(model, settings, prompt_lookup_num_tokens=lookup)
        self.info = self._info(
            path,
            "generate",
            positions=positions_of(self._config, of_source=self._config.is_encoder_decoder) or MOST_TOKENS,
            max_new_tokens=self._default_new_tokens(),
        )
        if settings.warm_up:
            self._warm_up(progress)

    # ---- the model's description

    def _default_new_tokens(self) -> int:
        generation = self._model.generation_config
        if generation.max_new_tokens is not None:
            return int(generation.max_new_tokens)
        if generation.max_length is not None:
            return max(int(generation.max_length) - bool(self._config.is_encoder_decoder), 1)
        return _DEFAULT_LENGTH

    def _option(self, job: Generate, name: str) -> Any:
        """Returns an option of a job, which may be None, or else the model's default."""
        return job.options[name] if name in job.options else getattr(self._model.generation_config, name, None)

    # ---- jobs

    def _warm_up(self, progress: Callable[[str], object]) -> None:
        """Captures the steps that most requests need, for one request, two, four, up to as many as have slots."""
        token = self._option(Generate(()), "bos_token_id") or 0
        beams = int(self._model.generation_config.num_beams or 1)
        kinds: list[dict[str, Any]] = [{"num_beams": 1, "do_sample": False}]
        kinds += [{}] if beams > 1 else [{"num_beams": 1, "do_sample": True}]
        for number, options in enumerate(kinds, 1):
            progress(f"warming up ({number} of {len(kinds)})")
            most = max(self.info.slots // (1 if options else beams), 1)
            job = Generate((int(token),) * 8, {**options, **_WARM_UP})
            for count in (1 << power for power in range(most.bit_length())):
                with self._engine.paused():  # makes them start together
                    futures = [self._start(job, None)[0] for _ in range(count)]
                for future in futures:
                    future.result()

    # ---- internal

    def _start(
        self, job: Generate, on_delta: Callable[[Delta], object] | None
    ) -> tuple[Future[Any], Callable[[Any], Generated]]:
        self._check(job)
        beams, options = int(self._option(job, "num_beams") or 1), dict(job.options)
        rows = max(beams, int(self._option(job, "num_return_sequences") or 1))
        if self._option(job, "do_sample") and job.seed is not None:
            options["seed"] = job.seed
        prompt, ends = self._prompt(job), self._ends(job)
        recorder = None if job.logprobs is None else Recorder(job.logprobs)
        processors: list[Any] = [CountPenalties(*job.penalties, self._prompt(job))] if any(job.penalties) else []
        if recorder is not None:
            processors.append(recorder)
        if job.form is not None:
            processors.append(self._grammar(json.dumps(job.form), tuple(sorted(self._eos(job)))).processor())
        if processors:
            options["logits_processor"] = LogitsProcessorList(processors)
        criteria: list[Any] = [] if ends.stops is None else [ends.stops]
        if beams > 1:
            options |= {"return_dict_in_generate": True, "output_scores": True}
            criteria.append(SequenceScores(beams=True))
        if beams > 1 and on_delta is not None:
            criteria.append(BeamWatcher(prompt, beams, ends, on_delta))
        elif recorder is not None or (on_delta is not None and rows > 1):
            criteria.append(RowWatcher(prompt, ends, on_delta, recorder))
        elif on_delta is not None:
            options["streamer"] = TokenStreamer(ends.eos, on_delta)
        if options.get("max_new_tokens") == 0:  # `generate` makes one, which nobody gets
            options["max_new_tokens"] = 1
        if criteria:
            options["stopping_criteria"] = StoppingCriteriaList(criteria)
        future = self._engine.submit(self._given(job), timeout=0, **options)
        return future, partial(self._generated, job, recorder)

    def _new_grammar(self, form: str, eos: tuple[int, ...]) -> fastgen.Grammar:
        """Compiles a job's form, given as JSON. BadRequest: it is invalid, or the tokenizer allows no grammars."""
        try:
            return fastgen.Grammar(self._tokenizer, eos, **json.loads(form))
        except ValueError as error:
            raise BadRequest(one_line(error), param="form") from error

    def _given(self, job: Generate) -> Any:
        """Returns the input: tokens, or a mapping with the model's other inputs, floats in its dtype."""
        if not job.inputs:
            return list(job.tokens)
        given: dict[str, Any] = {"input_ids": list(job.tokens)}
        return given | {name: self._as_read(value) for name, value in job.inputs.items()}

    def _check(self, job: Generate) -> None:
        if not job.tokens:
            raise BadRequest("the input is empty: give one token at least", param="prompt")
        if "" in job.stop:
            raise BadRequest("a stop string is empty: give one character at least", param="stop")
        for name in job.options.keys() - _OPTIONS:  # other arguments of `generate` are code
            raise BadRequest(f"{name} is no option of a generation config", param=name)
        size = self._config.get_text_config(decoder=True).vocab_size
        # Image placeholders may exceed the vocabulary: the model's processor makes them.
        if not job.inputs and not all(0 <= token < size for token in job.tokens):
            raise BadRequest(f"the input has token ids that are not from 0 to {size - 1}", param="prompt")
        for name in _TOKEN_OPTIONS:
            if not all(0 <= token < size for token in _flat(job.options.get(name))):
                raise BadRequest(f"{name} has token ids that are not from 0 to {size - 1}", param=name)
        beams = int(self._option(job, "num_beams") or 1)
        if beams > 1 and len(self._eos(job)) >= size:  # each beam needs one candidate more than there are EOS tokens
            raise BadRequest("all tokens end a sequence: leave one that beams go on with", param="eos_token_id")
        if job.prompt_logprobs is not None:
            check_size(self._model, len(job.tokens))
        if job.logprobs is not None and beams > 1:
            raise BadRequest(
                f"logprobs are those of sequences without beams, and this search has {beams}: give num_beams=1, or "
                "leave logprobs out",
                param="logprobs",
            )

    def _prompt(self, job: Generate) -> int:
        """Returns the number of tokens that a result begins with."""
        return 1 if self._config.is_encoder_decoder else len(job.tokens)

    def _eos(self, job: Generate) -> frozenset[int]:
        return frozenset(_flat(self._option(job, "eos_token_id")))

    def _ends(self, job: Generate) -> Ends:
        stops = StopTexts(self._tokenizer, job.stop, self._prompt(job)) if job.stop else None
        return Ends(self._eos(job), stops)

    def _most_new_tokens(self, job: Generate) -> int:
        new, total = (self._option(job, name) for name in ("max_new_tokens", "max_length"))
        if new is None and total is not None:
            return int(total) - self._prompt(job)
        return self._default_new_tokens() if new is None else int(new)

    def _generated(self, job: Generate, recorder: Recorder | None, result: Any) -> Generated:
        """Converts the result of `generate` to sequences."""
        tokens = result if isinstance(result, Tensor) else result.sequences
        scores = None if isinstance(result, Tensor) else getattr(result, "sequences_scores", None)
        prompt, ends = self._prompt(job), self._ends(job)
        told = None
        if job.prompt_logprobs is not None:
            told = prompt_logprobs(self._model, job.tokens, job.prompt_logprobs)
        made = []
        for row in range(tokens.shape[0]):
            if job.options.get("max_new_tokens") == 0:
                made.append(Sequence((), "length", logprobs=None if recorder is None else ()))
                continue
            written, finish_reason, generated = ends.cut(tokens[row], prompt, self._option(job, "pad_token_id"))
            score = None if scores is None else float(scores[row])
            check_numbers(() if score is None else (score,))
            logprobs = None if recorder is None else tuple(recorder.of(row)[: len(written)])
            ended_by = int(tokens[row, prompt + len(written)]) if generated > len(written) else None
            if ended_by in _flat(self._option(job, "forced_eos_token_id")) and generated >= self._most_new_tokens(job):
                finish_reason = "length"  # the last token there is room for, whatever the model would have written
            made.append(Sequence(tuple(written), finish_reason, score, logprobs, generated, ended_by))
        return Generated(tuple(made), told)


def _flat(value: Any) -> list[int]:
    """Flattens the token ids of an option: one, a list of them, or a list of lists."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [token for part in value for token in _flat(part)]
    return [int(value)]
