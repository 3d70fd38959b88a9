"""What vLLM calls in each of its processes at start."""


def register() -> None:
    """Make `--attention-backend santa` known (entry point `vllm.general_plugins`). Changes nothing for servers on another backend."""
    from vllm_santa import registration  # noqa: F401  (importing registers)
    from vllm_santa.cpu_platform import accept_santa
    from vllm_santa.front import watch_configs
    from vllm_santa.prefix_cache import watch_requests

    accept_santa()
    watch_configs()
    watch_requests()
