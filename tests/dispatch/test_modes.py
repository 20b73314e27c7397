"""Every mode on real processes: which rank got which rows, and what the caller gets back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from dispatch import probes
from dispatch.probes import Probe

from hydraflow import metrics
from hydraflow.dispatch.group import RoleGroup, WorkerGroup
from hydraflow.dispatch.modes import Dispatch, Execute, mode_named, register, register_dispatch_mode
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.shards import LateShard, Shard, part_of, real_rows, split
from hydraflow.dispatch.worker import _reply
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch

BatchOf = Callable[[int], DataProto]


def test_every_name_has_a_mode() -> None:
    assert [mode_named(name).name for name in Dispatch] == list(Dispatch)


def test_modes_of_single_values(probe: RoleGroup) -> None:
    world = range(probe.world_size)
    assert probe.call(Probe.rank_zero, 3) == (0, 3)
    assert probe.call(Probe.executed_on_zero, 3) == (0, 3)
    assert probe.call(Probe.one_to_all, 3, y=4) == [(rank, 3, 4) for rank in world]
    dealt = [f"for {rank}" for rank in world]
    assert probe.call(Probe.all_to_all, dealt, "same") == [(rank, f"for {rank}", "same") for rank in world]
    assert probe.call(Probe.dp_compute, [5 + rank for rank in world]) == [11 * rank + 5 for rank in world]


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_are_divided_and_joined_in_order(probe: RoleGroup, batch_of: BatchOf, rows: int) -> None:
    answer = probe.call(Probe.double, batch_of(rows), factor=3)
    assert isinstance(answer, RemoteBatch) and len(answer) == rows and answer.meta_info == {"factor": 3}
    data = probe.fetch(answer)
    assert data.get("y").tolist() == [3 * row for row in range(rows)]
    assert [row.tolist() for row in ragged.rows(data.get("ids2"))] == [
        [3 * row] * (row + 1) for row in range(rows)
    ]
    part = -(-rows // probe.world_size)
    assert list(data.get("by")) == [f"rank{row // part}" for row in range(rows)]


def test_padding_is_removed_from_several_samples_per_row(probe: RoleGroup, batch_of: BatchOf) -> None:
    data = probe.fetch(probe.call(Probe.samples, batch_of(3), 2))
    assert data.get("y").tolist() == [0, 0, 2, 2, 4, 4]


def test_a_function_goes_to_every_rank(probe: RoleGroup, batch_of: BatchOf) -> None:
    answer = probe.call(Probe.apply, lambda data: DataProto.from_dict({"z": data.get("x") + 1}), batch_of(5))
    assert probe.fetch(answer).get("z").tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="function as its first argument"):
        probe.call(Probe.apply, batch_of(5), batch_of(5))


def test_metrics_are_merged_by_weight(probe: RoleGroup, batch_of: BatchOf) -> None:
    assert metrics.values(probe.call(Probe.measure, batch_of(8))) == {"x/mean": 3.5, "x/max": 7.0}


def test_rows_that_do_not_divide_are_refused_with_the_numbers(
    groups: dict[int, WorkerGroup], batch_of: BatchOf
) -> None:
    with pytest.raises(ValueError, match=r"6 rows do not divide over 4 ranks.*4 or 8 would"):
        groups[4].role("probe").call(Probe.measure, batch_of(6))
    with pytest.raises(ValueError, match="without rows"):
        groups[4].role("probe").call(Probe.double, batch_of(4)[:0])


def test_a_mode_of_the_users(groups: dict[int, WorkerGroup], batch_of: BatchOf) -> None:
    # Parts of 0..3 over two ranks: (0, 1) and (2, 3); rank 0 gets the last part, rank 1 weighs 10.
    assert groups[2].role("probe").call(Probe.user_mode, batch_of(4)) == 5 + 10 * 1
    assert groups[1].role("probe").call(Probe.user_mode, batch_of(4)) == 6
    with pytest.raises(ValueError, match="already exists"):
        register_dispatch_mode(probes.REVERSE_AND_SUM, probes._reverse, probes._sum)


def test_a_worker_hears_when_a_call_of_its_own_is_over(probe: RoleGroup) -> None:
    before = probe.call(Probe.count_calls_over)
    probe.call(Probe.nothing)
    assert probe.call(Probe.count_calls_over) == [count + 2 for count in before]


def test_a_mesh_in_which_every_rank_is_a_data_rank(probe: RoleGroup, batch_of: BatchOf) -> None:
    data = probe.fetch(probe.call(Probe.flat_rows, batch_of(5)))
    assert data.get("y").tolist() == [0, 1, 2, 3, 4]


def test_one_to_all_gives_every_rank_the_whole_batch(probe: RoleGroup, batch_of: BatchOf) -> None:
    assert probe.call(Probe.rows_seen, batch_of(5)) == [5] * probe.world_size
    assert probe.call(Probe.rows_seen, probe.call(Probe.double, batch_of(3))) == [3] * probe.world_size


def test_a_batch_of_facts_alone_reaches_every_rank(probe: RoleGroup) -> None:
    facts = DataProto(None, {}, {"step": 4})
    answer = probe.call(
        Probe.apply, lambda data: DataProto(None, {}, {"step": data.meta_info["step"] + 1}), facts
    )
    assert answer.meta_info == {"step": 5}


def test_what_a_worker_gets_is_its_own_copy(pair: RoleGroup, batch_of: BatchOf) -> None:
    made = pair.call(Probe.double, batch_of(4)).select(["y"]).rename("y", "x")
    spoiled = pair.call(Probe.spoil, made)
    assert pair.fetch(spoiled, ["x"]).get("x").tolist() == [100, 102, 104, 106]
    assert pair.fetch(made).get("x").tolist() == [0, 2, 4, 6]


def test_a_read_only_method_reads_the_object_store_itself(pair: RoleGroup, batch_of: BatchOf) -> None:
    made = pair.call(Probe.big, batch_of(4), 50_000)
    assert metrics.values(pair.call(Probe.shared_when_read_only, made)) == {"shared": 2.0}
    assert metrics.values(pair.call(Probe.shared_otherwise, made)) == {"shared": 0.0}


def test_reordered_columns_come_back_in_the_new_order(pair: RoleGroup, batch_of: BatchOf) -> None:
    made = pair.call(Probe.double, batch_of(5)).select_idxs(np.array([4, 0, 3, 1]))
    renamed = made.select(["y"]).rename("y", "x")
    assert pair.fetch(pair.call(Probe.double, renamed)).get("y").tolist() == [16, 0, 12, 4]


def test_wrong_calls_are_refused_at_the_door(pair: RoleGroup, batch_of: BatchOf) -> None:
    with pytest.raises(TypeError, match="not declared with @register"):
        pair.call(Probe.undeclared)
    with pytest.raises(TypeError, match="is not a method of Probe"):
        pair.call(probes.Troubled.pids)
    with pytest.raises(ValueError, match="one entry for each of 2 ranks, got 3 entries"):
        pair.call(Probe.dp_compute, [1, 2, 3])
    with pytest.raises(TypeError, match="must return a DataProto on every rank, got int"):
        pair.call(Probe.not_a_batch, batch_of(2))


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(ValueError, match="no dispatch mode 'sideways'; there are rank_zero"):
        register("sideways")
    with pytest.raises(ValueError, match="the other ranks' rows would be lost"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)


def test_padding_on_more_ranks_than_rows() -> None:
    shards = split(DataProto.from_dict({"x": torch.arange(2)}), 4)
    assert [shard.rows for shard in shards] == [1, 1, 0, 0]


def test_rows_of_a_future_that_do_not_divide_are_refused_too() -> None:
    made = RemoteBatch.from_local(DataProto.from_dict({"x": torch.arange(3)}))
    assert part_of(made, LateShard((), part=1, parts=2, padding=True)).rows == 1
    with pytest.raises(ValueError, match="3 rows do not divide over 2 ranks"):
        part_of(made, LateShard((), part=1, parts=2, padding=False))


def test_processes_know_their_place(runtime: Runtime, groups: dict[int, WorkerGroup]) -> None:
    places = groups[4].role("other").call(Probe.where)
    assert [(place["rank"], place["world"], place["local"]) for place in places] == [
        (rank, 4, rank) for rank in range(4)
    ]
    assert {place["timeout"] for place in places} == {60}, "the limit of a call"
    assert len({place["master"] for place in places}) == 1 and len({place["pid"] for place in places}) == 4
    assert places[0]["roles"] == ["probe", "other"] and (places[0]["threads"], places[0]["omp"]) == (1, "1")
    alone = groups[1].role("probe").call(Probe.where)[0]
    assert (alone["threads"], alone["omp"]) == (2, "2")
    assert (
        groups[1].role("probe").call(Probe.where)[0]["pid"]
        == groups[1].role("other").call(Probe.where)[0]["pid"]
    )
    assert groups[2].role("probe").call(Probe.peer_offset, "other") == [7, 7]


def test_answers_from_which_padding_cannot_be_removed_are_refused(batch_of: BatchOf) -> None:
    whole, padded = split(batch_of(3), 2)
    assert isinstance(whole, Shard) and isinstance(padded, Shard)
    for nothing in ((None, [padded]), (7, [whole])):
        _reply(*nothing, True)
    with pytest.raises(ValueError, match="rows were padded, and its answer is no batch.*padding=False"):
        _reply({"sum": 7.0}, [padded], True)


def test_padded_batches_of_different_numbers_of_rows_are_refused(batch_of: BatchOf) -> None:
    four, three, two = (split(batch_of(rows), 2)[1] for rows in (4, 3, 2))
    assert isinstance(four, Shard) and isinstance(three, Shard) and isinstance(two, Shard)
    with pytest.raises(ValueError, match="batches with different numbers of rows, of which one is padded"):
        real_rows([four, three], 2)
    assert real_rows([four, two], 2) == 2 and real_rows([three, three], 2) == 1


def test_a_batch_that_lost_all_its_rows_keeps_its_columns(pair: RoleGroup, batch_of: BatchOf) -> None:
    nothing = pair.call(Probe.none_of, batch_of(4))
    assert len(nothing) == 0 and "x" in nothing.keys()
