"""One or two attention layers of the CUDA backend, with metadata builder and cache, but without a model around them."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pq_cache import random_codebook
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_santa import request as request_module
from vllm_santa.attention.cuda import SantaCudaBackend, SantaCudaMetadata
from vllm_santa.engine_id import engine_id
from vllm_santa.kernel_ops import Rows
from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.policy.budget import Budget
from vllm_santa.policy.parameters import RequestParams
from vllm_santa.reference.decode import LayerContext, decode_row
from vllm_santa.request import RowRequest
from vllm_santa.runtime import runtime_for

MAX_LEN, MAX_ROWS = 32768, 64
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Asked:
    """A request of the batch: `context` tokens are in its cache once the step's `tokens` are written; the last of them are answer tokens
    unless `prompt` says how long its prompt is. method None: nothing asked, the policy leaves it dense."""

    context: int
    method: Method | None = None
    budget: int = 64
    seed: int = 1
    tokens: int = 1
    prompt: int | None = None
    bernoulli: BernoulliSettings | None = None

    @property
    def request(self) -> RowRequest:
        budget = None if self.method in (None, Method.dense) else Budget(self.budget)
        prompt = self.context - self.tokens if self.prompt is None else self.prompt
        return RowRequest(RequestParams(self.method, budget, bernoulli=self.bernoulli), self.seed, prompt)


@contextmanager
def one_rank(config: VllmConfig) -> Iterator[None]:
    """The distributed groups that a worker has, for one process."""
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            store = f"file://{tempfile.mkdtemp()}/store"
            parallel_state.init_distributed_environment(1, 0, store, 0, "nccl")
            parallel_state.initialize_model_parallel(1, 1)
        yield


@dataclass
class Layers:
    """Layers 0 .. layers-1 of `query_heads` heads over one cache each. policy: YAML."""

    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    layers: int = 1
    policy: str = "rules: []\n"
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "policy.yaml").write_text(self.policy)
        (folder / "config.json").write_text(json.dumps(self._model_config()))
        os.environ["SANTA_POLICY"] = str(folder / "policy.yaml")
        engine = EngineArgs(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, attention_backend="santa", max_model_len=MAX_LEN,
            max_num_seqs=MAX_ROWS, block_size=self.block_size, **self.options,
        )  # fmt: skip
        self.config = engine.create_engine_config()
        self.config.cache_config.block_size = self.block_size
        self.config.compilation_config.max_cudagraph_capture_size = MAX_ROWS
        self.names = [f"model.layers.{index}.self_attn.attn" for index in range(self.layers)]
        scale = self.head_dim**-0.5
        with one_rank(self.config):
            torch.set_default_dtype(self.dtype)
            try:
                self.attention = [
                    Attention(self.query_heads, self.head_dim, scale, self.kv_heads, cache_config=self.config.cache_config, prefix=name)
                    for name in self.names
                ]
            finally:
                torch.set_default_dtype(torch.float32)
            spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=self.kv_heads, head_size=self.head_dim, dtype=self.dtype)
            self.spec = SantaCudaBackend.customize_spec(spec)
            for layer in self.attention:
                layer.to(DEVICE)
            self.builder = SantaCudaBackend.get_builder_cls()(self.spec, self.names, self.config, DEVICE)
        self.runtime = runtime_for(self.config)
        self.asked: list[Asked] = []
        request_module._processors[engine_id(self.config)] = self  # type: ignore[assignment]
        self.ignored = 0

    def rows_of(self, common: CommonAttentionMetadata) -> list[RowRequest | None]:
        """As SantaParams.rows_of: the harness stands in for vLLM's logits processor."""
        return [asked.request for asked in self.asked] + [None] * (common.num_reqs - len(self.asked))

    def give_codebooks(self) -> None:
        """Random codebooks, as if trained."""
        for index, layer in enumerate(self.attention):
            codebook = random_codebook(self.kv_heads, self.head_dim, 16, index)
            self.runtime.codebooks._codebooks[index] = codebook
            layer.impl.santa.attach(index)

    def step(self, asked: list[Asked], padded: int = 0, seed: int = 0) -> "Step":
        return Step(self, asked, padded, seed)

    def _model_config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64 * self.query_heads,
            "intermediate_size": 512,
            "num_hidden_layers": self.layers, "num_attention_heads": self.query_heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "torch_dtype": str(self.dtype).removeprefix("torch."), "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip


class Step:
    """A batch over a cache in which everything that no row may read is NaN. Rows follow each other as vLLM orders them: decodes first."""

    def __init__(self, layers: Layers, asked: list[Asked], padded: int, seed: int):
        self.layers, self.asked, self.padded = layers, asked, padded
        torch.manual_seed(seed)
        block = layers.block_size
        used = [-(-one.context // block) for one in asked]
        order = torch.randperm(sum(used) + 2) + 1
        self.table = torch.full((len(asked) + padded, MAX_LEN // block), int(order[-1]), dtype=torch.int32)
        start = 0
        for row, count in enumerate(used):
            self.table[row, :count] = order[start : start + count]
            start += count
        blocks = int(order.max()) + 1
        page = layers.spec.page_size_bytes // torch.finfo(layers.dtype).bits * 8
        self.caches = [
            torch.full((blocks, page), torch.nan, dtype=layers.dtype, device=DEVICE).view(blocks, 1, block, page // block)
            for _ in layers.names
        ]
        heads = (layers.kv_heads, layers.head_dim)
        self.keys = [[self._random(one.context, *heads) for one in asked] for _ in layers.names]
        self.values = [[self._random(one.context, *heads) for one in asked] for _ in layers.names]
        tokens = sum(one.tokens for one in asked)
        self.query = self._random(tokens + padded, layers.query_heads, layers.head_dim) * 5
        self._make_common(tokens)
        self._write_past()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.layers.dtype)

    def _make_common(self, tokens: int) -> None:
        lengths = [one.tokens for one in self.asked] + [0] * self.padded
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        seq_lens = torch.tensor([one.context for one in self.asked] + [0] * self.padded, dtype=torch.int32)
        slots = [self._slots(row, one.context - one.tokens, one.context) for row, one in enumerate(self.asked)]
        self.slots = torch.cat([*slots, torch.full((self.padded,), -1)]).to(DEVICE)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=seq_lens.to(DEVICE), seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(lengths), num_actual_tokens=tokens + self.padded, max_query_len=max(lengths), max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table.to(DEVICE), slot_mapping=self.slots,
            is_prefilling=torch.tensor([one.tokens > 1 for one in self.asked] + [False] * self.padded),
        )  # fmt: skip

    def _slots(self, row: int, first: int, last: int) -> Tensor:
        at = torch.arange(first, last)
        block = self.layers.block_size
        return self.table[row, at // block].long() * block + at % block

    def _write_past(self) -> None:
        for row, one in enumerate(self.asked):
            past = one.context - one.tokens
            if past > 0:
                slots = self._slots(row, 0, past).to(DEVICE)
                for index, layer in enumerate(self.layers.attention):
                    self._write(index, layer, self.keys[index][row][:past], self.values[index][row][:past], slots)

    def _write(self, index: int, layer: Attention, key: Tensor, value: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, key.contiguous(), value.contiguous(), self.caches[index], slots)

    def build(self, capture: bool = False) -> SantaCudaMetadata:
        self.layers.asked = self.asked
        with set_current_vllm_config(self.layers.config):
            builder = self.layers.builder
            return builder.build_for_cudagraph_capture(self.common) if capture else builder.build(0, self.common)

    def new_tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the step's tokens, padded: [T, H, D]."""
        parts = [
            torch.cat([part[one.context - one.tokens :] for part, one in zip(all_rows[index], self.asked, strict=True)])
            for all_rows in (self.keys, self.values)
        ]
        pad = torch.zeros(self.padded, *parts[0].shape[1:], dtype=parts[0].dtype, device=DEVICE)
        key, value = (torch.cat([part, pad]) for part in parts)
        return key, value

    def run(self, metadata: SantaCudaMetadata, index: int = 0, output: Tensor | None = None) -> Tensor:
        """The step through one layer: write, then attend. Returns [T, Hq, D]; rows of padding stay NaN."""
        layer, (key, value) = self.layers.attention[index], self.new_tokens(index)
        self._write(index, layer, key, value, self.slots)
        output = torch.full_like(self.query, torch.nan) if output is None else output
        layer.impl.forward(layer, self.query, key, value, self.caches[index], metadata, output)
        return output

    def alone(self, token: int, row: int, context: int, index: int = 0) -> Tensor:
        """One sparse token by its kernels, as a batch of its own without vLLM around it: [Hq, D] float32. Samples do not depend on the
        batch, so it is what the step must give."""
        one, santa = self.asked[row], self.layers.attention[index].impl.santa
        assert one.method is not None

        def number(value: int, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=DEVICE)

        rows = Rows(
            self.common.block_table_tensor[row : row + 1],
            number(context, torch.int32),
            number(one.method, torch.int8),
            number(one.budget, torch.int32),
            number(one.seed, torch.int64),
        )
        query = self.query[token : token + 1].contiguous()
        output = torch.full_like(query, torch.nan)
        kv, codes = santa.views(self.caches[index])
        santa.launch(query, kv, codes, rows, santa.kernels.families([one.method]), output)
        return output[0].float()

    def expected(self, token: int, row: int, context: int, index: int = 0) -> Tensor:
        """One token by the reference, dense where nothing sparse was asked: [Hq, D] float32."""
        one, layers = self.asked[row], self.layers
        santa = layers.attention[index].impl.santa
        kv, codes = santa.views(self.caches[index])
        if one.method in (None, Method.dense) or not santa.sparse:
            key, value = (part[index][row][:context].float().transpose(0, 1) for part in (self.keys, self.values))
            query = self.query[token].float().unflatten(0, (layers.kv_heads, -1))
            weights = torch.softmax(query @ key.transpose(1, 2) * santa.context.scale, -1)
            return (weights @ value).flatten(0, 1)
        table = self.common.block_table_tensor[row]
        layer: LayerContext = santa.context
        return decode_row(
            self.query[token], kv, codes, table, context, one.method, one.budget, one.seed, layer, layers.runtime.settings, one.bernoulli
        ).output.float()
