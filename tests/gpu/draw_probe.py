"""A worker extension that remembers which tokens the kernels drew. Only without decode graphs: it looks on after each launch."""

from collections.abc import Iterable

from vllm_santa.attention.kernels import Batch, Kernels
from vllm_santa.runtime import runtime_for

Draw = list
"""[layer, context, KV head of the whole model, tokens drawn]."""


class DrawProbe:
    """Methods that vLLM adds to its worker."""

    def watch_draws(self) -> int:
        """Remember the draws of methods that leave a list of them (pps, ssa) from now on. Returns how many kinds of heads there are."""
        self.draws: list[Draw] = []
        kinds = runtime_for(self.vllm_config)._kernels.values()
        for kernels in kinds:
            self._watch(kernels)
        return len(kinds)

    def take_draws(self) -> list[Draw]:
        """Those since the last call."""
        taken, self.draws = self.draws, []
        return taken

    def _watch(self, kernels: Kernels) -> None:
        launch = kernels.launch

        def watching(batch: Batch, families: Iterable[int]) -> None:
            families = list(families)
            launch(batch, families)
            slots = kernels.limits.slots(batch.rows.seq_lens.shape[0])
            for index in families:
                workspace = kernels._placed[slots][index]
                if hasattr(workspace, "sample"):
                    self._keep(batch, workspace, {int(method) for method in kernels._families[index].methods})

        kernels.launch = watching

    def _keep(self, batch: Batch, workspace, methods: set[int]) -> None:
        counts, contexts, found = (tensor.tolist() for tensor in (workspace.count, batch.rows.seq_lens, batch.rows.method))
        for row, (context, method) in enumerate(zip(contexts, found, strict=True)):
            if method in methods:
                for head, count in enumerate(counts[row]):
                    tokens = workspace.sample[row, head, :count, 0].tolist()
                    self.draws.append([batch.layer.layer, context, batch.layer.head_offset + head, tokens])
