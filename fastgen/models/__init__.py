"""Models that the libraries lack: UniLM for Transformers, ProphetNet for FairSeq."""
