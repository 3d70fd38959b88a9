"""The demo's server: its options, and its end on whatever ends the demo."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from examples.demo.process import ServerProcess

START_LIMIT = 1800  # seconds; eight minutes were seen on two cores busy with other work
STOP_LIMIT = 60  # seconds between asking the processes to end and ending them
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


@contextmanager
def serving(model: Path, name: str, port: int, log: Path, progress: Callable[[str], None]) -> Iterator[str]:
    """Run the server for as long as the context lasts; yield its address once it is healthy. Arguments and errors as ServerProcess has
    them."""
    log.parent.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(model, name, port, log, ("--attention-backend", "santa", *OPTIONS), {**ENVIRONMENT, **os.environ})
    with _terminable():
        try:
            server.start(START_LIMIT, progress)
            yield server.address
        finally:
            server.end(STOP_LIMIT)


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
