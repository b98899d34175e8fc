"""The served models, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastgen_serve.concurrency import together
from fastgen_serve.errors import ModelNotFound
from fastgen_serve.served import ServedModel

# The longest part of an unknown name, in characters, that an error quotes.
_LONGEST_NAME = 100


class Models:
    """The served models, in the order of the settings. The first is the default."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    def get(self, name: str | None = None) -> ServedModel:
        """Returns the model of this name; the first one for None.

        Raises:
            ModelNotFound: no such model is served.
        """
        if name is None:
            return next(iter(self._by_name.values()))
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(self._by_name)
            raise ModelNotFound(f"model {name[:_LONGEST_NAME]!r} is not served: the models are {known}", param="model")
        return found

    def names(self) -> list[str]:
        return list(self._by_name)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    @property
    def are_ready(self) -> bool:
        return all(model.is_ready for model in self)

    async def start(self) -> None:
        """Starts loading all models. They are not ready yet when this returns."""
        for model in self:
            await model.start()

    async def stop(self) -> None:
        """Stops all models. Unfinished requests fail with `Unavailable`."""
        await together(model.stop() for model in self)
