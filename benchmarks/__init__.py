"""all_reduce of RankMesh beside gloo and Open MPI, measured in turns within one run: ``python -m benchmarks``."""
