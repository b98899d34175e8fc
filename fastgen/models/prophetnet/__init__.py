"""ProphetNet for FairSeq: a sequence-to-sequence Transformer that learns to predict the next n tokens at once.

The decoder has a main stream, which reads the tokens so far, and n predicting streams. The first of them predicts the
next token. In training, the others predict the same token from a history that ends one, two, ... tokens earlier, so
that the model plans ahead. Generation computes the main stream and the first predicting stream.

`register` registers the model with FairSeq under its authors' names, and with the parameters and arguments of their
published checkpoints. Outside of an accelerated call the model uses FairSeq's own KV cache.

Qi et al. 2020, "ProphetNet: Predicting Future N-gram for Sequence-to-Sequence Pre-training", and its code for
FairSeq 0.9 at github.com/microsoft/ProphetNet. Support for the authors' pre-training data (positions and predicted
spans that come with a batch) is missing, because that data and its task have not been published.
"""

from __future__ import annotations

from typing import Any

MODEL = "ngram_transformer_prophet"
TASK = "translation_prophetnet"
CRITERION = "ngram_language_loss"


def register() -> None:
    """Registers the model, task and criterion with FairSeq. Existing registrations of these names stay."""
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

    Lets the authors' own code, loaded with `--user-dir` for example, replace this package's registration of the name.
    """
    name = args[0] if args else kwargs.get("name")
    if name not in (MODEL, TASK, CRITERION):  # FairSeq's own, maybe while a module of this package imports FairSeq
        return wrapped(*args, **kwargs)
    from fairseq import criterions, models, tasks

    from fastgen.models.prophetnet import model, task

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
