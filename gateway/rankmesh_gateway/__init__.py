"""RankMesh's gateway: the registry of jobs, ranks and groups, and their health."""
