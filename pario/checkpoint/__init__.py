"""State that outlives the job: a tree of arrays is copied, written in the background, and found again."""
