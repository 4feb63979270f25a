"""After: the same model in a pipeline. stageline launch -n 2 FILE, or torchrun --nproc-per-node 2 FILE"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stageline as sl

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
model = LlamaForCausalLM(config)
words = torch.randint(0, 64, (8, 12))

pipe = sl.Pipeline(model, loss_fn=sl.own_loss, schedule="1f1b", microbatches=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, weight_decay=0.0)

losses = []
for _ in range(3):
    optimizer.zero_grad()
    losses.append(pipe.step({"input_ids": words, "labels": words}).loss)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
print("losses:", losses)
