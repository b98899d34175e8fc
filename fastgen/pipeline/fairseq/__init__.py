"""FairSeq's generation commands on the stages of the pipeline.

Their output is that of `fairseq-generate` and `fairseq-interactive`, byte for byte if the numbers are equal: models,
tasks, dictionaries, tokenizers and scorers are FairSeq's own, used in the same order as by its commands, so that a seed
draws the same samples. Worker processes turn token ids into text, and one scores it. They are forked once the model is
loaded, like those of FairSeq's data loader; where forking is not safe, a thread does their work.

A configuration is what FairSeq makes of a command line (`convert_namespace_to_omegaconf`).
"""

from fastgen.pipeline.fairseq.run import evaluate, generate, interact

__all__ = ["evaluate", "generate", "interact"]
