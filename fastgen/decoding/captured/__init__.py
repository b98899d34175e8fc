"""The toolkit-independent part of the captured decode step. docs/architecture.md explains the design."""
