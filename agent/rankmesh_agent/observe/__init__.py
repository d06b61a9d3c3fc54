"""Observation of ranks whose traffic is not RankMesh's, from a process beside them."""
