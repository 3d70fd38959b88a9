"""A worker dies under load: every client hears of it, the server ends as a whole, and the next one answers as it did."""

import threading
import time

import psutil
from client import send_until_lost
from jobs import Mix
from processes import processes
from server import Ask, Server
from tiny_model import prompt

ASKS = [
    Ask(prompt(300 + i, 800 + i), 8, {"method": method, "budget": 32, "seed": i}) for i, method in enumerate(("pps", "ssa", "topk", "prop"))
]


def test_a_killed_worker(busy_server: Server) -> None:
    before = [busy_server.ask(ask) for ask in ASKS]
    family = processes(busy_server)
    worker = next(process for process in family if "Worker" in process.name() or "Worker" in " ".join(process.cmdline()))
    outcomes: list[int | None] = []
    traffic = threading.Thread(target=lambda: outcomes.extend(send_until_lost(busy_server.url, Mix(1).wave(40))))
    traffic.start()
    time.sleep(3)
    worker.kill()
    traffic.join(120)
    assert not traffic.is_alive(), "a client still waits"
    assert len(outcomes) == 40 and any(status is None or status >= 500 for status in outcomes), outcomes
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"left behind: {alive}"

    busy_server.restart()
    assert busy_server.metrics().total("santa_rows_total") == 0, "counters of the server before"
    for ask, answer in zip(ASKS, before, strict=True):
        assert busy_server.ask(ask).agreement(answer) == 8, ask.santa
