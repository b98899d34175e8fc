"""FastGen's own models, made known to FairSeq when it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.patching import Patch


@dataclass(eq=False)
class Registration(Patch):
    """A model that FairSeq lacks; `wrapper` names the function that registers it.

    It stays registered when FastGen is disabled: it is a model like any other then, generating with FairSeq's own code.
    """

    def apply(self) -> None:
        if self._installed is not None:
            self.state = "applied"
            return
        try:
            self._installed = self._find()
            self._installed()
            self.state = "applied"
        except (ImportError, AttributeError) as error:  # the user's own import must not fail for that
            self._installed = None
            self.state = f"not applied: {error}"

    def remove(self) -> None:
        self.state = "not enabled (stays registered)" if self._installed is not None else "not enabled"
