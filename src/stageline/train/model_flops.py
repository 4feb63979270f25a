"""Model FLOPs utilization (MFU): the share of the devices' peak that the model's own arithmetic uses."""

from __future__ import annotations

import re

import torch
from torch import nn

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "L40S": 362.0,
    "A100": 312.0,
    "A10G": 70.0,
    "L4": 121.0,
    "V100": 125.0,
}
"""Dense peak TFLOP/s in 16 bits by words of the GPU's name, the longer names first; from the vendor's data sheets."""


def peak_flops(device: torch.device, dtype: str, configured: float) -> float | None:
    """Return the peak FLOP/s of a device: the configured TFLOP/s, or those of a known GPU in 16 bits, or None.

    >>> peak_flops(torch.device("cpu"), "float32", 0.0) is None, peak_flops(torch.device("cpu"), "float32", 1.5)
    (True, 1500000000000.0)
    """
    if configured:
        return configured * 1e12
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for words, peak in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the floating-point operations of a training step for each token of a language model.

    As usual: 6 for each parameter that is multiplied with (4 if it is frozen), and 12 times the width for each token of
    the context and each layer of attention. An embedding is looked up, not multiplied with, unless it is also the head.
    Recomputation does not count.

    >>> flops_per_token(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8, bias=False)), length=16)
    384.0
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + (not isinstance(module, nn.Embedding))
    multiplied = sum(
        parameter.numel() * (6 if parameter.requires_grad else 4)
        for parameter in model.parameters()
        if uses[id(parameter)]
    )
    layers, width = _attention(model)
    return float(multiplied + 12 * layers * width * length)


def _attention(model: nn.Module) -> tuple[int, int]:
    """Return the layers and the width of the attention of the built-in GPT or of a model of transformers; else 0, 0."""
    from stageline.train.gpt import GPT

    if isinstance(model, GPT):
        return len(model.blocks), model.tokens.embedding_dim
    config = getattr(model, "config", None)
    layers, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    return (layers, width) if isinstance(layers, int) and isinstance(width, int) else (0, 0)
