"""A `vllm serve` process: started, waited for, and always ended with all its children."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.error import URLError
from urllib.request import urlopen

START_LIMIT = 1800  # seconds; eight minutes were seen on two cores busy with other work
STOP_LIMIT = 60  # seconds between asking the processes to end and ending them
LOG_LINES = 25
# float32: many CPUs multiply bfloat16 several times more slowly. Two sequences of full length fit into one GiB of KV cache.
OPTIONS = ("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8", "--enforce-eager")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that wait must not spin: on a busy machine they take the core from the thread they wait for.
    "OMP_WAIT_POLICY": "PASSIVE",
    # A step that prefills thousands of tokens, or trains codebooks, takes minutes where the cores are busy.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
    "HF_HUB_OFFLINE": "1",
}


class ServerError(RuntimeError):
    """The server did not start, or stopped answering; carries the end of its log."""


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: Path, name: str, port: int, log: Path, progress: Callable[[str], None]) -> Iterator[str]:
    """Run the server for as long as the context lasts; yield its address once it is healthy.

    Args:
        model: Hugging Face folder.
        name: what requests call the model.
        port: loopback port to listen on.
        log: file that gets all the server prints.
        progress: called about once a second with what the server is doing.

    Raises:
        ServerError: it ended, or was not healthy within `START_LIMIT` seconds.
    """
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--attention-backend", "santa", *OPTIONS]
    environment = {**ENVIRONMENT, **os.environ}
    log.parent.mkdir(parents=True, exist_ok=True)
    with _terminable(), log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, address, log, progress)
            yield address
        finally:
            _end(process)


def _wait_until_healthy(process: subprocess.Popen, address: str, log: Path, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    while (waited := time.monotonic() - started) < START_LIMIT:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}\n{tail(log)}")
        with suppress(URLError, OSError), urlopen(f"{address}/health", timeout=5):
            return
        progress(f"{waited:.0f} s: {tail(log, 1)[-100:]}")
        time.sleep(1)
    raise ServerError(f"the server was not healthy after {START_LIMIT} s\n{tail(log)}")


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen) -> None:
    """End the server's process group: vLLM's engine and workers are in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT)


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM raise, so that the server is ended then too, as it is on Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
