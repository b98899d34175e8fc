"""Models that the toolkits lack. There is none yet."""
