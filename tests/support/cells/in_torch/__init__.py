"""What is run in two groups of one torch.distributed job, over the mesh and gloo's: ``cell(group, rank, size, ...)``.

Cells give what is to be the same in both; those of the side "over" alone, for which gloo has nothing, check for
themselves.
"""
