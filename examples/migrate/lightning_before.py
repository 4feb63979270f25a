"""Before: Lightning, on one device. python FILE"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
        self.losses = []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
module = Module()
data = DataLoader(TensorDataset(torch.randn(96, 16), torch.randn(96, 16)), batch_size=32)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
lightning.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, **quiet).fit(module, data)
losses = module.losses
print("losses:", losses)
