"""Start a server, ask it a short and a long question with several methods, print what they answered and what they read."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from openai import APIError, OpenAI
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.models import ModelError, cache_folder, prepare
from examples.demo.haystack import Needle, docstring_prose, messages
from examples.demo.process import ServerError, free_port, tail
from examples.demo.reads import Reads, counter, reads
from examples.demo.server import serving

MODEL = "smollm2-135m"
TOKENS = 6000
MAX_TOKENS = 16
NEEDLE = Needle(key="gentle-harbor", value="4827163", depth=0.5)
DENSE: dict[str, str | int] = {"santa_method": "dense"}
SPARSE = [{"santa_method": method, "santa_budget": budget, "santa_seed": 1} for method in ("pps", "prop", "ssa") for budget in (64, 256)]
CAPTION = (
    "Rows read are means over decode steps, layers and KV heads. A budget counts distinct rows, for prop draws per query head; "
    "ssa reads the sink and local windows besides. Times are those of the plain PyTorch reference on this CPU."
)
WARM_UP_LIMIT = 20  # answers that the server may need to train its codebooks


@dataclass(frozen=True)
class Answer:
    """A reply, the seconds a decode step took, and what the server read for it."""

    text: str
    seconds_per_step: float
    reads: Reads


def ask(client: OpenAI, address: str, chat: list[dict[str, str]], parameters: dict[str, str | int], prefix: bool) -> Answer:
    """Ask at temperature 0; with `prefix`, the chat's last message is the beginning of the answer."""
    method = str(parameters["santa_method"])
    before = reads(address, method)
    body = {"vllm_xargs": parameters, "add_generation_prompt": not prefix, "continue_final_message": prefix}
    stream = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=MAX_TOKENS, temperature=0, stream=True, extra_body=body)
    pieces, times = [], []
    for event in stream:
        if event.choices and (event.choices[0].delta.content or event.choices[0].finish_reason):
            pieces.append(event.choices[0].delta.content or "")
            times.append(time.monotonic())
    read = reads(address, method) - before
    if not read.steps:
        raise ServerError(f"the server counted no decode step of {method} for the answer {''.join(pieces)!r}")
    return Answer("".join(pieces).strip(), (times[-1] - times[0]) / read.steps, read)


def compare(client: OpenAI, address: str, prose: list[str], console: Console) -> Table:
    """Ask for the needle with every method. All find the prompt in the prefix cache."""
    table = Table("method", "budget", "answer", "right", "V rows", "K rows", "ms/token", caption=CAPTION)
    chat = messages(NEEDLE, prose)
    with console.status(f"reading {TOKENS} tokens, and training PQ codebooks on them a few layers a step") as status:
        warm_up(client, address, chat)
        for parameters in (DENSE, *SPARSE):
            method, budget = str(parameters["santa_method"]), str(parameters.get("santa_budget", ""))
            status.update(f"asking about {TOKENS} tokens with {method} {budget}")
            answer = ask(client, address, chat, parameters, prefix=True)
            table.title = f"A needle in {answer.reads.context / answer.reads.steps:,.0f} tokens: what each method answers and reads"
            table.add_row(method, budget, *cells(answer))
    return table


def warm_up(client: OpenAI, address: str, chat: list[dict[str, str]]) -> None:
    """Pay for the prefill, and for the codebooks that `ssa` needs: the server trains them on its first prompts, while it answers."""
    for _ in range(WARM_UP_LIMIT):
        ask(client, address, chat, DENSE, prefix=True)
        if counter(address, "santa_codebooks_ready"):
            return
    raise ServerError(f"the server has no codebooks after a prefill of {TOKENS} tokens and {WARM_UP_LIMIT} answers")


def cells(answer: Answer) -> list[str]:
    """The table's cells for an answer: rows are means over its decode steps."""
    total = answer.reads
    context, keys, values = (amount / total.steps for amount in (total.context, total.keys, total.values))
    return [
        " ".join(answer.text.split()),
        "yes" if NEEDLE.value in answer.text else "no",
        f"{values:,.0f} ({values / context:.0%})",
        f"{keys:,.0f} ({keys / context:.0%})",
        f"{answer.seconds_per_step * 1000:.0f}",
    ]


def main(
    serve: Annotated[bool, typer.Option("--serve", help="Leave the server up until Ctrl-C instead of asking it.")] = False,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: 8000 with --serve, else any free one.")] = 0,
) -> None:
    """Run the demo on this machine. Models and the server's log are kept in SANTA_CACHE."""
    console = Console()
    try:
        folder = prepare(MODEL, console=console)
        run(folder, port or (8000 if serve else free_port()), serve, console)
    except (ModelError, ServerError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def run(folder: Path, port: int, serve: bool, console: Console) -> None:
    """Start the server on `folder`; then wait (`serve`), or ask and print the table."""
    log = cache_folder() / "server.log"
    console.print(f"Starting vllm serve --attention-backend santa on port {port}; its log is {log}")
    status = console.status("starting")
    status.start()
    with serving(folder, MODEL, port, log, lambda line: status.update(f"starting, {line}")) as address:
        status.stop()
        if serve:
            console.print(EXAMPLE.format(address=address), highlight=False, markup=False, soft_wrap=True)
            while True:
                time.sleep(3600)
        try:
            show_answers(address, folder, console)
        except APIError as error:
            raise ServerError(f"the server did not answer: {error}\n{tail(log)}") from error


def show_answers(address: str, folder: Path, console: Console) -> None:
    """Ask the short question, then the long one with every method."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=1800, max_retries=0)
    question = "What is the capital of France?"
    answer = ask(client, address, [{"role": "user", "content": question}], DENSE, prefix=False)
    console.print(f"{question} {answer.text}")
    prose = docstring_prose(Tokenizer.from_file(str(folder / "tokenizer.json")), TOKENS)
    console.print(compare(client, address, prose, console))


EXAMPLE = """The server is up; Ctrl-C ends it. Ask it:

curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "smollm2-135m", "max_tokens": 32, "temperature": 0,
  "messages": [{{"role": "user", "content": "What is the capital of France?"}}],
  "vllm_xargs": {{"santa_method": "pps", "santa_budget": 256, "santa_seed": 1}}}}'

or run examples/client.py. Its counters: curl {address}/metrics | grep santa_"""


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
