"""`vllm-santa calibrate`: the command line; torch and transformers are imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub name.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="UTF-8 text like what the server will read.")],
    out: Annotated[Path, typer.Option(help="The codebook file to write.")] = Path("codebooks.safetensors"),
    tokens: Annotated[int, typer.Option(min=1024, help="How much of the text to use.")] = 8192,
    subspaces: Annotated[int, typer.Option(help="Bytes of a key's code: 8, 16 or 32.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of the k-means start.")] = 0,
) -> None:
    """Train PQ codebooks for a model from a text, and write them as one safetensors file."""
    from transformers.utils import logging

    from vllm_santa.calibrate import calibrate as train
    from vllm_santa.codebook import save_codebooks
    from vllm_santa.refusals import refuse_codebooks_among_weights

    logging.disable_progress_bar()
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        refuse_codebooks_among_weights(out, model)
        with Progress(*columns, console=console) as bars:
            codebooks = train(model, text.read_text(encoding="utf-8"), tokens, subspaces, seed, bars)
        save_codebooks(codebooks, out)
    except (ValueError, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    info = codebooks.info
    typer.echo(
        f"{out}: {len(codebooks.layers)} layers, {info.num_kv_heads} KV heads, head_dim {info.head_dim}, {info.subspaces} bytes a key, "
        f"from {info.training_tokens} tokens; fingerprint {codebooks.fingerprint()}"
    )
