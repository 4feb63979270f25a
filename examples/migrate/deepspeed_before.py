"""Before: DeepSpeed's PipelineModule. DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 FILE"""

import itertools

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
inputs, targets = torch.randn(32, 16), torch.randn(32, 16)

model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

microbatches = itertools.cycle(zip(inputs.split(4), targets.split(4), strict=True))
losses = [engine.train_batch(microbatches).item() for _ in range(3)]
print("losses:", losses)
