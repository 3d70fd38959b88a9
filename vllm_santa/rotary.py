"""Rotary position embedding (RoPE, Su et al. 2021), as far as training needs it: the same keys and queries at other positions.

A text of 2,000 tokens shows a codebook positions 0 to 1,999 only, and RoPE turns the slow features of later ones in directions it has never
seen. Turning every key and query on by a random offset shows it the whole context.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

INTERLEAVED = frozenset({"codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium", "llama4_text"})
"""Model types that rotate neighbouring features; all others rotate feature i with feature i + R/2."""


@dataclass(frozen=True)
class Rotary:
    """A layer's rotary embedding.

    frequencies [R/2] float32, radians a position; the first R features are rotated. context: positions that the codebook is to serve.
    """

    frequencies: torch.Tensor
    interleaved: bool
    context: int

    def spread(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """x [n, ..., D] -> the same rows, float32, each at a random later position: offsets context · u², as short contexts are common."""
        offsets = self.context * torch.rand(len(x), generator=generator).square()
        return self.rotate(x, offsets.floor())

    def rotate(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """x [n, ..., D] at positions p -> float32, at positions p + offsets [n]."""
        angle = (offsets.double()[:, None] * self.frequencies.double().cpu()).to(x.device)
        angle = angle.view(len(x), *[1] * (x.dim() - 2), -1)
        cos, sin = angle.cos().float(), angle.sin().float()
        turned = x.float().clone()
        rotated = 2 * len(self.frequencies)
        halves = (slice(0, rotated, 2), slice(1, rotated, 2)) if self.interleaved else (slice(rotated // 2), slice(rotated // 2, rotated))
        first, second = (x[..., half].float() for half in halves)
        turned[..., halves[0]] = first * cos - second * sin
        turned[..., halves[1]] = second * cos + first * sin
        return turned


def layer_rotary(config: PretrainedConfig, layer: int, context: int) -> Rotary | None:
    """A layer's rotary embedding, from the model's text config; None where it has none, or one that transformers cannot compute."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_type = config.layer_types[layer] if getattr(config, "layer_types", None) else None
    nested = layer_type in parameters
    if nested:
        parameters = parameters[layer_type] or {}
    rotated_layers = getattr(config, "no_rope_layers", None)  # in spite of its name, 1 where there is RoPE
    if "rope_theta" not in parameters or (rotated_layers and not rotated_layers[layer]):
        return None
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        frequencies = parameters["rope_theta"] ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    elif kind in ROPE_INIT_FUNCTIONS:
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type if nested else None)
    else:
        return None
    return Rotary(frequencies.float(), config.model_type in INTERLEAVED, context)
