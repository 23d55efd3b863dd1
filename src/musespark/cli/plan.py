"""`musespark plan`: does it fit, how fast can it go, and which layout is best."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from musespark.cli.arguments import Model

if TYPE_CHECKING:
    from musespark.config.model import DecoderConfig
    from musespark.planner.devices import Device
    from musespark.planner.layout import Layout
    from musespark.planner.plan import Plan
    from musespark.planner.roofline import StepTime
    from musespark.planner.simulate import FleetReport

_SHOWN_LAYOUTS = 8


def plan(
    model: Model = "spark-mini",
    *,
    config: Annotated[
        Path | None, typer.Option(help="A config.json to plan for, instead of a model.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="Device: h200, h100-80g, b200, a100-80g or cpu.")
    ] = "h200",
    gpus: Annotated[int, typer.Option(help="GPUs of one node.")] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.")] = None,
    ep: Annotated[
        int | None, typer.Option(help="Processes that experts are handed out to: tp x dp, or 1.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas of the attention layers.")] = None,
    format: Annotated[
        Literal["auto", "bf16", "nvfp4"],
        typer.Option(help="How experts are stored; auto: as the config says."),
    ] = "auto",
    context: Annotated[int | None, typer.Option(help="Tokens of one request.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once, over all GPUs.")] = 32,
    kv_dtype: Annotated[
        Literal["bf16", "fp8", "fp8_e4m3"], typer.Option(help="How keys and values are stored.")
    ] = "bf16",
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of one step; longer prompts are read in chunks.")
    ] = 2048,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the memory left after loading that the cache takes.")
    ] = 0.9,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Memory of one device, if not the table's.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Simulated copies of the layout, each with --concurrency requests.")
    ] = 1,
    arrival_rate: Annotated[
        float | None, typer.Option(help="Simulate: requests a second over all replicas.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="Simulate: file of lines PROMPT,OUTPUT in tokens, drawn at random."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Simulated requests.")] = 500,
    plot: Annotated[
        Path | None, typer.Option(help="Simulate: write a picture (.png, .svg) of it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Plan a deployment from the config alone: no weights are read and no GPU is needed.

    Without --tp, --ep, --pp and --dp, all layouts of these GPUs are ranked and the best is shown.
    Exits with 1 if nothing fits. With --arrival-rate and --lengths, the engine's scheduler then
    serves simulated requests, each step as long as the time model says.
    """
    from musespark.planner.devices import find_device
    from musespark.planner.memory import Workload, with_format
    from musespark.planner.plan import make_plan, rank_plans

    _check_simulation(arrival_rate, lengths, replicas, plot)
    decoder = with_format(_read_config(model, config), format)
    device = find_device(gpu)
    if memory_gib is not None:
        device = dataclasses.replace(device, memory_bytes=int(memory_gib * 2**30))
    workload = Workload(
        context=min(decoder.max_position_embeddings, 131072) if context is None else context,
        concurrency=concurrency,
        kv_dtype="fp8_e4m3" if kv_dtype == "fp8" else kv_dtype,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    layouts = _layouts(decoder, gpus, nodes, {"tp": tp, "ep": ep, "pp": pp, "dp": dp})
    plans = rank_plans(make_plan(decoder, layout, device, workload) for layout in layouts)
    fleet = None
    if arrival_rate is not None and lengths is not None and plans[0].memory.fits:
        from musespark.planner.simulate import make_arrivals, read_lengths, simulate

        arrivals = make_arrivals(read_lengths(lengths), arrival_rate, requests)
        fleet = simulate(decoder, plans[0].layout, device, workload, arrivals, replicas)
        if plot is not None:
            from musespark.planner.plot import plot_fleet

            where = f"{replicas} x ({gpus * nodes} x {device.name}, {plans[0].layout.name})"
            plot_fleet(fleet, f"{where}, {arrival_rate:g} requests/s", plot)
    if as_json:
        report = _as_dict(decoder, device, plans, gpus, nodes)
        print(json.dumps(report | ({} if fleet is None else {"fleet": fleet.to_dict()})))
    else:
        _print_plan(decoder, device, plans[0], nodes)
        _print_ranking(plans)
        if fleet is not None:
            _print_fleet(fleet, replicas, arrival_rate)
    if not plans[0].memory.fits:
        raise typer.Exit(1)


def _check_simulation(
    rate: float | None, lengths: Path | None, replicas: int, plot: Path | None
) -> None:
    if (rate is None) != (lengths is None):
        raise typer.BadParameter("--arrival-rate and --lengths go together: give both or neither.")
    if plot is not None and lengths is None:
        raise typer.BadParameter("--plot shows a simulation: give --arrival-rate and --lengths.")
    if replicas < 1:
        raise typer.BadParameter(f"--replicas must be 1 or more, found {replicas}.")


def _layouts(
    decoder: "DecoderConfig", gpus: int, nodes: int, sizes: dict[str, int | None]
) -> "list[Layout]":
    """The one asked for, or all that there are."""
    from musespark.planner.layout import candidate_layouts, make_layout

    if gpus * nodes == 1 or any(size is not None for size in sizes.values()):
        return [make_layout(gpus=gpus, nodes=nodes, **sizes)]
    if layouts := list(candidate_layouts(decoder, gpus, nodes)):
        return layouts
    raise typer.BadParameter(f"--gpus {gpus} --nodes {nodes}: no layout cuts this model so.")


def _read_config(model: str, path: Path | None) -> "DecoderConfig":
    from musespark.checkpoint.source import resolve_checkpoint
    from musespark.config.model import DecoderConfig
    from musespark.config.strict import read_json_object

    if path is not None:
        return DecoderConfig.from_dict(read_json_object(path), where=str(path))
    return DecoderConfig.from_folder(resolve_checkpoint(model))


def _as_dict(
    decoder: "DecoderConfig", device: "Device", plans: "list[Plan]", gpus: int, nodes: int
) -> dict[str, object]:
    best = plans[0]
    return {
        "format": "bf16" if decoder.quantization is None else "nvfp4",
        "device": dataclasses.asdict(device),
        "gpus": gpus,
        "nodes": nodes,
        "workload": dataclasses.asdict(best.workload),
        "total_weight_bytes": best.memory.total_weights,
        "fits": best.memory.fits,
        "plans": [each.to_dict() for each in plans],
    }


def _print_plan(decoder: "DecoderConfig", device: "Device", best: "Plan", nodes: int) -> None:
    memory, workload = best.memory, best.workload
    world = best.layout.gpus_per_node * nodes
    stored = "BF16" if decoder.quantization is None else "NVFP4"
    where = f"{nodes} x {best.layout.gpus_per_node}" if nodes > 1 else f"{world}"
    print(f"{where} x {device.name}, {best.layout.name}, {stored} experts, "
          f"{workload.concurrency} requests of {workload.context:,} tokens, "
          f"KV cache in {workload.kv_dtype}")  # fmt: skip
    print(f"weights: {memory.total_weights / 1e9:,.1f} GB in all, "
          f"{memory.total_weights / world / 1e9:,.1f} GB a GPU if all were cut evenly; "
          f"this layout holds {memory.weight_bytes / 1e9:,.1f} GB on its fullest\n")  # fmt: skip
    rows = sorted(memory.weights.items(), key=lambda item: -item[1])
    rows += [("KV cache, full layers", memory.kv_full),
             ("KV cache, sliding layers", memory.kv_sliding),
             ("activations", memory.activations),
             ("runtime, communicators", memory.runtime),
             ("recorded graphs", memory.graphs)]  # fmt: skip
    for name, num_bytes in rows:
        print(f"  {name:<26}{num_bytes / 1e9:10.3f} GB")
    print(f"  {'used':<26}{memory.used / 1e9:10.3f} GB of {memory.capacity / 1e9:.1f}\n")
    per_gpu = f"{memory.kv_bytes / 1e9:.2f} GB of KV cache a GPU"
    if memory.fits:
        print(f"It fits: {per_gpu}, and {memory.margin / 1e9:.2f} GB more could be had.")
    else:
        have = f"there is room for {max(memory.kv_budget, 0) / 1e9:.2f} GB"
        print(f"It does not fit: {per_gpu}, but {have}: {-memory.margin / 1e9:.2f} GB lack.")
    print(
        f"  longest requests, {workload.concurrency} at once: {best.largest_context:,} tokens\n"
        f"  most requests of {workload.context:,} tokens: {best.largest_concurrency:,}\n"
    )
    print(f"decode   {best.decode.total * 1e3:,.2f} ms a token and request, "
          f"{best.decode_rate:,.0f} tokens/s in all")  # fmt: skip
    _print_step(best.decode)
    print(f"prefill  {best.prefill.total:,.2f} s for a prompt of {workload.context:,} tokens, "
          f"{workload.context / best.prefill.total:,.0f} tokens/s")  # fmt: skip
    _print_step(best.prefill)


def _print_step(step: "StepTime") -> None:
    for name, seconds in sorted(step.seconds.items(), key=lambda item: -item[1]):
        limit = "  <- the limit" if name == step.limit else ""
        print(f"  {name:<26}{seconds * 1e3:12,.2f} ms{seconds / step.total:7.0%}{limit}")
    if step.collective_bytes:
        print(f"  sent by each GPU          {step.collective_bytes / 1e6:12,.1f} MB")


def _print_ranking(plans: "list[Plan]") -> None:
    if len(plans) == 1:
        return
    print("\nlayouts, best first        GB a GPU   spare GB   decode ms   prefill s   limit")
    for each in plans[:_SHOWN_LAYOUTS]:
        memory = each.memory
        times = (
            f"{each.decode.total * 1e3:12.2f}{each.prefill.total:12.1f}   {each.decode.limit}"
            if memory.fits
            else "   does not fit"
        )
        print(f"  {each.layout.name:<24}{memory.used / 1e9:9.1f}{memory.margin / 1e9:11.1f}{times}")
    if len(plans) > _SHOWN_LAYOUTS:
        print(f"  ... and {len(plans) - _SHOWN_LAYOUTS} more (--json)")


def _print_fleet(fleet: "FleetReport", replicas: int, rate: float | None) -> None:
    print(
        f"\nfleet: {replicas} replicas, {len(fleet.served)} requests at {rate:g} a second, "
        f"{fleet.seconds:,.0f} s\n"
        f"  {'prompt tokens/s':<26}{fleet.prompt_tokens / fleet.seconds:12,.0f}\n"
        f"  {'output tokens/s':<26}{fleet.output_tokens / fleet.seconds:12,.0f}\n"
        f"  {'':<26}{'p50':>12}{'p99':>12}"
    )
    for title, name, factor, unit in (
        ("time to first token", "first_token", 1.0, "s"),
        ("time per token after it", "per_token", 1e3, "ms"),
    ):
        middle, most = (factor * fleet.percentile(name, share) for share in (0.5, 0.99))
        print(f"  {title:<26}{middle:12.3g}{most:12.3g} {unit}")
    print(
        f"  most at once in a replica {fleet.most_running:12,}\n"
        f"  {'preemptions':<26}{fleet.num_preemptions:12,}"
    )
    if not fleet.keeps_up:
        print("It does not keep up: requests queue up. Add replicas, or raise --concurrency.")
