"""Who runs where: every device of a few, ranges of many."""

from hypothesis import given
from hypothesis import strategies as st

from hydraflow.batch_plan.layout import Cluster, Devices, Layout, Pool
from hydraflow.explain.picture import copy_of, picture, segments, summary


def devices(*ranges: tuple[int, int]) -> Devices:
    return Devices(tuple(range(start, stop) for start, stop in ranges))


def test_a_device_shows_the_copy_that_it_works_on() -> None:
    actor = Layout("actor", "fsdp2", devices((0, 4)), 4, context=2, shard=2)
    rollout = Layout("rollout", "vllm", devices((2, 8)), 4, tensor=2)
    lines = picture({"actor": actor, "rollout": rollout}, Cluster((Pool("trainer", 2, 4, 0),)))
    assert lines[0].split() == ["node", "0", "node", "1"]
    assert lines[2].split()[:9] == ["actor", "0", "0", "1", "1", "·", "·", "·", "·"]
    assert lines[3].split()[:9] == ["rollout", "·", "·", "0", "0", "1", "1", "2", "2"]
    assert "2 data ranks, weights in 2 shards, 2 copies" in lines[2]
    assert "2 devices a replica, 3 replicas" in lines[3]
    actor = Layout("actor", "fsdp2", devices((0, 4)), 4, shard=1)
    assert (
        "weights in 1 shard, 4 copies" in picture({"actor": actor}, Cluster((Pool("trainer", 2, 4, 0),)))[2]
    )


def test_many_devices_are_ranges_with_their_nodes() -> None:
    actor = Layout("actor", "megatron", devices((0, 256)), 8, tensor=4, pipeline=2, expert=8)
    rollout = Layout("rollout", "vllm", devices((256, 504)), 8, tensor=4)
    lines = picture({"actor": actor, "rollout": rollout}, Cluster((Pool("trainer", 64, 8, 0),)))
    rows = [line.split() for line in lines[1:4]]
    assert rows == [
        ["0-255", "0-31", "256", "■", "·"],
        ["256-503", "32-62", "248", "·", "■"],
        ["504-511", "63", "8", "·", "·"],
    ]
    assert lines[-2] == "actor: megatron, tp 4 pp 2 ep 8 etp 1: 8 devices a row, 32 data ranks"
    assert lines[-1] == "rollout: vllm, tp 4: 4 devices a replica, 62 replicas"


def test_machines_of_a_rollout_of_its_own_may_have_fewer_devices() -> None:
    cluster = Cluster((Pool("trainer", 1, 4, 0), Pool("rollout", 2, 2, 4)))
    lines = picture({"rollout": Layout("rollout", "native", devices((4, 8)), 2)}, cluster)
    assert lines[0].split() == ["node", "0", "node", "1", "node", "2"]
    assert lines[2].split()[:9] == ["rollout", "·", "·", "·", "·", "0", "1", "2", "3"]
    assert lines[0].index("node 1") == lines[1].index("4") and lines[0].index("node 2") == lines[1].index("6")


def test_a_plain_role_needs_no_sizes() -> None:
    assert (
        summary(Layout("rollout", "native", devices((0, 2)), 2)) == "native: 1 device a replica, 2 replicas"
    )
    assert (
        summary(Layout("actor", "fsdp2", devices((0, 2)), 2, shard=2))
        == "fsdp2: 1 device a row, 2 data ranks, weights in 2 shards"
    )


@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 3),
    context=st.integers(1, 2),
    copies=st.integers(1, 5),
)
def test_every_copy_has_as_many_devices(tensor: int, pipeline: int, context: int, copies: int) -> None:
    size = tensor * pipeline * context
    layout = Layout(
        "actor", "megatron", devices((0, size * copies)), 8, tensor=tensor, pipeline=pipeline, context=context
    )
    found = [copy_of(layout, rank) for rank in range(size * copies)]
    assert {copy: found.count(copy) for copy in set(found)} == dict.fromkeys(range(copies), size)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=3))
def test_segments_cover_every_device_once_and_say_its_roles(placed: list[tuple[int, int]]) -> None:
    layouts = {
        f"role{i}": Layout(f"role{i}", "fsdp2", devices((start, start + size)), 8)
        for i, (start, size) in enumerate(placed)
    }
    parts = segments(layouts, 40)
    assert [device for part, _ in parts for device in part] == list(range(40))
    for part, roles in parts:
        for device in part:
            assert roles == {
                f"role{i}" for i, (start, size) in enumerate(placed) if start <= device < start + size
            }
