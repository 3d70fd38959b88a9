"""RULER on a running vLLM server, in three steps that need not run on the same machine:

    python -m benchmarks.quality.ruler prompts qwen2.5-coder-1.5b --length 16384 --samples 100 --out prompts.jsonl.gz
    python -m benchmarks.quality.ruler ask prompts.jsonl.gz --url http://127.0.0.1:8000 --out answers.jsonl --concurrency 8
    python -m benchmarks.quality.ruler report answers.jsonl

`prompts` reads RULER's generators and data from their wheel and needs the model's tokenizer; `ask` needs only the server, and goes on
where it stopped; `report` prints Markdown tables and writes benchmarks/results/ruler-MODEL.json.
"""

import json
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import openai
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.models import MODELS, prepare
from benchmarks.quality.ruler.answers import AnswerFile, read_answers
from benchmarks.quality.ruler.asking import ask_all
from benchmarks.quality.ruler.configurations import CONFIGURATIONS
from benchmarks.quality.ruler.prompts import Renderer, make_prompts, read_prompts, write_prompts
from benchmarks.quality.ruler.report import scores_of, table
from benchmarks.quality.ruler.server import Server, ServerError
from benchmarks.quality.ruler.tasks import TASKS
from benchmarks.quality.texts import RULER

RESULTS = Path(__file__).parents[2] / "results"

app = typer.Typer(no_args_is_help=True, help="RULER on a running vLLM server.", pretty_exceptions_enable=False)
console = Console(stderr=True)


@app.command()
def prompts(
    model: Annotated[str, typer.Argument(help="A name of benchmarks.models, or a folder with a tokenizer of transformers.")],
    out: Annotated[Path, typer.Option(help="The prompt file to write (gzipped JSON lines).")],
    length: Annotated[list[int], typer.Option(help="Tokens of a prompt and its answer; may be given several times.")],
    task: Annotated[
        list[str], typer.Option(help="RULER's name of a task; may be given several times.", default_factory=lambda: list(TASKS))
    ],
    samples: Annotated[int, typer.Option(min=1, help="Samples of each task at each length.")] = 100,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template (default: if the tokenizer has one).")] = None,
    wheels: Annotated[Path | None, typer.Option(help="Folder with the wheels of RULER and wonderwords (default: download them).")] = None,
) -> None:
    """Make a prompt file for a model."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(prepare(model) if model in MODELS else model), chat)
    total = len(length) * len(task) * samples
    made = track(make_prompts(renderer, task, length, samples, wheels), "prompts", total=total, console=console)
    try:
        write_prompts(out, model, renderer.chat, made)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console.print(f"wrote {out}: {total} prompts, {out.stat().st_size / 2**20:.1f} MiB")


@app.command()
def ask(
    prompts: Annotated[Path, typer.Argument(help="A prompt file.")],
    out: Annotated[Path, typer.Option(help="The file of answers: JSON lines, gone on with where it exists.")],
    configuration: Annotated[
        list[str],
        typer.Option(
            help=f"What to ask with; may be given several times: {', '.join(CONFIGURATIONS)}.", default_factory=lambda: list(CONFIGURATIONS)
        ),
    ],
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    task: Annotated[list[str] | None, typer.Option(help="Only these tasks of the prompt file.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Only these lengths of the prompt file.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Only the first samples of each task and length.")] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Prompts on their way at a time; after the first, all configurations ask at once.")
    ] = 1,
    seconds: Annotated[float, typer.Option(help="Begin no prompt after so many seconds.")] = float("inf"),
    about: Annotated[str, typer.Option(help="What serves: hardware, precision, options. Kept with the results.")] = "",
) -> None:
    """Ask a running server."""
    if unknown := [name for name in configuration if name not in CONFIGURATIONS]:
        raise typer.BadParameter(f"configuration: {', '.join(unknown)}; allowed: {', '.join(CONFIGURATIONS)}")
    given = read_prompts(prompts)
    chosen = [
        prompt
        for prompt in given.prompts
        if (not task or prompt.task in task) and (not length or prompt.length in length) and (samples is None or prompt.index < samples)
    ]
    if not chosen:
        raise typer.BadParameter(f"{prompts}: has no such prompts")
    chosen.sort(key=lambda prompt: prompt.index)  # a run that is cut off has as many samples of every task
    try:
        server = Server(url, given.chat)
        run = {
            "prompts_sha256": sha256(prompts.read_bytes()).hexdigest(), "tokenizer": given.tokenizer, "chat": given.chat,
            "model": server.model, "vllm": server.version, "about": about,
        }  # fmt: skip
        ask_all(server, chosen, configuration, AnswerFile(out, run), concurrency, console, seconds)
    except (ServerError, openai.OpenAIError, ValueError) as error:
        console.print(f"{error}\nWhat was answered is in {out}; the same command goes on from there.", style="red", soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def report(
    answers: Annotated[Path, typer.Argument(help="A file of answers.")],
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
    suffix: Annotated[str, typer.Option(help="Added to the file's name.")] = "",
) -> None:
    """Print the scores as Markdown tables, and write them as JSON."""
    run, given = read_answers(answers)
    scores = scores_of(given)
    for length in dict.fromkeys(entry.length for entry in scores):
        print(table(scores, length), end="\n\n")
    result = {
        "command": f"python -m benchmarks.quality.ruler report {answers.name}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"vllm": run["vllm"], "vllm-santa": version("vllm-santa"), "ruler": RULER},
        **{name: run[name] for name in ("model", "tokenizer", "chat", "about", "prompts_sha256")},
        "scores": [entry._asdict() for entry in scores],
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"ruler-{Path(run['model']).name}{suffix}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    app()
