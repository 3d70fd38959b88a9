"""For servers that have this folder on PYTHONPATH: vLLM's V2 model runner on a CPU, through Triton's interpreter.

Python imports sitecustomize in every process it starts. vLLM takes Triton for usable on a CPU if `triton.backends.backends` has a "cpu",
which only a fork of Triton brings; with TRITON_INTERPRET=1 no driver is ever asked to compile, so an entry without one will do.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return False


class _AddCpuBackend(MetaPathFinder):
    """Lets `triton.backends` load as usual, and adds to it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_add(module: ModuleType) -> None:
            load(module)
            module.backends["cpu"] = SimpleNamespace(driver=_NoDriver, compiler=None)

        spec.loader.exec_module = load_and_add
        return spec


sys.meta_path.insert(0, _AddCpuBackend())
