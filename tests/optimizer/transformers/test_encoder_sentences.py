"""Which models of sentence-transformers mask all that their encoder gives: told by stand-ins for its classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fastgen.optimizer.transformers.encoders import sentences

LIBRARY = "sentence_transformers.modules"


def _made(name: str, module: str = LIBRARY, **attributes: Any) -> Any:
    made = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def _model(module: str = LIBRARY, side: str = "right", last: str = "Normalize", **pooling: Any) -> Any:
    model = _made("SentenceTransformer", module)
    encoder = _made("Transformer", tokenizer=SimpleNamespace(padding_side=side))
    for number, part in enumerate((encoder, _made("Pooling", **pooling), _made(last))):
        model.add_module(str(number), part)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True}])
def test_pooling_with_a_mask(pooling: dict[str, Any], side: str) -> None:
    assert sentences._pools(_model(side=side, **pooling))


@pytest.mark.parametrize("pooling", [{"pooling_mode": ("mean", "cls")}, {"pooling_mode_cls_token": True}])
def test_the_first_column_may_be_padding(pooling: dict[str, Any]) -> None:
    assert sentences._pools(_model(**pooling))
    assert not sentences._pools(_model(side="left", **pooling))


@pytest.mark.parametrize("changed", [{"module": "users"}, {"last": "Attention"}])
def test_code_of_others_may_read_padding(changed: dict[str, str]) -> None:
    assert not sentences._pools(_model(**changed))
