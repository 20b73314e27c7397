"""Products by numpy's OpenBLAS, and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import threadpoolctl
import torch
from torch import Tensor

from hydraflow.device import mkl_is_slow, usable_cores
from hydraflow.models import openblas


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (drawn(5, 7), drawn(7, 3)),
        (drawn(7, 5).t(), drawn(3, 7).t()),
        (drawn(2, 9, 3, 7).transpose(1, 2)[:, :2], drawn(2, 4, 2, 7).transpose(1, 2).mT),
        (drawn(5, 0), drawn(0, 3)),
        (drawn(0, 7), drawn(7, 3)),
    ],
)
def test_a_product_of_any_strides_is_that_of_float64(a: Tensor, b: Tensor) -> None:
    wanted = (a.double() @ b.double()).float()
    torch.testing.assert_close(openblas.product(a, b), wanted, rtol=1e-5, atol=1e-5)
    out = torch.empty(*wanted.shape[:-2], *wanted.shape[:-3:-1]).mT
    assert openblas.product(a, b, out=out) is out
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_reported_of_infinite_numbers_and_types_must_be_equal() -> None:
    with np.errstate(all="raise"):
        found = openblas.product(torch.full((2, 2), torch.inf), torch.tensor([[1.0, -1.0], [-1.0, 1e-30]]))
        openblas.product(torch.full((2, 2), 1e-30), torch.full((2, 2), 1e-30))
    assert found.isnan().any()
    with pytest.raises(AssertionError):
        openblas.product(drawn(2, 2), drawn(2, 2).double())


def test_products_are_in_torchs_profiles() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        openblas.product(drawn(2, 3), drawn(3, 4))
        openblas.product(drawn(5, 2, 3), drawn(5, 3, 4))
    named = [event.name for event in profiled.events() if event.name.startswith("openblas")]
    assert named == ["openblas::mm", "openblas::bmm"]


def test_storage_stays_resizable_and_a_parameter_may_be_given() -> None:
    """FSDP frees the storage of gathered weights."""
    weight, x = torch.nn.Parameter(drawn(3, 7)), drawn(7, 2)
    found = openblas.product(weight, x)
    assert not found.requires_grad
    for one in (weight, x, found):
        one.untyped_storage().resize_(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    openblas._uses_avx512.cache_clear()
    yield
    torch.set_num_threads(before)
    openblas._uses_avx512.cache_clear()


@dataclass
class Loaded:
    """Stands in for threadpoolctl, where OpenBLAS has these kernels."""

    kernels: list[str]
    threads: int = 2

    def select(self, *, internal_api: str) -> Loaded:
        assert internal_api == "openblas"
        return self

    def info(self) -> list[dict[str, str]]:
        return [{"architecture": name} for name in self.kernels]

    def limit(self, *, limits: int) -> None:
        self.threads = limits


@pytest.mark.parametrize(
    ("kernels", "slow", "faster"),
    [
        (["SkylakeX"], True, True),
        (["SkylakeX", "Cooperlake"], True, True),
        (["SkylakeX"], False, False),
        (["Haswell"], True, False),
        (["SkylakeX", "Haswell"], True, False),
        ([], True, False),
    ],
)
def test_only_where_it_uses_avx512_and_mkl_does_not(
    kernels: list[str], slow: bool, faster: bool, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(kernels)
    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda: loaded)
    monkeypatch.setattr(openblas, "_library_of_numpy", lambda: "scipy-openblas")
    monkeypatch.setattr(openblas, "mkl_is_slow", lambda: slow)
    torch.set_num_threads(2)
    assert not openblas.is_faster() and loaded.threads == 2
    torch.set_num_threads(1)
    assert openblas.is_faster() == faster and loaded.threads == (1 if faster else 2)
    assert openblas.suits(torch.empty(1)) == faster
    assert not openblas.suits(torch.empty(1, dtype=torch.float64))
    assert not openblas.suits(torch.empty(1, device="meta"))


@pytest.mark.parametrize("kernels", ["SkylakeX", "Haswell"])
def test_the_kernels_of_this_process_are_recognised(kernels: str) -> None:
    """In a process of its own, because OpenBLAS chooses when numpy is imported."""
    if not mkl_is_slow():
        pytest.skip("only a processor with AVX-512 that MKL does not use")
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from hydraflow.models import openblas; print(openblas.is_faster())\n"
        "from threadpoolctl import threadpool_info\n"
        "print(*{one['num_threads'] for one in threadpool_info() if one['internal_api'] == 'openblas'})"
    )
    environ = os.environ | {"OPENBLAS_CORETYPE": kernels, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    if kernels == "SkylakeX":
        assert done.stdout.split() == ["True", "1"], done.stderr
    else:  # as many threads as before, at most one for each core
        assert done.stdout.split() == ["False", str(min(2, usable_cores()))], done.stderr
