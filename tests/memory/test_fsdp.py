"""One rank of FSDP2, by hand, on a model of two layers: 1000 words, width 8, one head."""

from __future__ import annotations

from dataclasses import replace

from hydraflow.engine.config import WINDOW_BYTES, FSDPConfig
from hydraflow.memory.activations import MicroBatchTokens
from hydraflow.memory.fsdp import FSDPModelMemory, adapter_numbers, units_of
from hydraflow.memory.limits import BytesPerNumber
from hydraflow.memory.report import MemoryParts
from hydraflow.memory.shape import ModelShape

UNTIED = ModelShape("llama", 1000, 8, 2, 1, 1, 8, 16, tied=False, dense_at=range(2))
TIED = replace(UNTIED, tied=True)
LAYER = 4 * 64 + 3 * 8 * 16 + 16
ONE = MicroBatchTokens(1, 1, 1)


def sharded(
    shape: ModelShape = UNTIED,
    *,
    trained: bool = True,
    policy: bool = True,
    adapters: int = 0,
    least: int = 0,
    **settings: bool,
) -> FSDPModelMemory:
    units = units_of(shape, policy=policy, least=least, trained=trained, adapters=adapters)
    return FSDPModelMemory(
        shape=shape,
        units=units,
        types=BytesPerNumber(4, 4, 4),
        ranks=2,
        device_type="cuda",
        settings=FSDPConfig(head_chunk_tokens=10**6, **settings),
        checkpointing=True,
        policy=policy,
    )


def update(model: FSDPModelMemory, *, accumulates: bool) -> MemoryParts:
    return model.update(ONE, micro_batches=2 if accumulates else 1)


def test_units() -> None:
    units = sharded().units
    assert (units.layer, units.root, units.every) == (LAYER, 16008, 2 * LAYER + 16008)
    assert sharded(TIED).units.root == 8008
    assert sharded(policy=False).units.root == 8000 + 8 + 8
    whole = sharded(least=LAYER + 1).units
    assert (whole.layer, whole.root) == (0, whole.every)


def test_shards_at_rest() -> None:
    resting = sharded().resting
    assert resting.weights == 4 * UNTIED.parameters // 2
    assert resting.optimizer == 2 * resting.weights
    assert sharded(optimizer_offload=True).resting.host == resting.optimizer
    offloaded = sharded(offload_policy=True).resting
    assert offloaded.total == 0
    assert offloaded.host == resting.weights * 4  # weights, gradients and two moments
    assert sharded(offload_policy=True, param_offload=True).resting == offloaded
    assert sharded(trained=False).resting.optimizer == 0


def test_one_micro_batch_peaks_when_the_embeddings_gradient_is_made() -> None:
    """The layers' gradients are shards by then; the root is still gathered, and the last layer's gradients in
    their buffer."""
    parts = update(sharded(), accumulates=False)
    assert parts.gradients == 4 * (LAYER + 16008)  # two layers' halves, the root whole
    assert parts.gathered == 4 * (16008 + LAYER)


def test_on_the_host_the_parts_of_others_are_held_while_they_are_summed() -> None:
    """The buffer and theirs, the half that comes out, and the output matrix's gradient, whose name torch
    still holds."""
    parts = update(replace(sharded(), device_type="cpu"), accumulates=False)
    assert parts.gathered == WINDOW_BYTES + 2 * 4 * 16008
    assert parts.gradients == 4 * (LAYER + 16008 // 2 + 8000)


def test_accumulated_gradients_are_whole() -> None:
    """Not sharded, of the whole model; and while the root's are summed they are there in a buffer, too."""
    once, often = update(sharded(), accumulates=False), update(sharded(), accumulates=True)
    assert often.total >= once.total
    small_head = replace(UNTIED, vocabulary=10)
    parts = update(sharded(small_head), accumulates=True)
    whole = small_head.parameters
    assert parts.gradients >= 4 * (whole - LAYER)


def test_a_tied_embedding_gets_two_gradients_and_their_sum() -> None:
    parts = update(sharded(TIED), accumulates=False)
    assert parts.gradients == 4 * (LAYER + 8008 + 2 * 8000)


def test_offloaded_weights_leave_what_is_gathered() -> None:
    parts = update(sharded(offload_policy=True), accumulates=False)
    assert parts.weights == parts.optimizer == 0
    assert parts.gathered > 0


def test_weights_that_rest_on_the_host_are_on_the_device_in_a_pass() -> None:
    plain, model = sharded(), sharded(param_offload=True)
    assert model.resting == MemoryParts(optimizer=plain.resting.optimizer, host=plain.resting.weights)
    both = sharded(param_offload=True, optimizer_offload=True).resting
    assert (both.total, both.host) == (0, 3 * plain.resting.weights)
    assert update(model, accumulates=True) == update(plain, accumulates=True)
    assert model.forward(ONE) == plain.forward(ONE)


def test_without_resharding_the_whole_model_is_gathered() -> None:
    model = sharded(reshard_after_forward=False)
    assert model.forward(ONE).gathered >= 4 * UNTIED.parameters
    assert sharded().forward(ONE).gathered == 4 * 2 * 16008  # as it arrives, and taken apart


def test_adapters_are_all_that_is_trained() -> None:
    numbers = adapter_numbers(UNTIED, 2, "all-linear")
    assert numbers == 2 * (4 * 16 + 3 * 24)
    assert adapter_numbers(UNTIED, 2, ["q_proj", "model.layers.0.self_attn.v_proj"]) == 2 * (16 + 16)
    model = sharded(adapters=numbers)
    assert model.units.trained == 2 * numbers
    assert model.resting.optimizer == 4 * 2 * numbers  # two moments, two layers, halved
    assert update(model, accumulates=True).gradients <= 4 * 2 * numbers


def test_a_critic_has_no_logits() -> None:
    many = MicroBatchTokens(1000, 1000, 1000)
    assert sharded().forward(many).logits == 2 * 4 * 1000 * 1000
    assert sharded(policy=False).forward(many).logits <= 4 * 1000
