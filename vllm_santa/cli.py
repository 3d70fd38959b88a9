"""The commands of `vllm-santa`. Each lives in a module of its own; those that need torch or vLLM import it when they run."""

import typer

from vllm_santa import calibrate_cli
from vllm_santa.doctor.cli import doctor
from vllm_santa.policy import cli as policy_cli

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Companion of the vLLM attention backend SANTA.")


@app.callback()
def _commands() -> None:
    """Companion of the vLLM attention backend SANTA."""


app.add_typer(policy_cli.app, name="policy")
app.command()(calibrate_cli.calibrate)
app.command()(doctor)

if __name__ == "__main__":
    app()
