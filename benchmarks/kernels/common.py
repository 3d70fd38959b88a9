"""What the kernel benchmarks share: vLLM-shaped pages, graph-replayed timing, the machine's copy speed, FlashInfer's dense decode."""

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.kernel_ops import Rows
from vllm_santa.methods import Method
from vllm_santa.page import page_views


@dataclass(frozen=True)
class Case:
    """One attention shape: query heads, KV heads, head_dim, tokens per row, rows; and the bytes of code that lie beside each key."""

    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    code_bytes: int = 16

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def key_bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * self.head_dim * self.dtype.itemsize

    def row_bytes(self) -> int:
        """Bytes of one row of K or of V of one head."""
        return self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """query [R, Hq, D]; kv [B, H, N, 2D] and codes [B, H, N, code_bytes], the planes of pages in random order; rows of one method."""

    query: Tensor
    kv: Tensor
    codes: Tensor
    rows: Rows


def make_inputs(case: Case, method: Method, budget: int, peak: float, seed: int = 0, margin: int = 0) -> Inputs:
    """Random pages. peak: standard deviation of the scores, in nats (about 0 is flat attention; 3 and more is peaked).

    margin: columns of the block table beyond what the context needs.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    per_row = -(-case.context // case.block_size)
    blocks = per_row * case.batch
    content = case.kv_heads * (2 * case.head_dim + case.code_bytes // case.dtype.itemsize)
    cache = torch.empty(blocks, 1, case.block_size, content, dtype=case.dtype, device="cuda")
    flat = cache.view(-1)
    for start in range(0, flat.numel(), 1 << 28):  # in pieces: a float32 copy of a whole cache would not fit
        flat[start : start + (1 << 28)].normal_(generator=generator)
    kv, codes = page_views(cache, case.kv_heads, case.head_dim)
    codes.random_(0, 256, generator=generator)
    # Scores q.k / sqrt(D) of unit-variance keys have the standard deviation |q| / sqrt(D).
    query = torch.randn(case.batch, case.query_heads, case.head_dim, device="cuda", generator=generator) * peak
    table = torch.randperm(blocks, device="cuda", generator=generator).to(torch.int32).view(case.batch, per_row)
    table = torch.nn.functional.pad(table, (0, margin))
    zero = torch.zeros(case.batch, dtype=torch.int32, device="cuda")
    seeds = torch.arange(case.batch, device="cuda") + 17
    rows = Rows(table, zero + case.context, (zero + int(method)).to(torch.int8), zero + budget, seeds)
    return Inputs(query.to(case.dtype), kv, codes, rows)


def time_us(functions: list[Callable[[], None]], target_ms: float = 60.0) -> float:
    """Median time of one call in a replayed graph, in microseconds. Several functions (same work on other data) take turns, so that
    small inputs are not read from the L2 cache."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = -(-8 // len(functions))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for function in functions:
                function()
    calls = repeats * len(functions)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / calls

    first = min(once() for _ in range(3))
    times = sorted(once() for _ in range(max(5, min(100, int(target_ms * 1000 / (first * calls))))))
    return times[len(times) // 2]


def copy_speed() -> float:
    """Speed of a kernel that reads 2 GiB and writes 2 GiB, in bytes per second, both counted."""
    source = torch.empty(1 << 29, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_us([lambda: torch.bitwise_not(source, out=target)]) * 1e-6)


def flashinfer_decode(case: Case, inputs: Inputs, output: Tensor, tensor_cores: bool = True) -> Callable[[], None]:
    """FlashInfer's paged decode of the same pages, planned for graph replay."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    per_row = -(-case.context // case.block_size)
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * per_row
    indices = inputs.rows.block_table[:, :per_row].reshape(-1).contiguous()
    last = torch.full((case.batch,), (case.context - 1) % case.block_size + 1, dtype=torch.int32, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    shape = (case.query_heads, case.kv_heads, case.head_dim, case.block_size)
    wrapper.plan(indptr, indices, last, *shape, q_data_type=case.dtype, kv_data_type=case.dtype)
    cache = (inputs.kv[..., : case.head_dim], inputs.kv[..., case.head_dim :])
    return lambda: wrapper.run(inputs.query, cache, out=output)


def dense_reference(case: Case, inputs: Inputs, row: int, scale: float | None = None) -> Tensor:
    """Exact attention of one row in float32: [Hq, D]."""
    scale = 1 / math.sqrt(case.head_dim) if scale is None else scale
    count = int(inputs.rows.seq_lens[row])
    blocks = inputs.rows.block_table[row, : -(-count // case.block_size)].long()
    context = inputs.kv[blocks].transpose(0, 1).flatten(1, 2)[:, :count].float()
    key, value = context.split(case.head_dim, -1)
    query = inputs.query[row].float().unflatten(0, (case.kv_heads, -1))
    return (torch.softmax(query @ key.transpose(-1, -2) * scale, -1) @ value).flatten(0, 1)


def versions() -> dict[str, str]:
    """What a result depends on."""
    import flashinfer

    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.split("release ")[-1].split(",")[0]
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "flashinfer": flashinfer.__version__, "cuda": nvcc}
