"""One module per platform: the metadata builder and the attention implementation that vLLM drives."""
