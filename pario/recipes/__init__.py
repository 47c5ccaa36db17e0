"""LMDBIO's ways of reading and plain py-lmdb, as sources for studies."""
