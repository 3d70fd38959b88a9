"""The operating system's view of a server: its processes and their memory."""

import psutil
from server import Server


def processes(server: Server) -> list[psutil.Process]:
    """The API server, the engine and the workers."""
    first = psutil.Process(server.pid)
    return [first, *first.children(recursive=True)]


def memory(server: Server) -> float:
    """MiB that no other process shares, summed over the server's processes."""
    return sum(process.memory_full_info().uss for process in processes(server)) / 2**20
