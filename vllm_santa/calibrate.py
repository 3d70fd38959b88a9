"""Train the codebooks of a whole model: run it over a text, capture queries and keys, train layer by layer."""

import hashlib
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import vllm_santa
from vllm_santa.capture import capture_qkv
from vllm_santa.codebook import CodebookError, CodebookInfo, Codebooks, check_subspaces
from vllm_santa.rotary import layer_rotary
from vllm_santa.training import train_codebook

FEWEST_TOKENS = 1024  # four keys a centroid


def calibrate(name: str, text: str, tokens: int, subspaces: int, seed: int, progress: Progress) -> Codebooks:
    """Codebooks of the Hugging Face model `name` (folder or hub name), trained on the first `tokens` tokens of the text.

    Texts longer than the model's context are run in windows, shorter ones are spread over all its positions. Runs on the first GPU,
    else on the CPU in float32.
    Raises CodebookError for a text that is too short or a head_dim the subspaces do not divide.
    """
    config = AutoConfig.from_pretrained(name).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    check_subspaces(head_dim, subspaces)
    input_ids = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt", verbose=False).input_ids[:, :tokens]
    if input_ids.shape[1] < min(tokens, FEWEST_TOKENS):
        raise CodebookError(f"the text has {input_ids.shape[1]} tokens: at least {FEWEST_TOKENS} are needed")
    loading = progress.add_task("loading the model", total=1)
    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if gpu else torch.float32).to("cuda" if gpu else "cpu")
    progress.advance(loading)
    samples = _capture(model, list(input_ids.split(config.max_position_embeddings, 1)), progress)
    layers = {}
    for layer, (keys, queries, values) in progress.track(samples.items(), description="training layers"):
        rotary = layer_rotary(config, layer, config.max_position_embeddings)
        layers[layer] = train_codebook(keys, queries, subspaces, seed, rotary=rotary, values=values)
    info = CodebookInfo(
        model=Path(name).name if Path(name).is_dir() else name,
        num_layers=config.num_hidden_layers,
        num_kv_heads=keys.shape[1],
        head_dim=head_dim,
        subspaces=subspaces,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        training_tokens=input_ids.shape[1],
        vllm_santa_version=vllm_santa.__version__,
    )
    return Codebooks(layers, info)


def _capture(model: PreTrainedModel, windows: list[torch.Tensor], progress: Progress) -> dict[int, list[torch.Tensor]]:
    """Layer -> keys [n, H, D], queries [n, H, G, D] and values [n, H, D] of all windows."""
    parts: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    for window in progress.track(windows, description="running the model"):
        for layer, captured in capture_qkv(model, window).items():
            parts.setdefault(layer, []).append((captured.keys, captured.grouped_queries(), captured.values))
    return {layer: [torch.cat(tensors) for tensors in zip(*part, strict=True)] for layer, part in parts.items()}
