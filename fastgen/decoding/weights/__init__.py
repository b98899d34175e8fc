"""The derived-weight cache: makes copies of weights in other formats, and decides when a copy is still valid."""
