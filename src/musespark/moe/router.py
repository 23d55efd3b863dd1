"""Which experts a token goes to, and with what weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.nvfp4_hopper import WorkList
from musespark.ops.precision import wide_dtype


@dataclass(frozen=True, slots=True)
class Routing:
    """The finished choice for T tokens."""

    weights: Tensor
    """[T, K] float32; 0 on padding rows."""
    ids: Tensor
    """[T, K] int64 expert ids, in descending order of the biased score; -1 on padding rows."""
    work: WorkList | None = None
    """What the experts worked out from the ids ahead of time, good for one call; None: nothing."""


class Router(nn.Module):
    """Scores every expert in float32 and picks the top K."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        wide = wide_dtype(dtype)
        experts, width = config.num_local_experts, config.hidden_size
        kernels = choose_kernels(device, dtype)
        self._route = kernels.route
        # Only bfloat16 is multiplied with a weight in parts.
        self._split = kernels.split_router_weight if dtype == torch.bfloat16 else None
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.scoring = config.scoring_func
        self._output_multiplier = config.output_multiplier
        self.weight = nn.Parameter(
            torch.empty(experts, width, dtype=wide, device=device), requires_grad=False
        )
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(experts, dtype=wide, device=device), requires_grad=False
        )

    def finish_loading(self) -> None:
        """Fold the output multiplier into the weight, once."""
        self.weight.data.mul_(self._output_multiplier)

    def pack(self) -> None:
        """Add the form of the weight that many tokens are multiplied with, where there is one."""
        if self._split is not None:
            self._route = partial(self._route, planes=self._split(self.weight))

    def count_load(self) -> Tensor:
        """Count, from now on, how often each expert is chosen.

        Returns:
            [E + 1] int64: routes of padding rows, then of expert 0, 1, ...; grows with every step.
        """
        route = self._route
        load = torch.zeros(len(self.weight) + 1, dtype=torch.int64, device=self.weight.device)

        def counting(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, ids = route(*args, **kwargs)
            places = ids.flatten() + 1  # padding rows have -1
            load.index_add_(0, places, torch.ones_like(places, dtype=torch.int64))
            return weights, ids

        self._route = counting
        return load

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Routing:
        """Route `hidden_states` [T, D]; rows where `padding` [T] is True go to no expert."""
        weights, ids = self._route(
            hidden_states,
            self.weight,
            self.e_score_correction_bias,
            self.top_k,
            self.scale,
            scoring=self.scoring,
            padding=padding,
        )
        return Routing(weights, ids)
