"""Before: Hugging Face's Trainer, on one device. python FILE"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
model = LlamaForCausalLM(config)
words = torch.randint(0, 64, (8, 12))
samples = [{"input_ids": row, "labels": row} for row in words]

arguments = TrainingArguments(
    output_dir="outputs",
    max_steps=3,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=samples)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print("losses:", losses)
