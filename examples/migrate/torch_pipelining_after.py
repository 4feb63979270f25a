"""After: the same on Stageline. stageline launch -n 2 FILE, or torchrun --nproc-per-node 2 FILE"""

import torch
from torch import nn

import stageline as sl

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
inputs, targets = torch.randn(32, 16), torch.randn(32, 16)
pipe = sl.Pipeline(model, loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=8)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)

losses = []
for stats in pipe.run([(inputs, targets)] * 3, optimizer=optimizer, max_norm=1.0):
    losses.append(stats.loss)
print("losses:", losses)
