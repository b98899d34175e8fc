"""The adapters: for each toolkit, which function is hooked, when, and what falls back."""
