"""The attention shape that is tuned for: given in words, or read from a model's config.json."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ALLOWED = "QUERY_HEADS/KV_HEADS/HEAD_DIM as 32/8/128, a model's folder, or its config.json"
HEAD_DIMS, MOST_GROUP, DTYPES = (64, 128, 256), 16, ("bfloat16", "float16")
_WORDS = re.compile(r"([0-9]{1,5})/([0-9]{1,5})/([0-9]{1,5})")


@dataclass(frozen=True)
class ModelShape:
    """Heads of one GPU, and the dtype of its KV cache: "bfloat16" or "float16"."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads % self.kv_heads or not 1 <= self.query_heads // self.kv_heads <= MOST_GROUP:
            raise ValueError(f"{self}: allowed: 1 to {MOST_GROUP} query heads for each KV head")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"{self}: head_dim is {self.head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self}: dtype is {self.dtype}; allowed: {', '.join(DTYPES)}")

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}/{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> "ModelShape":
        """Raises ValueError: says what is allowed."""
        if words := _WORDS.fullmatch(text):
            query_heads, kv_heads, head_dim = map(int, words.groups())
            return cls(query_heads, kv_heads, head_dim)
        path = Path(text).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"{text!r} is not a shape; allowed: {ALLOWED}")
        try:
            return cls._of_config(json.loads(path.read_text()))
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not the configuration of a language model ({error!r}); allowed: {ALLOWED}") from None

    @classmethod
    def _of_config(cls, config: dict) -> "ModelShape":
        """From Hugging Face's configuration; of a model that reads more than text, its text part."""
        text = config | config.get("text_config", {})
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        dtype = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
        # vLLM serves float32 weights in 16 bits on a GPU.
        return cls(heads, text.get("num_key_value_heads") or heads, head_dim, "bfloat16" if dtype == "float32" else dtype)
