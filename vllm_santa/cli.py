"""The commands of `vllm-santa`. Each lives in a module of its own; those that need torch or vLLM import it when they run."""

import typer

from vllm_santa import calibrate_cli
from vllm_santa.bench.cli import bench
from vllm_santa.doctor.cli import doctor
from vllm_santa.policy import cli as policy_cli
from vllm_santa.tune.cli import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Companion of the vLLM attention backend SANTA.")


@app.callback()
def _commands() -> None:
    """Companion of the vLLM attention backend SANTA."""


app.add_typer(policy_cli.app, name="policy")
app.command()(calibrate_cli.calibrate)
app.command()(doctor)
app.command()(bench)
app.command()(tune)

if __name__ == "__main__":
    app()
