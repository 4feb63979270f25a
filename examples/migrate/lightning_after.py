"""After: the same network in a pipeline. stageline launch -n 2 FILE, or torchrun --nproc-per-node 2 FILE"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stageline as sl

torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
data = DataLoader(TensorDataset(torch.randn(96, 16), torch.randn(96, 16)), batch_size=32)

pipe = sl.Pipeline(net, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=8)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)

losses = []
for inputs, targets in data:
    optimizer.zero_grad()
    losses.append(pipe.step(inputs, targets).loss)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
print("losses:", losses)
