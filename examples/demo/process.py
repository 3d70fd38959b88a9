"""A `vllm serve` process: started, waited for, and ended with all its children. The demo and the tests drive their servers with it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

LOG_LINES = 25


class ServerError(RuntimeError):
    """The server did not start, or stopped answering; carries the end of its log."""


class ServerEnded(ServerError):
    """The server gave up by itself."""


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class ServerProcess:
    """One server and its process group. It can be started again after its end.

    Args:
        model: Hugging Face folder.
        name: what requests call the model.
        port: loopback port to listen on.
        log: file that gets all the server prints.
        options: of `vllm serve`.
        environment: all of the process's variables.
    """

    def __init__(self, model: Path, name: str, port: int, log: Path, options: tuple[str, ...], environment: Mapping[str, str]):
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        vllm = str(Path(sys.executable).parent / "vllm")
        self._command = [vllm, "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *options]
        self._environment = environment

    def start(self, seconds: float, progress: Callable[[str], None] = lambda line: None) -> None:
        """Start it and wait until it is healthy. Whether that succeeds or not, `end` must follow.

        Args:
            seconds: how long it may take.
            progress: called about once a second with what the server is doing.

        Raises:
            ServerEnded: it gave up. ServerError: it was not healthy in time.
        """
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        started = time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            if self._process.poll() is not None:
                raise ServerEnded(f"the server ended with status {self._process.returncode}\n{tail(self.log)}")
            with suppress(URLError, OSError), urlopen(f"{self.address}/health", timeout=5):
                return
            progress(f"{waited:.0f} s: {tail(self.log, 1)[-100:]}")
            time.sleep(1)
        raise ServerError(f"the server was not healthy after {seconds:.0f} s\n{tail(self.log)}")

    @property
    def pid(self) -> int:
        """Of the first process; its group has the same number."""
        return self._process.pid

    def end(self, seconds: float) -> None:
        """Ask the process group to end, which vLLM's engine and workers are in, and after that many seconds make it."""
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second also ends workers that outlive their parent
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
