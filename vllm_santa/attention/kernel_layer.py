"""SparseLayer where CUDA kernels write the cache and decode."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_santa.attention.kernels import Batch, Wanted
from vllm_santa.attention.layer import SparseLayer
from vllm_santa.codebook import Codebook
from vllm_santa.jit import Shape
from vllm_santa.kernel_ops import Layer, Rows
from vllm_santa.ssa_ops import CodebookBuffers, encode_blocks, write_cache

if TYPE_CHECKING:
    from vllm_santa.attention.cuda_step import GatheredRows


class KernelLayer(SparseLayer):
    """Everything that a captured graph reads is allocated here, while vLLM loads the model, and stays where it is."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, soft_cap: float | None, window: int | None):
        super().__init__(num_heads, num_kv_heads, head_dim, scale, soft_cap, window)
        dtype = self.runtime.vllm_config.model_config.dtype
        self.kernels = self.runtime.kernels(Shape(head_dim, num_heads // num_kv_heads, dtype), num_kv_heads)
        policy = self.runtime.policy
        self.codebook = CodebookBuffers(num_kv_heads, head_dim, policy.subspaces, torch.device("cuda"))
        self._cache: Tensor | None = None
        self._planes: tuple[Tensor, Tensor] | None = None

    def attach(self, layer: int) -> None:
        super().attach(layer)
        self.launch_layer = Layer(layer, self.context.scale, self.context.soft_cap, self.context.first_kv_head)
        if self.context.codebook is not None:
            self.codebook.load(self.context.codebook)

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """As SparseLayer.views; made once, because a layer's cache stays where it is."""
        if self._planes is None or self._cache is not cache:
            self._cache, self._planes = cache, super().views(cache)
        return self._planes

    def write(self, key: Tensor, value: Tensor, kv: Tensor, codes: Tensor, slots: Tensor) -> None:
        """New keys, values and their codes, in one launch. key, value: [>= T, H, D]. slots: int64 [T], -1 = padding."""
        count = slots.shape[0]
        write_cache(key[:count], value[:count], kv, codes, slots, self.codebook)

    def train_codebook(self) -> Codebook | None:
        """As SparseLayer.train_codebook; a codebook that appears is loaded, and all the cache holds is encoded, before the step's first
        launch."""
        codebook = super().train_codebook()
        if codebook is not None and self._planes is not None:
            self.codebook.load(codebook)
            encode_blocks(*self._planes, None, self.codebook)
        return codebook

    def launch(
        self, query: Tensor, kv: Tensor, codes: Tensor, rows: Rows, families: frozenset[int], output: Tensor, measured: Tensor | None = None
    ) -> None:
        """Decode the rows of these families of methods. query, output: [R, Hq, D]. measured: int8 [R], 1 where their error is wanted."""
        wanted = None if measured is None else Wanted(measured, self._sums)
        self._launch(query, kv, codes, rows, families, output, wanted)

    def launch_gathered(self, query: Tensor, kv: Tensor, codes: Tensor, part: "GatheredRows", output: Tensor) -> None:
        """As `launch`, for tokens that are not rows of the batch; not for graphs."""
        if part.measured is None:
            self._launch(query, kv, codes, part.rows, part.families, output, None)
            return
        flags, own = torch.zeros_like(part.rows.method), self._sums[part.owners]
        flags[part.measured] = 1
        self._launch(query, kv, codes, part.rows, part.families, output, Wanted(flags, own))
        self._sums[part.owners[part.measured]] = own[part.measured]

    @property
    def _sums(self) -> Tensor:
        """Where the errors of this layer's rows go: float32 [rows, parts, 2]."""
        return self.runtime.meter.layer(self.context.layer)

    def _launch(
        self, query: Tensor, kv: Tensor, codes: Tensor, rows: Rows, families: frozenset[int], output: Tensor, wanted: Wanted | None
    ) -> None:
        self.kernels.launch(Batch(query, kv, codes, rows, self.launch_layer, self.codebook, output, wanted), families)
