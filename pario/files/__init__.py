"""Records seen as files: names from keys, the tree of one or several LMDBs, and ways for programs to see it."""
