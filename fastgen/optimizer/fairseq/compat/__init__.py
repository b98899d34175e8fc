"""What makes FairSeq 0.12 run on a current Python, torch and NumPy, and keeps it from running code out of its files.

Nothing here makes anything faster, and all of it holds whether generation is accelerated or not.
"""

from __future__ import annotations

from fastgen.optimizer.fairseq.compat import literals
from fastgen.optimizer.fairseq.compat.configs import HashableConfigs
from fastgen.optimizer.fairseq.compat.modules import ModuleGlobal, missing_from_fairseq, numpy_lacks
from fastgen.patching import Patch


def patches() -> list[Patch]:
    """Every patch of FairSeq that does not concern the speed of generation."""
    return [*_safe(), *_running()]


def _safe() -> list[Patch]:
    """No file of a model or of data runs code."""
    load = f"{__name__}.checkpoints:load"
    guards = f"{__name__}.guards"
    return [
        *(ModuleGlobal(module, "eval", f"{__name__}.literals:evaluator") for module in literals.MODULES),
        Patch("fairseq.utils", "import_user_module", f"{__name__}.literals:import_user_module"),
        Patch("fairseq.checkpoint_utils", "load_checkpoint_to_cpu", load),
        Patch("fairseq.checkpoint_utils", "load_ema_from_checkpoint", load),
        Patch("fairseq.distributed.utils", "_broadcast_object_slow", load),
        Patch("fairseq.data.fasta_dataset", "FastaDataset._build_index", f"{guards}:fasta_index"),
        ModuleGlobal("fairseq.models.speech_to_text.hub_interface", "torch", f"{guards}:asking_torch"),
        ModuleGlobal("fairseq.file_utils", "tarfile", f"{guards}:careful_tarfile"),
    ]


def _running() -> list[Patch]:
    """Names and ways of calling that Python, torch and NumPy have changed since."""
    numpy = f"{__name__}.modules:old_numpy"
    repairs = f"{__name__}.repairs"
    layers = "fairseq.modules.transformer_layer"
    data = "fairseq.data.indexed_dataset"
    mbart = "fairseq.tasks.translation_from_pretrained_bart"
    return [
        HashableConfigs(),
        ModuleGlobal("fairseq.data.data_utils", "np", numpy, numpy_lacks("int")),
        ModuleGlobal("fairseq.data.language_pair_dataset", "np", numpy, numpy_lacks("compat")),
        ModuleGlobal("fairseq.data.token_block_dataset", "np", numpy, numpy_lacks("compat")),
        ModuleGlobal("fairseq.modules.dynamic_crf_layer", "np", numpy, numpy_lacks("float")),
        ModuleGlobal("fairseq", "libnat", f"{__name__}.libnat:make", missing_from_fairseq("libnat")),
        Patch(layers, "TransformerEncoderLayerBase._load_from_state_dict", f"{repairs}:load_from_state_dict"),
        Patch(data, "MMapIndexedDataset._do_init", f"{repairs}:open_data"),
        Patch(data, "MMapIndexedDataset.__del__", f"{repairs}:close"),
        Patch(data, "MMapIndexedDataset.Index.__del__", f"{repairs}:close"),
        Patch(mbart, "TranslationFromPretrainedBARTTask.__init__", f"{repairs}:keep_arguments"),
    ]
