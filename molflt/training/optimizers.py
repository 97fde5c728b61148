"""The optimiser and the learning rate's schedule that a configuration asks for.

Adam: Kingma & Ba, arXiv 1412.6980; AdamW, whose weight decay is no part of the gradient: Loshchilov & Hutter,
arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR

from molflt.config import OptimConfig
from molflt.training.objective import learning_rate_factor

_CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def build_optimizer(
    parameters: Iterable[Parameter], config: OptimConfig, fused: bool = True
) -> torch.optim.Optimizer:
    """Adam or AdamW over the parameters.

    The fused step takes a fifth of the time on a CPU. It unscales gradients itself, so that nothing could
    clip them before: not for training with autocast.
    """
    return _CLASSES[config.optimizer](
        parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """The learning rate of each of `total_steps` optimiser steps (`learning_rate_factor`)."""
    warmup_steps = round(config.warmup_fraction * total_steps)

    def factor(step: int) -> float:
        return learning_rate_factor(step, total_steps, warmup_steps, config.schedule, config.power)

    return LambdaLR(optimizer, factor)
