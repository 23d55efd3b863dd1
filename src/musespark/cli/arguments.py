"""Arguments that several commands take, described once."""

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="A folder, a packaged model's name, or a Hugging Face id.")
]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; default: what is fast here.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if any.")]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")
]
Executor = Annotated[
    str, typer.Option(help="What starts the processes of a spread model: multiprocess or ray.")
]
Draft = Annotated[
    str,
    typer.Option(help="DSpark draft that guesses tokens ahead: a model, auto, or none."),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(help="Tokens to guess in every step; default: as many as pay."),
]
