"""Up to how many bytes a rank contributes the table of ``select`` takes each algorithm.

Written by ``python -m benchmarks.tune --write``: the sizes from which the next algorithm was measured to be faster. An
algorithm that is not here is limited by what ``select`` says alone; no limit here goes beyond that. With
-1 it is never taken.

Measured: by hand, on 2 cores, for the first version of this table.
"""

from __future__ import annotations

# (collective, medium): {algorithm: {ranks in the group: bytes}}
LIMITS: dict[tuple[str, str], dict[str, dict[int, int]]] = {
    ("ALL_REDUCE", "segment"): {"small_segment": {2: 131072, 4: 131072}},
    ("ALL_REDUCE", "link"): {"small_link": {2: 65536, 4: -1}},
    ("BARRIER", "link"): {"direct_link": {2: 1, 4: -1}},
    ("REDUCE", "segment"): {"small_segment": {2: 131072, 4: 131072}},
    ("ALL_REDUCE", "registered"): {"small_segment": {2: 32768, 4: 32768}},
    ("REDUCE", "registered"): {"small_segment": {2: 32768, 4: 32768}},
    ("BROADCAST", "reads"): {"over_segment": {2: 131072, 4: 131072}},
    ("BROADCAST", "registered"): {"over_segment": {2: 131072, 4: 131072}},
    ("ALL_GATHER", "reads"): {"over_segment": {2: 131072, 4: 131072}},
    ("ALL_GATHER", "registered"): {"over_segment": {2: 131072, 4: 131072}},
    ("GATHER", "reads"): {"over_segment": {2: 131072, 4: 131072}},
    ("GATHER", "registered"): {"over_segment": {2: 131072, 4: 131072}},
    ("SCATTER", "reads"): {"over_segment": {2: 131072, 4: 131072}},
    ("SCATTER", "registered"): {"over_segment": {2: 131072, 4: 131072}},
    ("REDUCE_SCATTER", "reads"): {"over_segment": {2: 131072, 4: 131072}},
    ("REDUCE_SCATTER", "registered"): {"over_segment": {2: 131072, 4: 131072}},
    ("ALL_REDUCE", "hosts"): {"small_link": {4: 65536, 8: 32768}},
}
