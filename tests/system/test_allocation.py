"""What Slurm's variables mean, as its manuals say, and what becomes of the keys that they answer."""

import pytest

from hydraflow.compose.allocated import contradictions
from hydraflow.compose.loading import load, load_command
from hydraflow.errors import ConfigError
from hydraflow.memory.limits import host_memory
from hydraflow.schema import GenerateConfig, PPOConfig
from hydraflow.system.allocation import Allocation, allocation, node_names

JOIN = "ray_init.address=10.0.0.1:6379"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four nodes of eight GPUs, 64 cores and 512 GiB."""
    for name, value in {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "64",
        "SLURM_MEM_PER_NODE": str(512 * 1024),
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "4"}, 8),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,h100:3"}, 5),
        ({"SLURM_STEP_GPUS": "0,1,2"}, 3),
        ({"SLURM_JOB_GPUS": "5"}, 1),
        ({"SLURM_GPUS_PER_NODE": "many"}, None),
        ({}, None),
    ],
)
def test_gpus_are_named_in_several_ways(variables: dict[str, str], gpus: int | None) -> None:
    found = allocation({"SLURM_JOB_ID": "1", **variables})
    assert found is not None and found.gpus == gpus


def test_memory_is_counted_in_mebibytes_by_node_or_by_core() -> None:
    by_node = allocation({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "2"})
    by_core = allocation({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "3", "SLURM_CPUS_ON_NODE": "4"})
    all_there_is = allocation({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "0"})
    assert [found.memory_bytes for found in (by_node, by_core, all_there_is) if found] == [
        2 * 2**20,
        12 * 2**20,
        None,
    ]


def test_outside_of_a_job_there_is_none() -> None:
    assert allocation({"SLURM_GPUS_ON_NODE": "8"}) is None


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("a[1,3-4]-ib,b", ["a1-ib", "a3-ib", "a4-ib", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_lists_of_nodes(written: str, names: list[str]) -> None:
    assert node_names(written) == names


def test_text_that_is_not_a_list_of_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="not a list of nodes"):
        node_names("gpu[1-2")


def test_open_keys_take_what_slurm_gave(job: pytest.MonkeyPatch) -> None:
    config, command = load_command("ppo", PPOConfig, [JOIN])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_init.num_cpus) == (4, 8, None)
    assert command.origins["trainer.nnodes"] == "follows SLURM_JOB_NUM_NODES=4"
    assert command.origins["trainer.n_gpus_per_node"] == "follows SLURM_GPUS_ON_NODE=8"


def test_a_cluster_of_ones_own_is_one_machine_with_slurms_cores(job: pytest.MonkeyPatch) -> None:
    config = load("ppo", PPOConfig, [])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_init.num_cpus) == (1, 8, 64)
    assert (
        load(
            "generate", GenerateConfig, ["model.path=a", "data.path=b.parquet", "output.path=c.parquet"]
        ).ray_init.num_cpus
        == 64
    )


def test_too_few_cores_for_ray_are_left_to_ray(job: pytest.MonkeyPatch) -> None:
    job.setenv("SLURM_CPUS_ON_NODE", "2")
    assert load("ppo", PPOConfig, ["trainer.device=cpu"]).ray_init.num_cpus is None


def test_what_the_user_says_wins(job: pytest.MonkeyPatch) -> None:
    config = load("ppo", PPOConfig, [JOIN, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 4)
    assert load("ppo", PPOConfig, [JOIN, "trainer.device=cpu"]).trainer.n_gpus_per_node is None
    assert (
        load(
            "ppo", PPOConfig, [JOIN, "trainer.device=cpu", "trainer.n_gpus_per_node=16"]
        ).trainer.n_gpus_per_node
        == 16
    )


@pytest.mark.parametrize("debugged", ["trainer.debug.local=true", "+debug=true"])
def test_what_is_debugged_has_one_process_whatever_slurm_gave(job: pytest.MonkeyPatch, debugged: str) -> None:
    config = load("ppo", PPOConfig, [debugged, "trainer.device=auto"])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, None)


def test_the_rollouts_own_nodes_are_nodes_of_the_job(job: pytest.MonkeyPatch) -> None:
    own = "actor_rollout_ref.rollout.nnodes"
    assert load("ppo", PPOConfig, [JOIN, f"{own}=1"]).trainer.nnodes == 3
    with pytest.raises(ConfigError) as caught:
        load("ppo", PPOConfig, [JOIN, f"{own}=3", "trainer.nnodes=2"])
    assert (
        "trainer.nnodes=2: Slurm gave job 42 4 nodes (SLURM_JOB_NUM_NODES=4), and the rollout has 3 of its"
        " own\n"
        "      -> trainer.nnodes=1 or sbatch --nodes=5"
    ) in str(caught.value)
    with pytest.raises(
        ConfigError,
        match=r"rollout has 4 of its own\n.*rollout.nnodes=0 trainer.nnodes=4 or sbatch --nodes=5",
    ):
        load("ppo", PPOConfig, [JOIN, f"{own}=4"])
    per_node = "actor_rollout_ref.rollout.n_gpus_per_node"
    with pytest.raises(ConfigError, match=rf"{per_node}=9: Slurm gave job 42 8 GPUs .*\n.*{per_node}=8 or"):
        load("ppo", PPOConfig, [JOIN, f"{own}=1", f"{per_node}=9"])


def test_contradictions_name_both_sides_and_come_together(job: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load("ppo", PPOConfig, [JOIN, "trainer.nnodes=5", "trainer.n_gpus_per_node=9", "algorithm.lam=2"])
    nodes, gpus = (problem for problem in caught.value.problems if problem.field.startswith("trainer."))
    assert (
        str(nodes)
        == "trainer.nnodes=5: Slurm gave job 42 4 nodes (SLURM_JOB_NUM_NODES=4)\n      -> trainer.nnodes=4 or"
        " sbatch --nodes=5"
    )
    assert (
        str(gpus)
        == "trainer.n_gpus_per_node=9: Slurm gave job 42 8 GPUs on this node (SLURM_GPUS_ON_NODE=8)\n"
        "      -> trainer.n_gpus_per_node=8 or sbatch --gpus-per-node=9"
    )
    assert any(problem.field == "algorithm.lam" for problem in caught.value.problems)


def test_planning_may_be_for_any_machines(job: pytest.MonkeyPatch) -> None:
    config, _ = load_command("ppo", PPOConfig, ["trainer.nnodes=64"], tolerant=True)
    assert config.trainer.nnodes == 64


def test_eight_gpus_and_one_core_are_refused() -> None:
    """Slurm gives a task one core unless it is asked for more."""
    config = PPOConfig()
    given = Allocation("7", gpus=8, cpus=1, sources={"cpus": "SLURM_CPUS_ON_NODE=1"})
    (problem,) = contradictions(config, given)
    limit = "all that Slurm gave job 7 (SLURM_CPUS_ON_NODE=1)"
    assert f"that many processes would share 1 core, {limit}" in problem.rule
    assert problem.remedy.startswith("sbatch --cpus-per-task=64 or ")
    config.ray_init.num_cpus = 9
    assert not list(contradictions(config, given)), "who counts CPUs himself knows what he does"


def test_the_cores_that_ray_counts_are_used_in_a_job_and_idle_elsewhere(job: pytest.MonkeyPatch) -> None:
    given = [JOIN, "ray_init.num_cpus=70"]
    assert not any("ray_init.num_cpus" in note for note in load_command("ppo", PPOConfig, given)[1].notes)
    job.delenv("SLURM_JOB_ID")
    assert any(
        "ray_init.num_cpus=70: has no effect" in note
        for note in load_command("ppo", PPOConfig, given)[1].notes
    )


def test_memory_that_slurm_gave_limits_the_machine(job: pytest.MonkeyPatch) -> None:
    job.setenv("SLURM_MEM_PER_NODE", "100")
    assert host_memory().total == 100 * 2**20
