"""Data-parallel linear regression: gradients by autograd from a rank's part of the data, averaged by all_reduce."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def main():
    dist.init_process_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(90, 2, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.tensor([[2.0], [-3.0]], dtype=torch.float64) + 0.5
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, seed=1)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)

    torch.manual_seed(rank)  # every rank begins with weights of its own, until rank 0's are broadcast
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    for param in model.parameters():
        dist.broadcast(param.data, src=0)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for batch, wanted in loader:
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()
            average_gradients(model)
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.5 * param.grad
            total += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.reduce(total, dst=0)
        if rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.9f}", flush=True)

    weights = [torch.empty_like(model.weight) for _ in range(size)]
    dist.all_gather(weights, model.weight.detach())
    same = all(torch.equal(weights[0], other) for other in weights)
    print(f"rank {rank}: {[round(w, 6) for w in model.weight.flatten().tolist()]}, all the same: {same}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
