"""The average over all ranks, under any launcher of processes. docs/launching.md describes each.

rankmesh run --nproc-per-node 3 examples/average.py
mpirun -n 3 python examples/average.py
srun -n 3 python examples/average.py
"""

import socket

import numpy as np

import rankmesh as dist

if __name__ == "__main__":
    dist.init_process_group()
    gradient = np.full(1000, dist.get_rank(), np.float32)
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}: {gradient[0]}", flush=True)
    dist.destroy_process_group()
