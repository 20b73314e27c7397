"""Training that samples with vLLM: where it runs, that the trainer agrees with it, and what happens when one
of its processes dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as parquet
import pytest
from generation.vllm_process import needs_vllm
from jobs.command import ONE_RANK, assert_refused, completed, hydraflow, wait_for
from jobs.dying import dying_worker, hanging_worker, left_in_memory, noting_worker
from jobs.test_placement import ACTOR, CRITIC, GPUS, ROLLOUT, SMALL_BUCKETS, as_planned, train

from hydraflow.compose.loading import load
from hydraflow.dispatch import template
from hydraflow.errors import WorkerError
from hydraflow.jobs.generate import run_generate
from hydraflow.models.tiny import make_model
from hydraflow.schema import GenerateConfig
from hydraflow.trainer import roles

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_with_vllm"),
]

SECTION, MODEL, CORR = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "rollout_corr/rollout_is"
VLLM = [f"{SECTION}.name=vllm", f"{SECTION}.max_num_seqs=32"]
FILTERED = [f"{SECTION}.temperature=0.7", f"{SECTION}.top_p=0.95", f"{SECTION}.top_k=12"]
CORRECTED = ["algorithm.rollout_correction.rollout_is=token"]
STEPS = ["trainer.total_training_steps=3", "trainer.test_freq=3"]


LIBRARY = """
import sys
from pathlib import Path
sys.modules["ray"] = None  # vLLM imports it, and no template may have it
from generation.vllm_process import import_vllm
import_vllm()
for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
    del sys.modules[name]
Path(__file__).with_suffix(".imported").touch()
"""


@pytest.fixture(scope="module")
def ray_with_vllm(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """New workers of Ray are forks of a process that has imported vLLM, too, which takes ten seconds of a
    core: it has the usual template's place."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "library_of_vllm.py").write_text(LIBRARY)
    (usual,) = template.STARTED
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(template, "LIBRARIES", (*template.LIBRARIES, "library_of_vllm"))
        ours = template.Template()
    wait_for((folder / "library_of_vllm.imported").exists, 300, "the import of vLLM")
    aside = usual.address.with_name(f"aside.{usual.address.name}")
    usual.address.rename(aside)
    ours.address.rename(usual.address)
    template.STARTED.append(ours)
    yield
    usual.address.rename(ours.address)
    aside.rename(usual.address)


@pytest.fixture(scope="module")
def colocated(ray_with_vllm: None, tmp_path_factory: pytest.TempPathFactory, recipe_cache: Path) -> Any:
    folder = tmp_path_factory.mktemp("colocated")
    saved = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=3"]
    return folder, *train(
        folder, recipe_cache, f"{GPUS}=2", *VLLM, *FILTERED, *CORRECTED, *STEPS, *SMALL_BUCKETS, *saved
    )


def test_it_has_processes_of_its_own_and_sleeps_beside_the_trainer(colocated: Any) -> None:
    _, job, rows = colocated
    on_device = as_planned(job)
    assert not set(on_device["rollout"].values()) & set(on_device["actor"].values())
    assert on_device["actor"] == on_device["critic"] == on_device["ref"]
    slept = [set(beside) for beside in job.beside]
    assert slept == [{"actor", "critic", "ref"}] * 2 * len(rows), "in each step, and while it is saved"


def test_the_trainer_agrees_with_it_in_every_step_though_tokens_were_filtered(colocated: Any) -> None:
    """Both replicas got other weights before each step."""
    *_, rows = colocated
    names = [f"training/rollout_probs_diff_{what}" for what in ("mean", "max", "std")]
    names += [f"{name}/replica-{number}" for name in names[:2] for number in (0, 1)]
    assert len(rows) == 3 and all(0 < row[name] < 1e-5 for row in rows for name in names)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    weights = [(row[f"{CORR}_mean"], row[f"{CORR}_ratio_fraction_high"]) for row in rows]
    assert all(mean == pytest.approx(1, abs=1e-4) and high == 0 for mean, high in weights)


def test_its_own_devices_its_deaths_and_a_resume_change_no_number(
    colocated: Any, tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After step 1. Rank 0 is killed while it is idle, while it receives weights, and while it samples. Each
    sample has a seed of its own: its draws do not depend on what was sampled before."""
    deaths = {"idle": 1, "receiving": 1, "sampling": 1}
    monkeypatch.setattr(roles, "RolloutWorker", dying_worker(deaths, tmp_path, version=1))
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={colocated[0]}/global_step_1"]
    given = [f"{GPUS}=4", f"{ACTOR}=[0,1]", f"{CRITIC}=[0,1]", f"{ROLLOUT}=[2,3]", *resumed]
    given += [*VLLM, *FILTERED, *CORRECTED, *STEPS, *SMALL_BUCKETS]
    job, rows = train(tmp_path / "run", recipe_cache, *given)
    assert rows == colocated[-1][1:]
    assert job.beside == [] and len(list(tmp_path.glob("died *"))) == 3
    assert left_in_memory(tmp_path) == []


def test_adapters_alone_travel_and_a_replica_that_dies_gets_the_base_weights(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replicas sleep beside the trainer. Weights that are checked come whole: the first ones, and those
    after the first sleep."""
    deaths = {"idle": 1, "receiving": 1, "sampling": 1}
    monkeypatch.setattr(roles, "RolloutWorker", dying_worker(deaths, tmp_path))
    adapters = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora.merge=false", "actor_rollout_ref.actor.optim.lr=0.01"]
    job, rows = train(
        tmp_path / "run", recipe_cache, f"{GPUS}=2", *VLLM, *FILTERED, *STEPS, *SMALL_BUCKETS[:1], *adapters
    )
    assert len(list(tmp_path.glob("died *"))) == 3
    assert [set(beside) for beside in job.beside] == [{"actor", "critic"}] * len(rows)
    names = [f"training/rollout_probs_diff_max/replica-{number}" for number in (0, 1)]
    assert len(rows) == 3 and all(0 < row[name] < 1e-5 for row in rows for name in names)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_replica_on_two_devices_agrees_with_the_trainer(
    colocated: Any, tmp_path: Path, recipe_cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "RolloutWorker", noting_worker(tmp_path))
    divided = [f"{SECTION}.{kind}_model_parallel_size=2"]
    given = [*VLLM, *FILTERED, *STEPS, *SMALL_BUCKETS, *divided]
    job, rows = train(tmp_path / "run", recipe_cache, f"{GPUS}=2", *given)
    assert len(list(tmp_path.glob("process *"))) == 2 and left_in_memory(tmp_path) == []
    assert len(set(as_planned(job)["rollout"].values())) == 2 and [set(beside) for beside in job.beside]
    for row, whole in zip(rows, colocated[-1], strict=True):
        assert row["training/rollout_probs_diff_max"] < 1e-5 and row["actor/grad_norm"] > 0
        assert [name for name in row if "/replica-" in name] == [
            f"training/rollout_probs_diff_{what}/replica-0" for what in ("mean", "max")
        ]
        # sums of floats in another order may draw another token, but not at the start
        assert row["step"] != 1 or row["critic/score/mean"] == whole["critic/score/mean"]


def test_a_stage_that_is_killed_ends_the_run_and_leaves_no_process(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = noting_worker(tmp_path, dying_worker({"receiving": 1}, tmp_path))
    monkeypatch.setattr(roles, "RolloutWorker", worker)
    stages, failed = f"{SECTION}.pipeline_model_parallel_size=2", "^rollout rank 0 .* in read_weights"
    with pytest.raises(WorkerError, match=failed):
        train(tmp_path / "run", recipe_cache, f"{GPUS}=2", *VLLM, *STEPS, *SMALL_BUCKETS, stages)
    processes = [int(note.name.split()[1]) for note in tmp_path.glob("process *")]
    assert len(processes) == 2
    wait_for(lambda: not any(map(psutil.pid_exists, processes)), 30, "the end of both")
    assert left_in_memory(tmp_path) == []


def test_a_replica_that_hangs_is_named_and_leaves_no_process(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "RolloutWorker", hanging_worker(tmp_path))
    limit, failed = "trainer.rpc_timeout=45", r"^rollout rank 1 .* in advance.*: no answer in 45 seconds"
    with pytest.raises(WorkerError, match=failed):
        train(tmp_path / "run", recipe_cache, f"{GPUS}=2", *VLLM, *STEPS, limit)
    replicas = [int(note.name.split()[1]) for note in tmp_path.glob("process *")]
    assert len(replicas) == 2
    wait_for(lambda: not any(map(psutil.pid_exists, replicas)), 30, "the end of both")
    assert left_in_memory(tmp_path) == []


def test_main_generate_writes_what_native_writes(prompts: Path, tmp_path: Path) -> None:
    """Greedy, with weights that are larger than at the start of a training, so that no two tokens are
    nearly as probable."""
    model = make_model(tmp_path / "model", hidden=64, layers=2, heads=2, kv_heads=1)
    given = [f"model.path={model}", f"data.path={prompts}", "data.max_response_length=8"]
    given += ["rollout.temperature=0", *ONE_RANK, "model.override_config={}"]
    native, ours = tmp_path / "native.parquet", tmp_path / "vllm.parquet"
    run_generate(load("generate", GenerateConfig, [*given, "rollout.name=native", f"output.path={native}"]))
    completed("main_generate", *given, "rollout.name=vllm", f"output.path={ours}", cwd=tmp_path)
    first, second = (parquet.read_table(file)["responses"].to_pylist() for file in (native, ours))
    assert first == second


def test_a_model_that_it_does_not_run_is_refused(tmp_path: Path, prompts: Path, tiny: str) -> None:
    """The tiny model's heads are of size 16, which has no attention kernel on a CPU."""
    given = [f"model.path={tiny}", f"data.path={prompts}", "output.path=x.parquet", "rollout.name=vllm"]
    done = hydraflow("main_generate", *given, *ONE_RANK, cwd=tmp_path)
    assert_refused(done, "rollout.name=vllm", "no attention for heads of size 16")
