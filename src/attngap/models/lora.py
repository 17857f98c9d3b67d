"""Low-rank corrections of a model's linear layers (LoRA, arXiv 2106.09685), through peft."""

import importlib.util

import torch
from torch import nn
from transformers import PreTrainedModel

from attngap.errors import AttngapError, missing_extra


def add_lora(model: PreTrainedModel, rank: int, *, seed: int = 0) -> None:
    """Put adapters of that rank on the attention's projections, in place; they start as no change at all."""
    if importlib.util.find_spec("peft") is None:
        raise missing_extra("LoRA needs", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    targets = sorted(projections(model))
    if not targets:
        raise AttngapError(f"{type(model).__name__} has no linear projections around its attention to put LoRA on")
    torch.manual_seed(seed)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)


def projections(model: PreTrainedModel) -> set[str]:
    """The linear layers inside attention modules, by full name."""
    attention = {name for name, part in model.named_modules() if "attngap" in part._modules}
    return {
        f"{name}.{child}"
        for name in attention
        for child, part in model.get_submodule(name).named_children()
        if isinstance(part, nn.Linear)
    }
