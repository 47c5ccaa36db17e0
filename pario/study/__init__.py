"""The study of LMDBIO's optimisations: every recipe beside the others, on stores, ranks and nodes, in figures."""
