"""The files for Kubernetes and SkyPilot: they are read, their fields are real, and the run in them composes
and can be planned."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.compose.loading import load
from hydraflow.schema import PPOConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
JOIN = ("address=", "nnodes=", "n_gpus_per_node=", "default_local_dir=", "save_freq=")
RAY_JOB = {
    "entrypoint",
    "backoffLimit",
    "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished",
    "rayClusterSpec",
}
"""Those of the fields in KubeRay 1.6's API reference that are used here; below, of RayClusterSpec and its
groups."""
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
SKY_TASK = {"name", "num_nodes", "resources", "workdir", "volumes", "secrets", "setup", "run"}
"""Fields of SkyPilot's task YAML."""


def read(*parts: str) -> dict[str, Any]:
    return yaml.safe_load(EXAMPLES.joinpath(*parts).read_text())


def overrides(command: str) -> list[str]:
    """The arguments of main_ppo in a shell command."""
    words = shlex.split(command.replace("\\\n", " "))
    start = max(position for position, word in enumerate(words) if word == "hydraflow.main_ppo")
    return words[start + 1 :]


def planned(given: list[str], **variables: str) -> Any:
    for name, value in variables.items():
        given = [word.replace(f"${name}", value) for word in given]
    config = load("ppo", PPOConfig, given)
    return config, resolve_plan(config, prompts=7473, devices_per_node=config.trainer.n_gpus_per_node or 0)


def test_the_rayjob_is_what_kuberay_knows() -> None:
    job = read("kuberay", "rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() == RAY_JOB
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() == RAY_CLUSTER and cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == WORKER_GROUP
    pods = [
        cluster["headGroupSpec"]["template"],
        *(group["template"] for group in cluster["workerGroupSpecs"]),
    ]
    for pod in pods:
        (container,), volumes = pod["spec"]["containers"], pod["spec"]["volumes"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in volumes
        }


def test_the_rayjob_has_the_machines_that_its_run_asks_for() -> None:
    spec = read("kuberay", "rayjob.yaml")["spec"]
    config, plan = planned(overrides(spec["entrypoint"]))
    cluster = spec["rayClusterSpec"]
    assert config.trainer.nnodes == 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.trainer.n_gpus_per_node
    assert int(container["resources"]["limits"]["cpu"]) > config.trainer.n_gpus_per_node
    assert (plan.trajectories_per_step, plan.actor.rows_per_rank) == (4096, 64)


def test_ray_is_of_the_version_that_is_tested() -> None:
    pins = (EXAMPLES.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={read('kuberay', 'rayjob.yaml')['spec']['rayClusterSpec']['rayVersion']}" in pins


def test_the_sky_task_is_what_skypilot_knows_and_its_run_can_be_planned() -> None:
    task = read("skypilot", "ppo.yaml")
    assert task.keys() == SKY_TASK
    given = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
    }
    config, plan = planned(overrides(task["run"]), own="10.0.0.1", **given)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_init.address) == (
        2,
        8,
        "10.0.0.1:6379",
    )
    assert plan.trajectories_per_step == 4096


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="needs the program shellcheck (apt-get install shellcheck)"
)
@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_sky_tasks_scripts_are_clean(part: str) -> None:
    script = "#!/usr/bin/env bash\n# shellcheck disable=SC1090\n" + read("skypilot", "ppo.yaml")[part]
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_options_of_ray_start_are_rays_own() -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    page = EXAMPLES.parent / "docs" / "cluster.md"
    lines = [
        line for file in (EXAMPLES / "skypilot" / "ppo.yaml", page) for line in file.read_text().splitlines()
    ]
    used = {
        word
        for line in lines
        if "ray start --" in line or "common=(" in line
        for word in re.findall(r"--[a-z-]+", line)
    }
    assert {"--head", "--address", "--node-ip-address", "--block"} <= used <= known
