"""Measured thresholds of ``select``: the most bytes a rank contributes to each algorithm, -1 for an unused one.

``python -m benchmarks.tune`` measures the sizes from which the next algorithm is faster and prints this table. Only the
table of ``select`` limits an algorithm that is missing here; no threshold here exceeds that limit.

Measured: 2026-11-21, those of 6 and 8 ranks over messages 2026-11-23, on AMD EPYC, 2 cores, Linux 6.18.44-fc-v669;
that of SCATTER over reads 2026-11-23 on Intel Xeon, 2 cores.
Rows that a single host cannot measure, or whose medium was not available, keep their earlier values.
"""

from __future__ import annotations

START_UP_SECONDS: dict[str, float] = {"hosts": 100e-6, "link": 80e-6}
"""Seconds that each message of a rank takes, by medium, for the model of more ranks than were measured."""
SECONDS_A_BYTE: dict[str, float] = {"hosts": 0.8e-9, "link": 0.35e-9}
"""Seconds that each byte takes in addition. Those between hosts are not measured: a network of 10 Gbit/s."""
MEASURED_RANKS = 12
"""The most ranks for which the algorithms over messages were measured."""
MEASURED_BYTES = 64 << 20
"""The most bytes for which the algorithms were measured; for more, the best one for these is taken."""

# (collective, medium): {algorithm: {ranks in the group: bytes}}
LIMITS: dict[tuple[str, str], dict[str, dict[int, int]]] = {
    ("ALL_GATHER", "link"): {
        "star_link": {2: -1, 6: 8192},
        "small_link": {2: 65536},
        "bruck_link": {2: -1},
        "ring_link": {2: -1},
    },
    ("ALL_GATHER", "reads"): {"over_segment": {2: 4194304, 4: 2097152}},
    ("ALL_GATHER", "registered"): {"over_segment": {2: 32768, 4: 262144}},
    ("ALL_GATHER", "hosts"): {"all_gather": {4: -1, 8: 16384}, "small_link": {4: 65536, 16: -1}},
    ("ALL_REDUCE", "hosts"): {"all_reduce": {4: 65536}},
    ("ALL_REDUCE", "link"): {
        "small_link": {2: 65536, 4: 32768, 6: -1},
        "star_link": {2: -1, 4: 65536},
        "doubling_link": {2: -1},
        "halving_link": {2: 4194304, 4: 67108864, 8: 67108864},
        "ring_link": {2: 67108864, 4: -1, 8: -1},
    },
    ("ALL_REDUCE", "registered"): {"small_segment": {2: 1048576, 4: 262144}},
    ("ALL_REDUCE", "segment"): {"small_segment": {2: 1048576, 4: 131072}},
    ("BROADCAST", "hosts"): {"broadcast": {4: 65536}},
    ("BROADCAST", "link"): {"small_link": {2: 65536, 6: -1}, "star_link": {2: -1, 6: 65536}, "tree_link": {2: -1}},
    ("BROADCAST", "reads"): {"over_segment": {2: 8388608, 4: 8388608}},
    ("BROADCAST", "registered"): {"over_segment": {2: 32768, 4: 2097152}},
    ("GATHER", "link"): {"small_link": {2: 65536, 6: -1}, "star_link": {2: -1, 6: 65536}, "tree_link": {2: -1}},
    ("GATHER", "reads"): {"over_segment": {2: 4194304, 4: 2097152}},
    ("GATHER", "registered"): {"over_segment": {2: 4194304, 4: 1048576}},
    ("REDUCE", "hosts"): {"reduce": {4: 65536}},
    ("REDUCE", "link"): {
        "small_link": {2: 65536, 6: -1},
        "star_link": {2: -1, 6: 65536},
        "tree_link": {2: -1},
        "all_reduce_link": {2: -1},
    },
    ("REDUCE", "registered"): {"small_segment": {2: 1048576, 4: 524288}},
    ("REDUCE", "segment"): {"small_segment": {2: 1048576, 4: 1048576}},
    ("REDUCE_SCATTER", "hosts"): {"reduce_scatter": {4: 1024, 8: 16384}, "small_link": {4: 65536, 16: -1}},
    ("REDUCE_SCATTER", "link"): {
        "small_link": {2: 65536},
        "doubling_link": {2: -1},
        "ring_link": {2: -1},
    },
    ("REDUCE_SCATTER", "reads"): {"over_segment": {2: 4194304, 4: 2097152}},
    ("REDUCE_SCATTER", "registered"): {"over_segment": {2: 65536, 4: 32768}},
    ("SCATTER", "link"): {"small_link": {2: 65536, 6: -1}, "star_link": {2: -1, 6: 65536}, "tree_link": {2: -1}},
    ("SCATTER", "reads"): {"over_segment": {2: 262144}},
    ("SCATTER", "registered"): {"over_segment": {2: 65536, 4: 262144}},
}
