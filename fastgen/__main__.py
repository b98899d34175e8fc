"""`python -m fastgen` prints the status: versions, patches, operators."""

import contextlib

import fastgen

if __name__ == "__main__":
    # Patches are applied when their target is imported; importing it shows whether they fit the installed version.
    with contextlib.suppress(ImportError):
        import transformers.generation.utils  # noqa: F401
    print(fastgen.status())
