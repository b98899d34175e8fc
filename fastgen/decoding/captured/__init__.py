"""The captured decoding step: what does not depend on the toolkit. The design is in docs/architecture.md."""
