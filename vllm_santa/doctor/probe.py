"""Asks a child process what only torch, vLLM or FlashInfer know: a library that hangs, crashes or talks too much does it there."""

import json
import signal
import subprocess
import sys
from typing import Any

PACKAGE = "vllm_santa.doctor.probes"
SECONDS = 300
"""vLLM's first import takes a minute on a busy machine."""


class ProbeError(RuntimeError):
    """The child did not answer; the message is the last thing it said."""


def ask(name: str, *arguments: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Run the module `name` of vllm_santa.doctor.probes with these arguments, and return the JSON object that it prints last.

    Raises:
        ProbeError: it failed, was killed or took longer than `seconds`.
    """
    command = [sys.executable, "-m", f"{PACKAGE}.{name}", *arguments]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {seconds:.0f} s") from None
    if child.returncode < 0:
        raise ProbeError(f"ended by {signal.Signals(-child.returncode).name}")
    if child.returncode > 0:
        raise ProbeError(_last_line(child.stderr) or f"ended with status {child.returncode}")
    try:
        return json.loads(_last_line(child.stdout))
    except ValueError:
        raise ProbeError(f"said {_last_line(child.stdout)!r}") from None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
