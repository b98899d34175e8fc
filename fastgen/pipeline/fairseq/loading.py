"""The models of checkpoints."""

from __future__ import annotations

import logging
import os
from typing import Any

from fastgen.pipeline.errors import SetupError, one_line
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.fairseq.files import saved_by_torch

logger = logging.getLogger("fastgen.fairseq")


def load_models(paths: list[str], task: Any, cfg: Any, overrides: Any) -> tuple[list[Any], Any]:
    """The models of checkpoints and the configuration in them; without `cfg`, models with a task of their own."""
    from fairseq import checkpoint_utils
    from fairseq.models import FairseqLanguageModel
    from fairseq.tasks.translation import TranslationTask

    shards: dict[str, Any] = {}
    if cfg is not None:
        count = cfg.checkpoint.checkpoint_shard_count
        shards = {"suffix": cfg.checkpoint.checkpoint_suffix, "strict": count == 1, "num_shards": count}
    named = os.pathsep.join(paths)
    with explained(f"checkpoint {named} cannot be used" + (f" for task {cfg.task._name}" if cfg is not None else "")):
        logger.info("loading %s", named)
        check_saved_by_torch(paths)
        try:
            models, saved = checkpoint_utils.load_model_ensemble(paths, arg_overrides=overrides, task=task, **shards)
        except (KeyError, AttributeError) as error:
            lacking = f"no {one_line(error)}" if isinstance(error, KeyError) else one_line(error)
            raise SetupError(
                f"checkpoint {named} is of another architecture than it says, or for another task: {lacking}"
            ) from error
        if isinstance(task, TranslationTask) and any(isinstance(model, FairseqLanguageModel) for model in models):
            raise SetupError(f"checkpoint {named} is a language model: --task language_modeling generates with it")
    return models, saved


def check_saved_by_torch(paths: list[str]) -> None:
    """Raises a ValueError for a file that is no checkpoint, of which torch would only say what it has stumbled over."""
    for path in paths:
        if os.path.isfile(path) and not saved_by_torch(path):
            raise ValueError(f"{path} is nothing that torch has saved")
