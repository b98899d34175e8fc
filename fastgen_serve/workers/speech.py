"""Transcribes: submits jobs as requests of `fastgen.Engine`, through the model's own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.engine.models import positions_of
from fastgen_serve.jobs import Segment, Speech, Transcribe, Transcribed
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.engine import EngineWorker
from fastgen_serve.workers.loading import read_speech

# New tokens of the warm-up's request.
_WARM_UP = 4


class SpeechWorker(EngineWorker):
    """Runs jobs that transcribe.

    Args:
        path: of the model.
        progress: called with a short description of each stage.

    Raises:
        SetupError: the model cannot be loaded.
    """

    def __init__(
        self, path: str, settings: ServeSettings, progress: Callable[[str], object] = lambda text: None
    ) -> None:
        super().__init__(read_speech(path, settings.dtype), settings)
        self.info = self._info(
            path, "transcribe", positions=positions_of(self._model.config), speech=speech_of(self._model)
        )
        if settings.warm_up and self._model.config.model_type == "whisper":
            progress("warming up")
            self._warm_up()

    def _warm_up(self) -> None:
        """Transcribes a window of silence."""
        config = self._model.config
        silence = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        self._start(Transcribe({"input_features": silence}, 0.0, {"max_new_tokens": _WARM_UP}), None)[0].result()

    def _start(
        self, job: Transcribe, on_delta: Callable[[Any], object] | None
    ) -> tuple[Future[Any], Callable[[Any], Transcribed]]:
        options = dict(job.options)
        if job.tokens:
            options["prompt_ids"] = torch.tensor(job.tokens)
        if job.segments:
            options |= {"return_timestamps": True, "return_segments": True}
        if job.seed is not None:
            options["seed"] = job.seed
        given = {name: self._as_read(value) for name, value in job.inputs.items()}
        return self._engine.submit(given, timeout=0, **options), partial(self._transcribed, job)

    def _transcribed(self, job: Transcribe, result: Any) -> Transcribed:
        """Converts the result of `generate`: tokens, or a dictionary that also has segments."""
        if isinstance(result, Tensor):
            return Transcribed(tuple(result[0].tolist()))
        found = result["segments"][0]
        segments = tuple(
            Segment(float(each["start"]), float(each["end"]), tuple(each["tokens"].tolist())) for each in found
        )
        language = self._language_of(found[0]["result"]) if found else job.options.get("language")
        return Transcribed(tuple(result["sequences"][0].tolist()), segments, language)

    def _language_of(self, window: Any) -> str | None:
        """Returns the language of a Whisper window: the decoder's prompt precedes its tokens."""
        codes = {token: name for name, token in _languages(self._model).items()}
        tokens = window if isinstance(window, Tensor) else window["sequences"]
        return next((codes[token] for token in tokens.tolist() if token in codes), None)


def speech_of(model: Any) -> Speech:
    """Returns a model's capabilities, by its files."""
    generation = model.generation_config
    if model.config.model_type != "whisper":
        return Speech()
    has_languages = bool(getattr(generation, "is_multilingual", _languages(model)))
    knows_prompts = getattr(generation, "prev_sot_token_id", None) is not None
    return Speech(
        languages=tuple(_languages(model)) if has_languages else (),
        is_english=not has_languages,
        translates=has_languages and "translate" in (getattr(generation, "task_to_id", None) or {}),
        has_windows=hasattr(generation, "no_timestamps_token_id"),
        # As in OpenAI's code: half of the positions, minus the token that marks a preceding text.
        prompt=model.config.max_target_positions // 2 - 1 if knows_prompts else 0,
    )


def _languages(model: Any) -> dict[str, int]:
    """Returns the language tokens by language code."""
    known = getattr(model.generation_config, "lang_to_id", None) or {}
    return {name.strip("<|>"): token for name, token in known.items()}
