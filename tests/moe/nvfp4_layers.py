"""Random NVFP4 experts for tests: codes, scales, and the float64 answer."""

import dataclasses
from dataclasses import dataclass

import torch

from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.part import ExpertPart
from musespark.moe.router import Routing
from musespark.ops.nvfp4 import dequantize
from musespark.testing import tiny_config

CPU = torch.device("cpu")
PREFIX = "experts."


@dataclass
class Layer:
    """One layer's experts as a checkpoint holds them, in a config that fits."""

    config: object
    tensors: dict[str, torch.Tensor]

    def weights(self):
        """gate_up [E, 2I, H] and down [E, H, I], float64, all scales applied."""
        t = {name.removeprefix(PREFIX): tensor for name, tensor in self.tensors.items()}
        gate_up = dequantize(t["gate_up_proj"], t["gate_up_proj_weight_scale"], torch.float64)
        gate, up = gate_up.chunk(2, dim=1)
        scale_2 = t["gate_up_proj_weight_scale_2"].double()
        gate, up = gate * scale_2[:, 0, None, None], up * scale_2[:, 1, None, None]
        down = dequantize(t["down_proj"], t["down_proj_weight_scale"], torch.float64)
        return torch.cat((gate, up), 1), down * t["down_proj_weight_scale_2"].double()[
            :, None, None
        ]


def make_layer(*, seed=0, gate_over_up=10.0, input_scales=(1.0, 1.0), **overrides):
    """Experts whose gate and up global scales differ by `gate_over_up`, or its inverse, in turn."""
    config = tiny_config(**overrides)
    experts, width = config.num_local_experts, config.moe_hidden_size
    inner = config.moe_intermediate_size
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape):
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape):
        # From subnormal to large.
        codes = torch.randint(1, 110, shape, generator=generator, dtype=torch.uint8)
        return codes.view(torch.float8_e4m3fn)

    ratio = torch.tensor([gate_over_up if e % 2 else 1 / gate_over_up for e in range(experts)])
    base = 0.02 * (0.5 + torch.rand(experts, generator=generator)) * width**-0.5
    tensors = {
        "gate_up_proj": codes(experts, 2 * inner, width // 2),
        "gate_up_proj_weight_scale": scales(experts, 2 * inner, width // 16),
        "gate_up_proj_weight_scale_2": torch.stack((base * ratio.sqrt(), base / ratio.sqrt()), 1),
        "gate_up_proj_input_scale": torch.full((experts, 2), input_scales[0]),
        "down_proj": codes(experts, width, inner // 2),
        "down_proj_weight_scale": scales(experts, width, inner // 16),
        "down_proj_weight_scale_2": 0.01 * (0.5 + torch.rand(experts, generator=generator)),
        "down_proj_input_scale": torch.full((experts,), input_scales[1]),
        "post_expert_norm.weight": 0.1 * torch.randn(width, generator=generator),
    }
    return Layer(config, {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()})


def fill(experts, tensors):
    """Load `experts` from tensors on disk in name, as the loader would."""
    wanted = list(experts.weight_slots(PREFIX, tensors.__contains__))
    for slot in wanted:
        tensor = tensors[slot.name]
        assert tuple(tensor.shape) == slot.shape
        assert tensor.dtype in slot.dtypes
        slot.store(tensor[slot.index] if slot.index else tensor)
    experts.post_expert_norm.finish_loading()
    experts.finish_loading()
    return {slot.name for slot in wanted}


def load(layer, kind=NVFP4Experts, *, dtype=torch.float32, mesh=None, pack=True, tensors=None):
    """The layer's experts, or one rank's share."""
    part = None if mesh is None else ExpertPart.of(layer.config, mesh)
    experts = kind(layer.config, dtype=dtype, device=CPU, part=part)
    fill(experts, tensors or layer.tensors)
    if pack:
        experts.pack()
    return experts


def one_by_one(layer):
    """The same tensors under per-expert names."""
    split = {}
    for name, tensor in layer.tensors.items():
        short = name.removeprefix(PREFIX)
        if short == "post_expert_norm.weight":
            split[name] = tensor
            continue
        proj, _, ending = short.partition("_proj")
        ending = ending.removeprefix("_") or "weight"
        for expert, one in enumerate(tensor):
            if proj == "down":
                split[f"{PREFIX}{expert}.down_proj.{ending}"] = one
            else:
                gate, up = one.chunk(2) if one.ndim > 1 else one
                split[f"{PREFIX}{expert}.gate_proj.{ending}"] = gate
                split[f"{PREFIX}{expert}.up_proj.{ending}"] = up
    return split


def inputs(layer, tokens, *, dtype=torch.float32, seed=1, absent=()):
    """Random activations and routing; routes (token, slot) in `absent` go to no expert."""
    config = layer.config
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, config.moe_hidden_size, generator=generator).to(dtype)
    order = torch.rand(tokens, config.num_local_experts, generator=generator).argsort(dim=1)
    ids = order[:, : config.num_experts_per_tok].contiguous()
    weights = torch.rand(ids.shape, generator=generator)
    for token, slot in absent:
        ids[token, slot], weights[token, slot] = -1, 0.0
    return h, Routing(weights, ids)


def exact_rows(layer, h, routing):
    """The second product's rows of every route [T, K, H], float64; NaN where no expert is."""
    gate_up, down = layer.weights()
    rows = torch.full((*routing.ids.shape, h.shape[1]), torch.nan, dtype=torch.float64)
    for token, row in enumerate(routing.ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                gate, up = (gate_up[expert] @ h[token].double()).chunk(2)
                rows[token, slot] = down[expert] @ (gate * gate.sigmoid() * up)
    return rows


def routed_rows(output):
    """An expert output's rows by route [T, K, H], float64; NaN where there is none."""
    rows = output.rows.double()[output.route_index.clamp_min(0)]
    return rows.masked_fill((output.route_index < 0)[..., None], torch.nan)


def relative_error(found, exact):
    """Over all that is a number in both; which must be the same places."""
    assert torch.equal(found.isnan(), exact.isnan())
    found, exact = found.nan_to_num(), exact.nan_to_num()
    return float((found - exact).norm() / exact.norm())


def finalized_exactly(layer, h, routing, variance_size=None):
    """The whole runner in float64."""
    rows = exact_rows(layer, h, routing)
    gain = 1 + layer.tensors["experts.post_expert_norm.weight"].double()
    scaled = rows * gain
    square = scaled[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = scaled / (square + layer.config.post_norm_eps).sqrt()
    weighted = normed * routing.weights.double()[..., None]
    return weighted.masked_fill((routing.ids < 0)[..., None], 0).sum(dim=1)


def close(found, exact, tolerance=1e-5):
    return float((found.double() - exact).norm() / exact.norm()) < tolerance


def padded(output, num_extra=5, filler=float("nan")):
    """The same output with extra rows of `filler` between the used ones."""
    order = torch.randperm(
        output.rows.shape[0] + num_extra, generator=torch.Generator().manual_seed(3)
    )
    place = order[: output.rows.shape[0]]
    rows = torch.full((order.shape[0], output.rows.shape[1]), filler, dtype=output.rows.dtype)
    rows[place] = output.rows
    here = output.route_index >= 0
    index = torch.where(here, place[output.route_index.clamp_min(0)], -1)
    return dataclasses.replace(output, rows=rows, route_index=index)
