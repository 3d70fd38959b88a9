"""`vllm-santa bench`: the benchmarks, run as programs of their own.

They live in `benchmarks/` at the top of the source tree; the wheel carries them as `vllm_santa.benchmarks`.
"""
