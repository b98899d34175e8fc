"""`fairseq-eval-lm`: a language model's perplexity of a data set, on faster layers."""

from __future__ import annotations

import sys
from typing import Any

from fastgen.fairseq import fast_layers
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.fairseq.command import log_to
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.fairseq.loading import check_saved_by_torch


def evaluate(cfg: Any) -> None:
    """Runs `fairseq-eval-lm` with a configuration, on faster layers. Its numbers go to the log, as FairSeq's do.

    Raises:
        SetupError: it failed.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed
    from fairseq_cli import eval_lm

    if cfg.common_eval.path is None:
        raise SetupError("--path is needed: the checkpoint to evaluate")
    log_to(sys.stdout)
    own = eval_lm.eval_lm

    def on_fast_layers(models: list[Any], *args: Any, **kwargs: Any) -> Any:
        with fast_layers(models):
            return own(models, *args, **kwargs)

    eval_lm.eval_lm = on_fast_layers
    try:
        with explained(f"{cfg.common_eval.path} cannot be evaluated on {cfg.task.data}"):
            check_saved_by_torch(utils.split_paths(cfg.common_eval.path))
            distributed.call_main(cfg, eval_lm.main)
    finally:
        eval_lm.eval_lm = own
