"""The process that runs a model, and the server's connection to it."""
