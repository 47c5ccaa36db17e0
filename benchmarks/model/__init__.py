"""A discrete-event model of LMDBIO's recipes and of pario's default on a parallel file system. measurements/model.md.

python -m benchmarks.model      calibrate, compare with every published point, predict; in some two minutes on 2 cores
"""
