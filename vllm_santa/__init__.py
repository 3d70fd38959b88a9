"""vllm-santa: a vLLM attention backend that decodes from a small, fairly sampled part of the KV cache."""

__version__ = "0.1.0"
