"""Before: torch.distributed.pipelining, with clipping over all ranks. torchrun --nproc-per-node 2 FILE"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
inputs, targets = torch.randn(32, 16), torch.randn(32, 16)

own = nn.Sequential(*layers[rank * len(layers) // ranks : (rank + 1) * len(layers) // ranks])
stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)

losses = []
for _ in range(3):
    optimizer.zero_grad()
    parts = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == ranks - 1:
        schedule.step(target=targets, losses=parts)
    else:
        schedule.step()
    squares = sum(parameter.grad.square().sum() for parameter in own.parameters())
    dist.all_reduce(squares)
    for parameter in own.parameters():
        parameter.grad *= min(1.0, 1.0 / (squares.sqrt().item() + 1e-6))
    optimizer.step()
    loss = torch.stack(parts).mean() if parts else torch.zeros(())
    dist.broadcast(loss, src=ranks - 1)
    losses.append(loss.item())
dist.destroy_process_group()
print("losses:", losses)
