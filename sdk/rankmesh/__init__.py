"""torch.distributed as a mesh of services."""
