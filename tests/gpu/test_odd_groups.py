"""Query heads per KV head that are no power of two, as small models have them: every family of kernels, by the tests of the other files,
with rows as long as such a server allows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the kernels are compiled by FlashInfer's JIT")

import test_error_kernel as errors
import test_santa_kernels as santa
import test_ssa_kernels as proxies

from vllm_santa.jit import Shape, error_spec, santa_spec, ssa_spec
from vllm_santa.kernel_ops import VALUE_METHODS
from vllm_santa.methods import Method
from vllm_santa.ssa_ops import SSA_METHODS

pytestmark = pytest.mark.gpu

QWEN_1_5B, QWEN_0_5B, SMOLLM2 = (Shape(head_dim, group, torch.bfloat16) for head_dim, group in ((128, 6), (64, 7), (64, 3)))
KV_HEADS = {QWEN_1_5B: 2, QWEN_0_5B: 2, SMOLLM2: 3}
SUBSPACES, LONGEST = 16, 32768


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile everything side by side."""
    specs = [*map(santa_spec, KV_HEADS), *(ssa_spec(shape, SUBSPACES) for shape in KV_HEADS), *map(error_spec, KV_HEADS)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.build_and_load(), specs))


@pytest.fixture(params=KV_HEADS, ids=lambda shape: shape.name)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """The other files' batches then have the model's KV heads, and two of the longest rows."""
    for module, name in ((santa, "HEADS"), (proxies, "HEADS"), (errors, "KV_HEADS")):
        monkeypatch.setattr(module, name, KV_HEADS[request.param])
        monkeypatch.setattr(module, "CONTEXTS", [*module.CONTEXTS, LONGEST, LONGEST - 1])
    return request.param


@pytest.mark.parametrize("budget", [1, 300, 3000])
def test_pps(shape: Shape, budget: int) -> None:
    santa.test_pps_selects_and_weighs_like_the_reference(shape, budget)


@pytest.mark.parametrize("method", VALUE_METHODS, ids=lambda method: method.name)
def test_values(shape: Shape, method: Method) -> None:
    santa.test_value_samplers_draw_like_the_reference(shape, method)


@pytest.mark.parametrize("method", SSA_METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(("budget", "block"), [(1, 64), (300, 16), (5000, 16)])
def test_proxies(shape: Shape, method: Method, budget: int, block: int) -> None:
    proxies.test_rows_and_weights_are_those_of_the_reference((shape, SUBSPACES), method, budget, block)


def test_errors_of_pps(shape: Shape) -> None:
    errors.test_pps_rows_are_estimated_like_the_reference(shape, 300)


@pytest.mark.parametrize("method", errors.SSA_METHODS, ids=lambda method: method.name)
def test_errors_of_proxies(shape: Shape, method: Method) -> None:
    errors.test_rows_by_proxies_are_estimated_like_the_reference(shape, SUBSPACES, method)
