"""The demo's parts that need no model: the long prompt, the counters, and a server that does not start or must end."""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.demo import process, server
from examples.demo.haystack import Needle, docstring_prose, messages
from examples.demo.reads import Reads, counter, reads

METRICS = """# TYPE santa_rows counter
santa_rows_total{method="pps",reason="request"} 3
santa_rows_total{method="pps",reason="rule"} 1
santa_rows_total{method="dense",reason="rule"} 50
# TYPE santa_context_tokens counter
santa_context_tokens_total{method="pps"} 4000
# TYPE santa_key_rows_read counter
santa_key_rows_read_total{method="pps"} 4000
# TYPE santa_value_rows_read counter
santa_value_rows_read_total{method="pps"} 250.5
# TYPE santa_codebooks_ready gauge
santa_codebooks_ready 1
"""


@pytest.fixture
def address() -> Iterator[str]:
    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_counters_are_summed_over_labels_that_were_not_asked_for(address: str) -> None:
    assert reads(address, "pps") == Reads(steps=4, context=4000, keys=4000, values=250.5)
    assert reads(address, "ssa") == Reads(0, 0, 0, 0)
    assert counter(address, "santa_codebooks_ready") == 1
    assert reads(address, "pps") - Reads(1, 1000, 500, 50.5) == Reads(3, 3000, 3500, 200)


def test_prose_fills_the_tokens_asked_for_and_is_the_same_every_time(words: Tokenizer) -> None:
    prose = docstring_prose(words, 1500)
    count = sum(len(words.encode(paragraph).ids) for paragraph in prose)
    assert 1300 < count <= 1500 and len(set(prose)) == len(prose)
    assert docstring_prose(words, 1500) == prose
    assert docstring_prose(words, 700) == prose[: len(docstring_prose(words, 700))]


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_the_needle_stands_where_it_should(depth: float, place: int) -> None:
    needle = Needle("brave-otter", "1234567", depth)
    prose = ["A.", "B.", "C.", "D."]
    user, assistant = messages(needle, prose)
    paragraphs = [*prose[:place], needle.sentence, *prose[place:]]
    assert "\n\n".join(paragraphs) in user["content"] and user["content"].endswith(f"{needle.key} mentioned in the provided text?")
    assert needle.value not in assistant["content"] and assistant["role"] == "assistant"


def fake_vllm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `server` find this shell script where it looks for vLLM's."""
    (folder / "vllm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "vllm").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path, "echo no such thing; exit 3", monkeypatch)
    serving = server.serving(tmp_path, "m", process.free_port(), tmp_path / "logs" / "log", lambda _: None)
    with pytest.raises(process.ServerError, match="status 3\nno such thing"), serving:
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_servers_children_too(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; wait", monkeypatch)
    restore = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
    ready = threading.Event()

    def interrupt() -> None:
        ready.wait()
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    serving = server.serving(tmp_path, "m", process.free_port(), tmp_path / "log", lambda _: (tmp_path / "child").exists() and ready.set())
    with pytest.raises((SystemExit, KeyboardInterrupt)), serving:
        pass
    signal.signal(signal.SIGINT, restore)
    child = (tmp_path / "child").read_text().strip()
    for _ in range(50):
        if subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout.strip()[:1] in ("", "Z"):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} still runs")
