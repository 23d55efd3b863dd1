"""`musespark inspect`: what a checkpoint holds, and whether it would load."""

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from musespark.cli.arguments import Model, Revision

if TYPE_CHECKING:
    from rich.tree import Tree

    from musespark.checkpoint.inspect import CheckpointReport
    from musespark.config.model import DecoderConfig

_SHOWN = 12
_LAYERS_A_LINE = 64


def inspect(
    model: Model = "spark-mini",
    *,
    revision: Revision = None,
    tree: Annotated[bool, typer.Option(help="Show the tree of tensors below the summary.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Show what is in a checkpoint, from its headers alone: tensors, bytes, layer pattern, faults.

    Exits with 1 if the checkpoint would not load; everything that can be read is shown first.
    """
    from musespark.checkpoint.inspect import inspect_checkpoint
    from musespark.checkpoint.source import resolve_checkpoint

    report = inspect_checkpoint(resolve_checkpoint(model, revision))
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _print_report(report, with_tree=tree)
    if not report.loads:
        raise typer.Exit(1)


def readable_bytes(num_bytes: float) -> str:
    """With three digits, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def _print_report(report: "CheckpointReport", *, with_tree: bool) -> None:
    from rich.console import Console

    size = f"{report.num_tensors} tensors, {readable_bytes(report.num_bytes)}"
    print(f"{report.folder}: {size} in {len(report.files)} files")
    if report.config is not None:
        _print_model(report, report.config)
    for title, table in (("by part", report.bytes_by_part), ("by dtype", report.bytes_by_dtype)):
        print(f"\n{title}")
        for name, num_bytes in table.items():
            share = num_bytes / max(1, report.num_bytes)
            print(f"  {name:<20}{readable_bytes(num_bytes):>10}  {share:6.1%}")
    if with_tree and report.groups:
        print()
        Console(soft_wrap=True, highlight=False, markup=False).print(_tree(report))
    _print_faults(report)


def _print_model(report: "CheckpointReport", config: "DecoderConfig") -> None:
    print(
        f"model         {config.num_hidden_layers} layers, {config.hidden_size} wide, "
        f"{config.num_attention_heads} heads of {config.head_dim} "
        f"({config.num_key_value_heads} for keys and values), "
        f"{config.vocab_size} tokens"
    )
    if config.has_sparse_layers:
        print(
            f"experts       {config.num_local_experts} a layer, {config.num_experts_per_tok} a "
            f"token, {config.moe_hidden_size} x {config.moe_intermediate_size}"
        )
    quantization = "none" if config.quantization is None else "NVFP4 experts, groups of 16"
    if config.quantization is not None and config.quantization.kv_cache_dtype is not None:
        quantization += f"; suggests a KV cache of {config.quantization.kv_cache_dtype}"
    print(f"quantization  {quantization}")
    legend = f"s sliding, {config.sliding_window} tokens   F full"
    _print_pattern("attention", report.attention_pattern, legend)
    _print_pattern("FFN", report.ffn_pattern, "B 16-bit experts   4 NVFP4 experts   D dense")


def _print_pattern(title: str, pattern: str, legend: str) -> None:
    if not pattern:
        return
    first, *others = textwrap.wrap(pattern, _LAYERS_A_LINE)
    print(f"{title:<14}{first}")
    for line in (*others, legend):
        print(f"{'':<14}{line}")


def _tree(report: "CheckpointReport") -> "Tree":
    from rich.tree import Tree

    root = Tree("tensors")
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for group in report.groups:
        *parents, leaf = _steps(group.name)
        for depth in range(1, len(parents) + 1):
            path = tuple(parents[:depth])
            if path not in nodes:
                nodes[path] = nodes[path[:-1]].add(path[-1])
        times = f" x {group.count}" if group.count > 1 else ""
        nodes[tuple(parents)].add(
            f"{leaf}  {group.dtype} {list(group.shape)}{times}  {readable_bytes(group.num_bytes)}"
        )
    return root


def _steps(name: str) -> list[str]:
    """The tree's levels on the way to a tensor: the decoder, its layers, their modules, the rest.

    Dots between a list and its number, and before a tensor's last word, make no level.
    """
    for prefix in ("model.language_model.", "model."):
        if name.startswith(prefix):
            return [prefix.removesuffix("."), *_steps(name.removeprefix(prefix))]
    words = name.split(".")
    if words[0] != "layers" or len(words) < 3:
        return [name]
    layer, inside = ".".join(words[:2]), words[2:]
    if inside[0] in ("self_attn", "mlp"):
        return [layer, inside[0], ".".join(inside[1:])]
    return [layer, ".".join(inside)]


def _print_faults(report: "CheckpointReport") -> None:
    from musespark.checkpoint.match import fold_names

    for title, names in (
        ("skipped, knowingly", report.skipped),
        ("missing", report.missing),
        ("unexpected", report.unexpected),
    ):
        if names:
            lines = [f"{name} ({n} tensors)" if n > 1 else name for name, n in fold_names(names)]
            _print_section(f"{title} ({len(names)})", lines)
    for title, faults in (
        ("wrongly shaped", report.misshaped),
        ("wrongly typed", report.mistyped),
    ):
        if faults:
            lines = [f"{name}: {fault}" for name, fault in faults.items()]
            _print_section(f"{title} ({len(faults)})", lines)
    if report.problems:
        _print_section("problems", list(report.problems))
    print(f"\n{'It would load.' if report.loads else 'It would not load.'}")


def _print_section(title: str, lines: list[str]) -> None:
    print(f"\n{title}")
    for line in lines[:_SHOWN]:
        print(f"  {line}")
    if len(lines) > _SHOWN:
        print(f"  ... and {len(lines) - _SHOWN} more (all of them: --json)")
