"""Where the kernels' sources are, and where FlashInfer's JIT keeps what it compiled of them."""

import json

from flashinfer.jit.env import FLASHINFER_JIT_DIR

from vllm_santa.jit import kernel_folder


def main() -> None:
    compiled = sorted(path.stem for path in FLASHINFER_JIT_DIR.glob("vllm_santa_*/vllm_santa_*.so"))
    sources = sorted(path.name for path in kernel_folder().glob("*.cu"))
    print(json.dumps({"sources": sources, "folder": str(kernel_folder()), "cache": str(FLASHINFER_JIT_DIR), "compiled": compiled}))


if __name__ == "__main__":
    main()
