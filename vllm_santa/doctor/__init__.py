"""`vllm-santa doctor`: looks at everything a server needs, and says what is wrong and what to do about it.

One check is one function that returns one `Finding`. Nothing here imports torch, vLLM or FlashInfer into this process, so that a missing or
broken one is something to report; what only they know is asked of a child process (probe.py).
"""
