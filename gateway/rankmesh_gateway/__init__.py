"""RankMesh's gateway: who is in a job, in which groups, and how they are."""
