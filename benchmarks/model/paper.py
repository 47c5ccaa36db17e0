"""The published points that the model is calibrated on or held against. Seconds, MB/s and counts as printed there.

S. Pumma, M. Si, W. Feng, P. Balaji, "Scalable Deep Learning via I/O Analysis and Optimization", ACM TOPC 6(2), 2019,
and the same group's posters at EuroMPI 2017 and ICPP 2018. Bebop: 36 cores a node; Blues: 16; one GPFS of 10 servers.
"""

from __future__ import annotations

__all__ = [
    "BATCH",
    "CALIBRATION_RANKS",
    "CONTEXT_SWITCHES",
    "EXTRA_GB",
    "GAINS_4608",
    "IOR_BLUES",
    "ITERATIONS",
    "LMDB_BLUES",
    "MMAP",
    "NAMES",
    "PREAD",
    "PROCESSES_PER_NODE",
    "RECORD",
    "TRAINING",
]

NAMES = ("lmdb", "lmm", "dm", "dio", "prov", "coal", "stag")
PROCESSES_PER_NODE = 36
BATCH = 18_432  # records per iteration over all ranks
ITERATIONS = 512
RECORD = 4096  # bytes in the file: 3 KB records, each on one overflow page
CALIBRATION_RANKS = 1152  # the model is fitted on nothing beyond

#: Seconds of the whole training, CIFAR10-Large, strong scaling: ranks -> by NAMES.
TRAINING = {
    1: (26233, 26233, 26233, 26162, 26173, 26188, 26188),
    36: (5107, 1140, 1143, 1118, 1111, 1106, 1106),
    288: (547, 260, 189, 179, 171, 151, 151),
    1152: (382.6, 337.0, 90.3, 85.8, 75.2, 50.3, 49.4),
    2304: (517.7, 585.5, 65.3, 66.4, 54.9, 48.3, 33.3),
    4608: (955.7, 1207, 103.7, 61.4, 53.0, 41.1, 25.9),
    9216: (1878, 2555, 241.6, 61.2, 60.8, 43.3, 29.2),
}

#: MB/s of one client reading a file of 256 GB: bytes of a request -> MB/s. 64 KiB stands for "64 KiB and more".
PREAD = {4 << 10: 1226, 8 << 10: 1845, 16 << 10: 2433, 32 << 10: 2658, 64 << 10: 2665}
MMAP = {4 << 10: 521, 1 << 20: 500}

#: MB/s on Blues: ranks -> IOR, and Caffe with plain LMDB (batch 4,096).
IOR_BLUES = {1: 497, 2: 178, 16: 217, 512: 683}
LMDB_BLUES = {1: 314, 2: 27, 16: 17, 512: 51}

#: Millions of context switches of plain LMDB on one node of Bebop: ranks -> count.
CONTEXT_SWITCHES = {1: 0.2, 2: 9.6, 4: 50.7, 8: 103.9, 16: 206.1, 36: 509.3}

#: GB that the readers of LMM read beyond their own records, all together (4.19 million records): readers -> GB.
EXTRA_GB = {2: 0.12, 4: 0.38, 8: 0.87, 16: 1.85, 32: 3.75}

#: Reading alone, 4,608 ranks of Bebop: times as fast as plain LMDB.
GAINS_4608 = {"dm": 6.7, "dio": 17.18, "prov": 19.44, "coal": 21.86, "stag": 81.05}
