"""The rollout worker in this process: whose weights it samples with, and that samples belong to prompts, not
to processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_columns import assert_as_documented
from transformers import CanineTokenizer, PreTrainedConfig
from workers.by_hand import (
    END,
    MAX_TOKENS,
    PROMPTS,
    SAMPLES,
    make_actor,
    make_prompts,
    make_rollout,
    process,
    rollout_spec,
)

from hydraflow.errors import ConfigError, GuardStop
from hydraflow.generation import native
from hydraflow.generation.base import EngineSpec
from hydraflow.generation.config import RolloutConfig, SamplingConfig, ValSamplingConfig
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_tokenizer
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.weights.buckets import BucketMemory, BucketOptions, FlatBucket, into_buckets
from hydraflow.weights.slots import OpenSlots, Slots
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.rollout import RolloutWorker, SamplingSpec, _finite


def listed(batch: DataProto, name: str) -> list[list[int]]:
    return [row.tolist() for row in ragged.rows(batch.get(name))]


def largest_gap(actor: ActorWorker, trajectories: DataProto) -> float:
    old = actor.compute_log_prob(trajectories).get("old_log_probs")
    return float((ragged.parts(old)[0] - ragged.parts(trajectories.get("rollout_log_probs"))[0]).abs().max())


def test_log_probs_are_the_trainers_before_and_after_an_update(tiny: str) -> None:
    actor = make_actor(tiny)
    rollout = make_rollout(tiny, actor=actor)
    first = rollout.generate(make_prompts())
    assert_as_documented(first)
    assert_as_documented(actor.compute_log_prob(first))
    assert largest_gap(actor, first) < 1e-4

    draw = torch.Generator().manual_seed(0)
    lengths = ragged.lengths(first.get("responses"))
    advantages = ragged.from_parts(torch.randn(int(lengths.sum()), generator=draw), lengths)
    columns = {name: first.get(name) for name in ("prompts", "responses", "response_mask")}
    actor.update(
        DataProto.from_dict(
            {**columns, "old_log_probs": first.get("rollout_log_probs"), "advantages": advantages}
        ),
        step=1,
    )
    assert largest_gap(actor, first) > 1e-2
    rollout.sync_from_actor(1)
    assert largest_gap(actor, rollout.generate(make_prompts(visit=2, version=1))) < 1e-4


def test_samples_with_other_weights_than_promised_are_refused(tiny: str) -> None:
    rollout = make_rollout(tiny, actor=make_actor(tiny))
    rollout.sync_from_actor(3)
    assert set(rollout.generate(make_prompts(version=3)).get("versions").tolist()) == {3}
    with pytest.raises(GuardStop, match="weights of version 4, but holds version 3"):
        rollout.generate(make_prompts(version=4))
    rollout.process.roles["actor"].engine.weights = lambda: iter([("nonsense", torch.ones(1))])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="nonsense"):
        rollout.sync_from_actor(4)
    with pytest.raises(GuardStop, match="version 4, but holds no complete weights"):
        rollout.generate(make_prompts(version=4))


def test_after_its_sleep_it_needs_weights(tiny: str) -> None:
    rollout = make_rollout(tiny)
    rollout.load_weights()
    rollout.sleep()
    with pytest.raises(GuardStop, match="rank 0 was .* version 0, but holds no complete weights"):
        rollout.generate(make_prompts())
    rollout.load_weights()
    rollout.generate(make_prompts())


def sent(
    actor: ActorWorker, version: int, max_bytes: int = 4096, *, checked: bool = True
) -> Iterator[FlatBucket]:
    """Each must be taken before the next but one is asked for."""
    slots, opened = Slots(torch.device("cpu")), OpenSlots()
    for header, numbers in into_buckets(
        actor.engine.weights(to=0), BucketOptions(version, max_bytes, torch.float32, checked)
    ):
        assert header is not None
        yield opened.read(slots.put(header, numbers))


def test_weights_come_in_buckets_and_count_once_all_are_there(tiny: str) -> None:
    actor, rollout = make_actor(tiny), make_rollout(tiny)
    with torch.no_grad():
        next(actor.engine.module.parameters()).add_(0.5)  # type: ignore[attr-defined]
    for bucket in sent(actor, version=3):
        if bucket.header.last:
            with pytest.raises(GuardStop, match="version 3, but holds no complete weights"):
                rollout.generate(make_prompts(version=3))
        rollout._take(False, bucket)
    assert largest_gap(actor, rollout.generate(make_prompts(version=3))) < 1e-4
    found = [rollout._take(True, bucket) for bucket in sent(actor, version=3)]
    assert len(found) > 2 and not any(found)


def test_weights_that_do_not_arrive_as_they_were_sent_are_named(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, rollout = make_actor(tiny), make_rollout(tiny)
    load, (*_, (name, _)) = rollout.engine.update_weights, actor.engine.weights(to=0)

    def spoil(stream: Iterable[tuple[str, torch.Tensor]], **parts: bool) -> None:
        load(((one, tensor + 1 if one == name else tensor) for one, tensor in stream), **parts)

    monkeypatch.setattr(rollout.engine, "update_weights", spoil)
    for bucket in sent(actor, version=1, max_bytes=10**9, checked=False):
        rollout._take(False, bucket)
        assert rollout._take(True, bucket) == name
    for bucket in sent(actor, version=1, max_bytes=10**9):
        with pytest.raises(GuardStop, match=f"did not arrive as they were sent .*{name}"):
            rollout._take(False, bucket)


def test_adapters_are_compared_when_the_engine_has_them(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gets an adapter as a whole, with the last bucket: until then it holds the one before."""
    rollout, layers = make_rollout(tiny), [f"layers.{number}.q_proj" for number in range(3)]
    sent = {f"{layer}.lora_{side}.weight": torch.randn(4, 8) for layer in layers for side in "AB"}
    arrived, held = dict[str, torch.Tensor](), {name: torch.zeros(4, 8) for name in sent}

    def late(stream: Iterable[tuple[str, torch.Tensor]], *, first: bool, last: bool) -> None:
        arrived.update((name, weight.clone()) for name, weight in stream)
        if last:
            held.update(arrived)

    monkeypatch.setattr(rollout, "_held", lambda: held)
    monkeypatch.setattr(rollout, "_has_base", True)
    monkeypatch.setattr(rollout.engine, "update_weights", late)
    how = BucketOptions(version=1, max_bytes=300, dtype=torch.float32, checked=True)
    memory = BucketMemory(torch.device("cpu"))
    for spoilt in (False, True):
        buckets = list(into_buckets(sent.items(), how))
        assert len(buckets) > 2
        for header, numbers in buckets:
            bucket = FlatBucket.of(header, numbers, memory)
            if spoilt and header.last:
                arrived[next(iter(sent))] += 1
                with pytest.raises(GuardStop, match=f"did not arrive as they were sent .*{next(iter(sent))}"):
                    rollout._take(False, bucket)
            else:
                rollout._take(False, bucket)


def test_weights_come_from_the_directory_or_from_the_actor(tiny: str) -> None:
    from_files = make_rollout(tiny).generate(make_prompts())
    assert listed(make_rollout(tiny, actor=make_actor(tiny)).generate(make_prompts()), "responses") == listed(
        from_files, "responses"
    )


def test_one_worker_and_two_draw_the_same_samples(tiny: str) -> None:
    whole = make_rollout(tiny).generate(make_prompts())
    shares = make_prompts().chunk(2)
    halves = DataProto.concat(
        [make_rollout(tiny, rank, 2).generate(share) for rank, share in enumerate(shares)]
    )
    assert listed(halves, "responses") == listed(whole, "responses")
    log_probs = [ragged.parts(batch.get("rollout_log_probs"))[0] for batch in (halves, whole)]
    torch.testing.assert_close(*log_probs, rtol=0, atol=1e-5)
    assert listed(make_rollout(tiny).generate(make_prompts(visit=2)), "responses") != listed(
        whole, "responses"
    )


def test_trajectories_are_prompt_major_and_end_where_they_should(tiny: str) -> None:
    made = make_rollout(tiny).generate(make_prompts())
    responses = listed(made, "responses")
    assert listed(made, "prompts") == [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
    assert made.get("lengths").tolist() == [
        len(p) + len(r) for p, r in zip(listed(made, "prompts"), responses)
    ]
    assert made.get("prompt_lengths").tolist() == [len(prompt) for prompt in listed(made, "prompts")]
    assert listed(made, "response_mask") == [[1] * len(response) for response in responses]
    assert any(len(response) < MAX_TOKENS for response in responses)
    for response in responses:
        assert END not in response[:-1]
        assert len(response) == MAX_TOKENS or response[-1] == END


def test_responses_end_at_the_stops_of_their_batch(tiny: str) -> None:
    spec = rollout_spec(tiny)
    worker = RolloutWorker(process(), replace(spec, rollout=replace(spec.rollout, stop="2")))
    worker.load_weights()
    prompts = make_prompts()
    free = listed(worker.generate(prompts), "responses")
    tokenizer = load_tokenizer(ModelConfig(path=tiny))
    two, three = tokenizer.convert_tokens_to_ids(["2", "3"])
    how = prompts.meta_info["sampling"]
    prompts.meta_info["sampling"] = replace(how, stop=("2",), stop_token_ids=(three,))
    ends = [next((i for i, token in enumerate(row) if token in (two, three)), len(row)) for row in free]
    assert listed(worker.generate(prompts), "responses") == [
        row[: end + 1] for row, end in zip(free, ends, strict=True)
    ]
    last = {row[end] for row, end in zip(free, ends, strict=True) if end < len(row)}
    assert last == {two, three}, "both occur"


def test_validation_has_stops_of_its_own_or_those_of_training() -> None:
    rollout = RolloutConfig(stop="</a>", stop_token_ids=[3])
    assert SamplingSpec.of_training(rollout, 2) == SamplingSpec(2, 1.0, -1, 1.0, ("</a>",), (3,))
    assert SamplingSpec.of_validation(rollout, 1) == SamplingSpec(1, 0.0, -1, 1.0, ("</a>",), (3,))
    rollout.val_kwargs = ValSamplingConfig(stop=["b", "c"], stop_token_ids=[])
    assert SamplingSpec.of_validation(rollout, 1) == SamplingSpec(1, 0.0, -1, 1.0, ("b", "c"), ())


def test_stop_strings_need_a_tokenizer_that_decodes_token_by_token(tiny: str, tmp_path: Path) -> None:
    CanineTokenizer().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("")
    model = ModelConfig(path=tiny, tokenizer_path=str(tmp_path))
    spec = replace(rollout_spec(tiny), model=model, rollout=SamplingConfig(stop="a"))
    with pytest.raises(ConfigError, match=r"rollout.stop=\[a\]: needs .* the model's is a CanineTokenizer"):
        RolloutWorker(process(), spec)


def test_greedy_samples_of_a_prompt_are_equal(tiny: str) -> None:
    responses = listed(make_rollout(tiny).generate(make_prompts(temperature=0)), "responses")
    assert [responses[i] for i in range(0, 12, 3)] == [responses[i] for i in range(2, 12, 3)]


@pytest.mark.parametrize(("per_machine", "beside"), [(None, 4), (2, 2), (8, 4)])
def test_an_engine_knows_how_many_processes_share_its_machine(
    tiny: str, monkeypatch: pytest.MonkeyPatch, per_machine: int | None, beside: int
) -> None:
    built: list[EngineSpec] = []
    build = native.build

    def recorded(config: PreTrainedConfig, spec: EngineSpec) -> native.NativeEngine:
        built.append(spec)
        return build(config, spec)

    monkeypatch.setattr(native, "build", recorded)
    RolloutWorker(process(0, 4), replace(rollout_spec(tiny), per_machine=per_machine))
    assert [spec.processes for spec in built] == [beside]


def test_weights_that_have_diverged_stop_the_run() -> None:
    remedy = "(?s)not finite.*-> a smaller actor_rollout_ref.actor.optim.lr"
    with pytest.raises(GuardStop, match=remedy), _finite():
        raise FloatingPointError("the model's logits are not finite numbers")
