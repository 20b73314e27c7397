"""How Ray is started on a node: its options, its share of memory, and waiting for the head."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from threading import Timer

import pytest

from hydraflow.errors import EnvironmentFault
from hydraflow.schema import GenerateConfig, PPOConfig
from hydraflow.slurm.job_settings import JobSettings, job_settings_of
from hydraflow.slurm.ports import hold
from hydraflow.slurm.ray_node import _common, _head, await_head, job_nodes, object_store, own_name
from hydraflow.system.allocation import Allocation

FACTS = JobSettings(cpus=9, gpus=8, run_folder="/runs/1", start_timeout=300)


def test_every_option_is_one_of_ray_start_and_no_port_is_left_to_rays_defaults() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    held = hold(4)
    words = [*_common("10.0.0.1", Path("/tmp/x"), FACTS, held), *_head(held, dashboard=True)]
    words += ["--address=a", "--block"]
    held.release()
    options = {word.partition("=")[0] for word in words}
    assert options <= known
    fixed_by_ray = {
        "--port",
        "--ray-client-server-port",
        "--dashboard-port",
        "--dashboard-agent-listen-port",
        "--min-worker-port",
        "--max-worker-port",
    }
    assert fixed_by_ray <= options
    assert {
        "--num-cpus=9",
        "--num-gpus=8",
        "--dashboard-host=127.0.0.1",
        "--node-ip-address=10.0.0.1",
    } <= set(words)


def test_gpus_that_slurm_does_not_count_are_found_by_ray() -> None:
    held = hold(1)
    words = _common("10.0.0.1", Path("/tmp/x"), JobSettings(3, -1, "", 300), held)
    held.release()
    assert not [word for word in words if word.startswith("--num-gpus")]


def test_the_object_store_is_a_share_of_the_jobs_memory_and_fits_into_shared_memory() -> None:
    given = Allocation("1", memory_bytes=100 * 2**30)
    assert object_store(given, 2**50) == 30 * 2**30
    assert object_store(given, 10 * 2**30) == 9 * 2**30
    assert object_store(Allocation("1", memory_bytes=2**20), 2**50) == 80 * 2**20, "the least that Ray takes"
    assert object_store(Allocation("1"), 2**50) is None and object_store(None, 2**50) is None


def test_what_the_nodes_must_know() -> None:
    config = PPOConfig()
    config.trainer.nnodes, config.trainer.default_local_dir = 4, "/shared/a b"
    given = Allocation("12", nodes=4, gpus=8, cpus=64)
    assert job_settings_of(config, given) == JobSettings(
        cpus=64, gpus=8, run_folder="/shared/a b", start_timeout=300
    )
    config.trainer.device, config.trainer.n_gpus_per_node, config.trainer.default_local_dir = "cpu", 96, None
    found = job_settings_of(config, given)
    assert (found.cpus, found.gpus) == (97, 0), (
        "a CPU for each process and one beside them, whatever cores there are"
    )
    assert found.run_folder == str(Path("runs/ppo-job12").absolute()), (
        "a job that is put back finds its folder, and no other job's"
    )
    config.ray_init.num_cpus = 5
    assert job_settings_of(config, given).cpus == 5
    assert job_settings_of(GenerateConfig(), None) == JobSettings(
        cpus=3, gpus=-1, run_folder="", start_timeout=300
    )


def test_names_are_slurms() -> None:
    environ = {"SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert (own_name(environ), job_nodes(environ)) == ("n2", ["n1", "n2"])
    assert job_nodes({}) == [socket.gethostname()]


@pytest.mark.slow(short=True)
def test_the_head_is_there_when_something_listens(tmp_path: Path) -> None:
    file = tmp_path / "address"
    with pytest.raises(EnvironmentFault, match=r"waited 1 s for Ray's head on node1: it wrote no address"):
        await_head(tmp_path, "node1", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        assert await_head(tmp_path, "node1", 5) == file.read_text().strip()
    with pytest.raises(EnvironmentFault, match=r"for Ray's head on node1 at 127.0.0.1:\d+: .*refused"):
        await_head(tmp_path, "node1", 0.6)
    facts = JobSettings(cpus=1, gpus=0, run_folder="", start_timeout=2).to_shell()
    Timer(3.0, (tmp_path / "facts").write_text, [facts]).start()  # the head is still pulling its image
    with pytest.raises(
        EnvironmentFault, match="waited [56] s for Ray's head"
    ):  # 2 more: trainer.start_timeout
        await_head(tmp_path, "node1", 30)


@pytest.mark.parametrize("folder", ["/my runs/1", "/a\nb", '/it\'s "quoted"', "", "/a=b", "/$HOME;x\ty"])
def test_facts_come_through_a_shell_as_they_were(folder: str) -> None:
    facts = JobSettings(cpus=9, gpus=-1, run_folder=folder, start_timeout=300, resumes=1)
    assert JobSettings.from_shell(facts.to_shell()) == facts
    script = facts.to_shell() + 'printf "%s." "$HF_RUN_FOLDER"'
    assert (
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        == f"{folder}."
    )


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a b\nc", "..", "ok-1.2"])
def test_the_run_folder_of_a_job_is_in_runs_whatever_the_experiment_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = PPOConfig()
    config.trainer.experiment_name = name
    folder = Path(job_settings_of(config, Allocation("7")).run_folder)
    assert folder.parent == tmp_path / "runs" and folder.name.endswith("-job7") and "\n" not in folder.name
    assert name != "ok-1.2" or folder.name == "ok-1.2-job7"
