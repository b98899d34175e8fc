"""The process that a model runs in, and what talks to it."""
