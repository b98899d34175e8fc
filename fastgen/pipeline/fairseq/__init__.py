"""FairSeq's generation commands on the stages of the pipeline.

What is printed is what `fairseq-generate` and `fairseq-interactive` print, byte for byte where the numbers are the
same: models, tasks, dictionaries, tokenizers and scorers are FairSeq's own, used in the order in which its commands use
them, so that a seed draws the same samples. Worker processes put numbers into words, and one scores them. They are
forked once the model is loaded, as those of FairSeq's data loader are; elsewhere a thread does their work.

A configuration is what FairSeq makes of a command line (`convert_namespace_to_omegaconf`).
"""

from fastgen.pipeline.fairseq.commands import evaluate, generate, interact

__all__ = ["evaluate", "generate", "interact"]
