"""What both trainings share: the optimiser, its steps, and how state is kept between pieces."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.config import Schedule


def make_optimiser(model: nn.Module, schedule: Schedule, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": schedule.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=schedule.learning_rate,
        betas=schedule.betas,
        fused=device.type == "cuda",
    )


def take_step(
    model: nn.Module, optimiser: torch.optim.AdamW, loss: Tensor, schedule: Schedule, step: int
) -> None:
    """Go down the loss, at the step's rate."""
    for group in optimiser.param_groups:
        group["lr"] = schedule.learning_rate * schedule.rate(step)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write it whole or not at all."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)
