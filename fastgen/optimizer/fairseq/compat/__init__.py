"""Makes FairSeq 0.12 run on a current Python, torch and NumPy, and keeps its files from running code.

These patches do not affect speed: they apply with and without acceleration.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from fastgen.optimizer.fairseq.compat import literals
from fastgen.optimizer.fairseq.compat.finders import HashableConfigs
from fastgen.patching import Condition, Patch


def patches() -> list[Patch]:
    """Returns every patch of FairSeq that does not affect the speed of generation."""
    return [*_safe(), *_running()]


def _safe() -> list[Patch]:
    """Returns the patches that keep model and data files from running code."""
    repairs = f"{__name__}.repairs"
    load = f"{repairs}:load"
    return [
        *(ModuleGlobal(module, "eval", f"{__name__}.literals:evaluator") for module in literals.MODULES),
        literals.Examples(),
        Patch("fairseq.checkpoint_utils", "load_checkpoint_to_cpu", load),
        Patch("fairseq.checkpoint_utils", "load_ema_from_checkpoint", load),
        Patch("fairseq.distributed.utils", "_broadcast_object_slow", load),
        Patch("fairseq.data.fasta_dataset", "FastaDataset._build_index", f"{repairs}:fasta_index"),
        ModuleGlobal("fairseq.models.speech_to_text.hub_interface", "torch", f"{repairs}:AskingTorch"),
        ModuleGlobal("fairseq.file_utils", "tarfile", f"{repairs}:CarefulTarfile"),
    ]


def _running() -> list[Patch]:
    """Returns the patches for names and calls that Python, torch and NumPy have changed since."""
    repairs = f"{__name__}.repairs"
    numpy = f"{repairs}:OldNumpy"
    layers = "fairseq.modules.transformer_layer"
    mbart = "fairseq.tasks.translation_from_pretrained_bart"
    return [
        HashableConfigs(),
        ModuleGlobal("fairseq.data.data_utils", "np", numpy, numpy_lacks("int")),
        ModuleGlobal("fairseq.data.language_pair_dataset", "np", numpy, numpy_lacks("compat")),
        ModuleGlobal("fairseq.data.token_block_dataset", "np", numpy, numpy_lacks("compat")),
        ModuleGlobal("fairseq.modules.dynamic_crf_layer", "np", numpy, numpy_lacks("float")),
        Patch(layers, "TransformerEncoderLayerBase._load_from_state_dict", f"{repairs}:load_from_state_dict"),
        Patch("fairseq.data.indexed_dataset", "MMapIndexedDataset._do_init", f"{repairs}:open_data"),
        Patch(mbart, "TranslationFromPretrainedBARTTask.__init__", f"{repairs}:keep_arguments"),
    ]


@dataclass(eq=False)
class ModuleGlobal(Patch):
    """Replaces a global of one module by the result of `wrapper`, called with its value, or None if there is none."""

    def _apply(self) -> str | None:
        owner = sys.modules[self.module]
        original = vars(owner).get(self.target)
        reason = self.condition(original)
        if reason is None:
            make: Any = self._find()
            self._owner, self._attribute, self._original, self._installed = owner, self.target, original, make(original)
            setattr(owner, self.target, self._installed)
        return reason

    def remove(self) -> None:
        installed = self._installed
        if installed is not None and self._original is None and vars(self._owner).get(self.target) is installed:
            delattr(self._owner, self.target)
            self._installed = None
        super().remove()


def numpy_lacks(name: str) -> Condition:
    """Returns the condition that NumPy lacks `name`."""

    def check(original: Any) -> str | None:
        if getattr(original, "__name__", None) != "numpy":
            return "the module does not import numpy as np"
        return f"numpy has {name}" if hasattr(original, name) else None

    return check
