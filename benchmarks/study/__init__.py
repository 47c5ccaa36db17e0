"""The study of LMDBIO's optimisations: all recipes side by side, on several stores, ranks and nodes."""
