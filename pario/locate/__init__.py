"""Where records lie: the index and the walks that build it."""
