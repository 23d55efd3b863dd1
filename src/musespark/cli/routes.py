"""`musespark routes`: which experts a text goes to, as a page, a picture, or numbers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import Dtype, Model, Revision

if TYPE_CHECKING:
    from musespark.model.decoder import Decoder
    from musespark.moe.router import Routing

_PAIRS = 3
_ENDINGS = (".html", ".png", ".svg")


def routes(
    model: Model = "spark-mini",
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to route.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File that holds the text to route.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="Token ids to route, such as 1,2,3.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens at most; the rest is left out.")] = 1024,
    output: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained page (.html) or a picture (.png, .svg)."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Dtype = None,
    revision: Revision = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Run a text through the model once and show its routing: load, balance, pairs, every token."""
    from musespark.checkpoint.progress import terminal_progress
    from musespark.checkpoint.source import resolve_checkpoint
    from musespark.cli.generate import _read_prompt
    from musespark.llm.loading import load_decoder

    if output is not None and output.suffix not in _ENDINGS:
        raise typer.BadParameter(f"--output: must end in {', '.join(_ENDINGS)}, found {output}.")
    wanted = _read_prompt(prompt, prompt_file, token_ids)
    folder = resolve_checkpoint(model, revision)
    ids, texts = _tokens(folder, wanted, max_tokens)
    with terminal_progress() as progress:
        decoder = load_decoder(folder, device=device, dtype=dtype, progress=progress)
    report = route_report(decoder, ids, texts)
    if output is not None:
        _write(report, f"Routes of {model}", output)
    if as_json:
        print(json.dumps(report))
    else:
        _print_table(report)


def _tokens(folder: Path, wanted: str | list[int], limit: int) -> tuple[list[int], list[str]]:
    """Ids, and how each is shown."""
    from musespark.chat.tokenizer import Tokenizer
    from musespark.errors import RequestError

    if isinstance(wanted, str):
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode_prompt(wanted)[:limit]
        texts = [tokenizer.decode([token], keep_special=True) for token in ids]
    else:
        ids = wanted[:limit]
        texts = [f"{token} " for token in ids]
    if not ids:
        raise RequestError("The prompt is empty: it must hold at least one token.")
    return ids, texts


def route_report(decoder: "Decoder", token_ids: list[int], texts: list[str]) -> dict[str, Any]:
    """What `--json` prints.

    Args:
        decoder: the model; its routers are watched for one forward pass.
        token_ids: one sequence.
        texts: how each token is shown.
    """
    from musespark.config.sampling import SamplingParams
    from musespark.engine.checks import check_request
    from musespark.errors import ConfigError
    from musespark.moe.router import Router

    config = decoder.config
    check_request(
        token_ids, SamplingParams(), config.vocab_size, config.max_position_embeddings + 1
    )
    found: dict[str, Any] = {}
    watched = [(name, each) for name, each in decoder.named_modules() if isinstance(each, Router)]
    if not watched:
        raise ConfigError("This model has no layer with experts, so nothing is routed.")
    hooks = [
        each.register_forward_hook(lambda _, __, routing, name=name: found.update({name: routing}))
        for name, each in watched
    ]
    try:
        decoder.compute_logits(token_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "num_tokens": len(token_ids),
        "num_experts": config.num_local_experts,
        "top_k": config.num_experts_per_tok,
        "tokens": texts,
        "layers": [
            _layer(int(name.split(".")[1]), found[name], config.num_local_experts)
            for name, _ in watched
        ],
    }


def _layer(index: int, routing: "Routing", E: int) -> dict[str, Any]:
    """One layer's statistics."""
    import torch

    ids, weights = routing.ids.cpu(), routing.weights.cpu()  # [T, K]
    chosen = torch.zeros(ids.shape[0], E).scatter_(1, ids, 1.0)  # [T, E]
    load = chosen.sum(0)
    share = load / load.sum()
    # 1: all experts alike; 0: always the same one.
    entropy = float(torch.special.entr(share).sum()) / max(1e-9, float(torch.tensor(E).log()))
    together = torch.triu(chosen.T @ chosen, diagonal=1)  # [E, E]
    counts, places = together.flatten().topk(min(_PAIRS, E * E))
    pairs = [
        [int(place) // E, int(place) % E, int(count)]
        for count, place in zip(counts, places, strict=True)
        if count > 0
    ]
    return {
        "layer": index,
        "load": [int(count) for count in load],
        "busiest": float(load.max() / load.mean()),
        "entropy": entropy,
        "never": int((load == 0).sum()),
        "pairs": pairs,
        "ids": ids.tolist(),
        "weights": [[round(weight, 4) for weight in row] for row in weights.tolist()],
    }


def _print_table(report: dict[str, Any]) -> None:
    print(
        f"{report['num_tokens']} tokens, {report['num_experts']} experts a layer, "
        f"{report['top_k']} a token\n\n"
        f"{'layer':>6}{'busiest/even':>14}{'entropy':>10}{'never':>8}   often together"
    )
    for layer in report["layers"]:
        pairs = "  ".join(f"{one}+{other}: {count}" for one, other, count in layer["pairs"])
        print(
            f"{layer['layer']:>6}{layer['busiest']:>14.2f}{layer['entropy']:>10.3f}"
            f"{layer['never']:>8}   {pairs}"
        )


def _write(report: dict[str, Any], title: str, path: Path) -> None:
    from musespark.cli.routes_page import routes_page
    from musespark.errors import ConfigError

    try:
        if path.suffix == ".html":
            path.write_text(routes_page(report, title), encoding="utf-8")
        else:
            _draw(report, title, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"output: {path} cannot be written: {error}.") from None


def _draw(report: dict[str, Any], title: str, path: Path) -> None:
    from musespark.errors import ConfigError

    # Here, not at the top: nothing else needs matplotlib.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "output: pictures need matplotlib. Install it with `pip install 'musespark[plot]'`, "
            "or write a page (.html)."
        ) from None
    layers = report["layers"]
    even = report["num_tokens"] * report["top_k"] / report["num_experts"]
    worst = max(layers, key=lambda layer: layer["busiest"])
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(f"{title}, {report['num_tokens']} tokens", fontsize=11)
    load, balance, pairs = figure.subplots(1, 3, width_ratios=(2.2, 1, 1.3))
    shares = [[count / even for count in layer["load"]] for layer in layers]
    image = load.imshow(shares, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=load, label="load / even share")
    load.set(xlabel="expert", ylabel="layer", title="load")
    names = [layer["layer"] for layer in layers]
    if len(names) <= 16:
        load.set_yticks(range(len(names)), [str(name) for name in names])
    balance.plot([layer["busiest"] for layer in layers], names, marker="o", markersize=3)
    balance.set(xlabel="busiest / even share", xlim=(0, None), title="balance")
    balance.invert_yaxis()
    together = pairs.imshow(_together(worst, report["num_experts"]), cmap="magma")
    figure.colorbar(together, ax=pairs, label="tokens")
    pairs.set(xlabel="expert", ylabel="expert", title=f"chosen together, layer {worst['layer']}")
    figure.savefig(path, dpi=110)


def _together(layer: dict[str, Any], num_experts: int) -> list[list[int]]:
    """[E, E]: how many tokens went to both experts; the diagonal is left empty."""
    counts = [[0] * num_experts for _ in range(num_experts)]
    for row in layer["ids"]:
        for one in row:
            for other in row:
                counts[one][other] += one != other
    return counts
