"""Models that the toolkits lack: UniLM for Transformers, ProphetNet for FairSeq."""
