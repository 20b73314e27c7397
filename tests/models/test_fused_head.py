"""The fused head against autograd through log_softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hydraflow.models import fused_head, heads
from hydraflow.models.ask import Ask
from hydraflow.models.chunks import head_chunk
from hydraflow.models.fused_head import FusedHead, HeadWork
from hydraflow.models.heads import PolicyModel, shape_logits

V, HIDDEN, K = 11, 5, 7
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "granite": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "cohere": {"logit_scale": 0.3},
    "falcon_h1": {"lm_head_multiplier": 1.7},
    "gemma2": {"final_logit_softcapping": 1.5},
}
"""Facts of configurations by the type of the model."""


def shape_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(shape_logits, config=config_of(name))


def config_of(name: str) -> Any:
    config = SimpleNamespace(model_type=name, **SHAPES[name])
    config.get_text_config = lambda: config
    return config


def inputs(dtype: torch.dtype = torch.float64, tokens: int = K) -> list[torch.Tensor]:
    """Hidden states, weight, bias, targets."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(tokens, HIDDEN), (V, HIDDEN), (V,)]
    numbers = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    return [*(n.requires_grad_() for n in numbers), torch.randint(V, (tokens,), generator=draw)]


def plain(hidden: Any, weight: Any, bias: Any, targets: Any, work: HeadWork) -> list[torch.Tensor]:
    logits = work.process(F.linear(hidden, weight, bias)) / work.ask.temperature
    everything = logits.log_softmax(-1)
    log_probs = everything[torch.arange(len(targets)), targets]
    return [log_probs, -(everything.exp() * everything).sum(-1)][: 1 + work.ask.entropy]


def gradients(outputs: Any, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of a sum with a curve in it, so that every token's gradient is another."""
    loss = sum(
        (torch.linspace(-1, 2, len(column), dtype=column.dtype) * (column + column.square())).sum()
        for column in outputs
        if column is not None
    )
    return torch.autograd.grad(loss, weights)


@pytest.mark.parametrize("chunk", [1, 3, K, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy", [False, True])
def test_numbers_and_gradients_are_those_of_the_formula(entropy: bool, shape: str, chunk: int) -> None:
    *weights, targets = inputs()
    for temperature in (1.0, 0.7):
        work = HeadWork(Ask(temperature, entropy), shape_of(shape), chunk)
        for used in (weights, weights[:2]):  # with a bias and without
            arguments = *used, *[None] * (3 - len(used)), targets, work
            got, wanted = FusedHead.apply(*arguments), plain(*arguments)
            found = [column for column in got if column is not None]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(gradients(got, used), gradients(wanted, used), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("shape", ["plain", "gemma2"])
def test_gradcheck(shape: str, chunk: int) -> None:
    *weights, targets = inputs(tokens=4)
    work = HeadWork(Ask(0.7, entropy=True), shape_of(shape), chunk)
    assert torch.autograd.gradcheck(lambda *args: FusedHead.apply(*args, targets, work), weights)


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("chunk", [3, 100])
def test_one_of_the_two_outputs_may_be_all_that_is_trained(trained: int, chunk: int) -> None:
    *weights, targets = inputs()
    work = HeadWork(Ask(entropy=True), shape_of("plain"), chunk)
    got, wanted = FusedHead.apply(*weights, targets, work), plain(*weights, targets, work)
    torch.testing.assert_close(
        gradients(got[trained : trained + 1], weights),
        gradients(wanted[trained : trained + 1], weights),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_entropies_that_are_not_trained_change_no_bit(shape: str, chunk: int, dtype: torch.dtype) -> None:
    *weights, targets = inputs()
    weights = [weight.detach().to(dtype).requires_grad_() for weight in weights]
    results = []
    for trained in (True, False):
        ask = Ask(0.7, entropy=True, entropy_is_trained=trained)
        log_probs, entropies = FusedHead.apply(*weights, targets, HeadWork(ask, shape_of(shape), chunk))
        assert entropies.requires_grad == trained
        results.append([log_probs, entropies, *gradients([log_probs], weights)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    *weights, targets = inputs()
    weights[frozen].requires_grad_(False)
    work = HeadWork(Ask(), shape_of("plain"), 3)
    FusedHead.apply(*weights, targets, work)[0].sum().backward()
    assert [weight.grad is None for weight in weights] == [number == frozen for number in range(3)]


def test_a_tied_matrix_gets_the_gradient_of_both_its_uses() -> None:
    _, weight, _, targets = inputs()
    ids, work = torch.arange(K), HeadWork(Ask(entropy=True), shape_of("plain"), 3)
    got = FusedHead.apply(weight[ids], weight, None, targets, work)
    wanted = plain(weight[ids], weight, None, targets, work)
    torch.testing.assert_close(gradients(got, [weight]), gradients(wanted, [weight]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", ["plain", "gemma2"])
def test_no_token_gives_gradients_of_zero(shape: str) -> None:
    *weights, targets = inputs(tokens=0)
    log_probs, entropies = FusedHead.apply(*weights, targets, HeadWork(Ask(entropy=True), shape_of(shape), 3))
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)


def test_greedy_matches() -> None:
    *weights, targets = inputs()
    best = F.linear(*weights).argmax(-1)
    targets[:3] = best[:3]
    log_probs, matches = FusedHead.apply(
        *weights, targets, HeadWork(Ask(greedy_match=True), shape_of("plain"), 3)
    )
    assert matches.tolist() == (best == targets).double().tolist() and 0 < matches.sum() < K
    assert log_probs.requires_grad and not matches.requires_grad


# --- the head of a model --------------------------------------


class Lm(nn.Module):
    """A language model that is only its head."""

    base_model_prefix = "model"

    def __init__(self, dtype: torch.dtype, shape: str = "plain", bias: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.lm_head = nn.Linear(HIDDEN, V, bias=bias, dtype=dtype)
        self.base_model, self.config = None, config_of(shape)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def answers(
    monkeypatch: pytest.MonkeyPatch, lm: Lm, hidden: torch.Tensor, targets: torch.Tensor, chunk: int, ask: Ask
) -> tuple[torch.Tensor, torch.Tensor | None]:
    monkeypatch.setattr(heads, "asked_hidden_states", lambda backbone, batch, dtype: hidden)
    return PolicyModel(lm, chunk_tokens=chunk)(SimpleNamespace(targets=targets), ask)  # type: ignore[arg-type]


@pytest.mark.parametrize("ask", [Ask(0.7), Ask(entropy=True), Ask(0.7, greedy_match=True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_bit_by_bit_those_of_the_module(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: str, ask: Ask
) -> None:
    hidden, _, _, targets = inputs(dtype)
    for bias, chunk in ((False, K), (True, 3)):
        lm = Lm(dtype, shape, bias)
        fused = answers(monkeypatch, lm, hidden, targets, chunk, ask)
        module = PolicyModel(lm, chunk_tokens=chunk)._by_module(hidden, targets, ask, chunk)
        torch.testing.assert_close(fused, module, rtol=0, atol=0)
        torch.testing.assert_close(
            gradients(fused[:1], [hidden, *lm.parameters()]),
            gradients(module[:1], [hidden, *lm.parameters()]),
            rtol=1e-5 if dtype == torch.float32 else 2e-2,
            atol=1e-5 if dtype == torch.float32 else 2e-2,
        )


def test_a_head_with_adapters_is_called_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "FusedHead", None)
    hidden, _, _, targets = inputs()
    lm = Lm(torch.float64)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), lm)
    adapters = [weight for name, weight in lm.named_parameters() if "lora" in name]
    work = HeadWork(Ask(0.7, entropy=True), shape_of("plain"), 3)
    got = answers(monkeypatch, lm, hidden, targets, work.chunk, work.ask)
    wanted = plain(hidden, lm.lm_head.get_delta_weight("default") + lm.lm_head.weight, None, targets, work)
    torch.testing.assert_close(list(got), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(got, adapters), gradients(wanted, adapters), rtol=0, atol=1e-12)


def test_a_large_vocabulary_makes_chunks_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(heads, "head_chunk", lambda *sizes: seen.append(head_chunk(*sizes)) or seen[-1])
    monkeypatch.setattr("hydraflow.models.chunks.LOGITS_BYTES", 2 * V * 8)
    hidden, _, _, targets = inputs()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        answers(monkeypatch, Lm(torch.float64), hidden, targets, 2048, Ask())
    assert seen == [2]
    assert (K, V) not in kept and (V, HIDDEN) in kept


@pytest.mark.parametrize("chunk", [3, 100])
def test_sums_of_squared_probabilities(chunk: int) -> None:
    """Of a plain head, and of one with adapters."""
    *weights, targets = inputs()
    wanted = (F.linear(*weights) / 0.7).softmax(-1).square().sum(-1)
    ask = Ask(0.7, sum_pi_squared=True)
    log_probs, found = FusedHead.apply(*weights, targets, HeadWork(ask, shape_of("plain"), chunk))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert log_probs.requires_grad and not found.requires_grad


@pytest.mark.parametrize("among", [V, 4])
@pytest.mark.parametrize("chunk", [3, 100])
def test_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch, chunk: int, among: int) -> None:
    """Of a plain head, and of one that is called as a module. Their probabilities do not add up to 1."""
    *weights, targets = inputs()
    every = (F.linear(*weights) / 0.7).log_softmax(-1)
    wanted = every[:, :among].topk(3)
    ask = Ask(0.7, likeliest=3, among=among)
    log_probs, ids = FusedHead.apply(*weights, targets, HeadWork(ask, shape_of("plain"), chunk))
    torch.testing.assert_close(log_probs, wanted.values, rtol=0, atol=1e-12)
    assert ids.tolist() == wanted.indices.tolist() and not log_probs.requires_grad
    lm = Lm(torch.float64)
    fused = answers(monkeypatch, lm, weights[0], targets, chunk, ask)
    module = PolicyModel(lm, chunk_tokens=chunk)._by_module(weights[0], targets, ask, chunk)
    assert not module[0].requires_grad
    torch.testing.assert_close(fused, module, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "ask",
    [
        Ask(0.7),
        Ask(entropy=True),
        Ask(0.7, entropy=True, entropy_is_trained=False),
        Ask(greedy_match=True),
        Ask(sum_pi_squared=True),
        Ask(likeliest=2, among=V),
    ],
)
def test_blocks_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, ask: Ask, shape: str, chunk: int, dtype: torch.dtype
) -> None:
    *weights, targets = inputs()
    weights = [weight.detach().to(dtype).requires_grad_() for weight in weights]
    results = []
    for block in (2, 100):
        monkeypatch.setattr(fused_head, "block_tokens", lambda *sizes, block=block: block)
        for of_targets in (targets, torch.stack([targets, targets.flip(0), targets], 1)):
            columns = FusedHead.apply(*weights, of_targets, HeadWork(ask, shape_of(shape), chunk))
            trained = [column for column in columns if column is not None and column.requires_grad]
            found = [column for column in columns if column is not None]
            if trained:
                loss = sum((column * column).sum() for column in trained)
                first = torch.autograd.grad(loss, weights, retain_graph=True)
                if chunk == 100 and shape == "plain" and dtype != torch.bfloat16 and not ask.trains_entropy:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        torch.autograd.grad(loss, weights)  # what was kept became the first gradient
                else:
                    assert all(map(torch.equal, first, torch.autograd.grad(loss, weights)))
                found += first
            results.append(found)
    assert all(map(torch.equal, results[0] + results[1], results[2] + results[3]))


def test_nothing_is_kept_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[fused_head._Logits] = []

    class Watched(fused_head._Logits):
        def __init__(self, *given: Any, **more: Any):
            super().__init__(*given, **more)
            used.append(self)

    monkeypatch.setattr(fused_head, "_Logits", Watched)
    hidden, _, _, targets = inputs(torch.bfloat16)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            answers(monkeypatch, Lm(torch.bfloat16), hidden, targets, 100, Ask())
    assert [logits.kept is not None for logits in used] == [True, False]
