"""ProphetNet for FairSeq: a sequence-to-sequence Transformer that learns to predict the next n tokens at once.

The decoder has a main stream, which reads the tokens so far, and n predicting streams. The first of them predicts the
next token; the others, in training, predict the same token from a history that ends one, two, ... tokens earlier, so
that the model plans ahead. Generation computes the main stream and the first predicting stream.

`register` makes FairSeq know the model under the names that its authors gave it, and with the parameters and arguments
of the checkpoints that they publish. Outside of an accelerated call FairSeq's own way of keeping K and V is used.

Qi et al. 2020, "ProphetNet: Predicting Future N-gram for Sequence-to-Sequence Pre-training", and its code for
FairSeq 0.9 at github.com/microsoft/ProphetNet. What the authors' pre-training data would need (positions and predicted
spans that are given with a batch) is not here: that data and the task for it have not been published.
"""

from __future__ import annotations

from typing import Any

MODEL = "ngram_transformer_prophet"
TASK = "translation_prophetnet"
CRITERION = "ngram_language_loss"


def register() -> None:
    """Registers with FairSeq. What somebody else has registered under one of the names stays."""
    from fairseq import criterions, models, tasks
    from fairseq.tasks.translation import TranslationConfig

    from fastgen.models.prophetnet import model, task

    if MODEL not in models.MODEL_REGISTRY:
        models.register_model(MODEL)(model.ProphetNetModel)
        for name, set_defaults in model.ARCHITECTURES.items():
            models.register_model_architecture(MODEL, name)(set_defaults)
    if TASK not in tasks.TASK_REGISTRY:
        tasks.register_task(TASK, dataclass=TranslationConfig)(task.TranslationProphetNetTask)
    if CRITERION not in criterions.CRITERION_REGISTRY:
        config = task.NgramLanguageLossConfig
        criterions.register_criterion(CRITERION, dataclass=config)(task.NgramLanguageLoss)


def give_way(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of FairSeq's `register_model(name, ...)`, `register_task(name, ...)` and `register_criterion(name, ...)`.

    The authors' own code, as with `--user-dir`, replaces what this package has registered under the name.
    """
    from fairseq import criterions, models, tasks

    from fastgen.models.prophetnet import model, task

    name = args[0] if args else kwargs.get("name")
    if name == MODEL and models.MODEL_REGISTRY.get(name) is model.ProphetNetModel:
        del models.MODEL_REGISTRY[name], models.ARCH_MODEL_INV_REGISTRY[name]
        for registry in (models.ARCH_MODEL_REGISTRY, models.ARCH_MODEL_NAME_REGISTRY, models.ARCH_CONFIG_REGISTRY):
            for architecture in model.ARCHITECTURES:
                del registry[architecture]
    elif name == TASK and tasks.TASK_REGISTRY.get(name) is task.TranslationProphetNetTask:
        del tasks.TASK_REGISTRY[name], tasks.TASK_DATACLASS_REGISTRY[name]
    elif name == CRITERION and criterions.CRITERION_REGISTRY.get(name) is task.NgramLanguageLoss:
        del criterions.CRITERION_REGISTRY[name], criterions.CRITERION_DATACLASS_REGISTRY[name]
    return wrapped(*args, **kwargs)
