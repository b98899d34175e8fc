"""The derived-weight cache: who makes copies of weights in other formats, and when one still stands for its weight."""
