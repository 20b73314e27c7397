"""The first step of a start compares the generation engine with the trainer, process by process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.command import LOCAL, SMALL_RECIPE, STEPS_ALONE, read_steps

from hydraflow.algorithms.actor_loss import ActorLoss
from hydraflow.compose.loading import load
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.errors import GuardStop
from hydraflow.generation.native import NativeEngine
from hydraflow.jobs.ppo import PPOJob
from hydraflow.schema import PPOConfig

pytestmark = pytest.mark.slow
SPOILT = "model.layers.1.mlp.down_proj.weight"


def config(folder: Path, cache: Path, *more: str) -> PPOConfig:
    given = [
        *SMALL_RECIPE,
        *LOCAL,
        f"recipe.cache_dir={cache}",
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=2",
        *STEPS_ALONE,
    ]
    return load("ppo", PPOConfig, [*given, *more])


def test_a_process_with_other_weights_is_named_and_the_first_of_them(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_all = NativeEngine.update_weights

    def spoil(engine: NativeEngine, stream: Iterable[tuple[str, torch.Tensor]], **parts: bool) -> None:
        noise = torch.Generator().manual_seed(0)
        load_all(
            engine,
            (
                (name, torch.randn(weight.shape, generator=noise) if name == SPOILT else weight)
                for name, weight in stream
            ),
            **parts,
        )

    monkeypatch.setattr(NativeEngine, "update_weights", spoil)
    with pytest.raises(GuardStop) as stopped:
        PPOJob(config(tmp_path, recipe_cache)).run()
    assert "generation replica 0 and the trainer disagree" in str(stopped.value)
    assert str(stopped.value).endswith(f"The first of its weights that differs from the trainer's: {SPOILT}.")


def test_few_calls_lie_between_the_step_and_the_loss(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who follows a step with a debugger gets to the loss in 14 frames of this package. The spine from
    main_ppo.py to the optimizer step is 9 files: compose/launch.py, and 7 from the job on, the engine's among
    them."""
    to_loss: list[list[str]] = []
    to_optimizer: list[set[str]] = []
    compute, take_step = ActorLoss.__call__, FSDPEngine.optimizer_step
    package = f"{files('hydraflow')}/"

    def callers() -> list[str]:
        frames = [frame for frame in inspect.stack()[2:] if frame.filename.startswith(package)]
        return [f"{frame.filename.removeprefix(package)}:{frame.function}" for frame in frames]

    def counted(loss: ActorLoss, *given: Any) -> Any:
        names = callers()
        to_loss.append(names[: names.index("trainer/ppo.py:step") + 1])
        return compute(loss, *given)

    def stepped(engine: FSDPEngine) -> dict[str, float]:
        of_engine = inspect.getfile(take_step).removeprefix(package)
        to_optimizer.append({of_engine, *(name.partition(":")[0] for name in callers())})
        return take_step(engine)

    monkeypatch.setattr(ActorLoss, "__call__", counted)
    monkeypatch.setattr(FSDPEngine, "optimizer_step", stepped)
    PPOJob(config(tmp_path, recipe_cache)).run()
    longest = max(to_loss, key=len)
    assert len(longest) + 1 <= 14, " <- ".join(longest)
    assert len(to_optimizer[-1]) <= 7, to_optimizer[-1]


@pytest.mark.parametrize("in_reward", [False, True])
def test_one_optimizer_step_needs_no_pass_of_its_own(
    tmp_path: Path, recipe_cache: Path, monkeypatch: pytest.MonkeyPatch, in_reward: bool
) -> None:
    """In 16 bits the engine's log-probabilities are not the trainer's. After the comparison of the first
    step, the only optimizer step knows its own; a KL penalty in the reward needs them before."""
    from hydraflow.workers.actor import ActorWorker

    passes: list[Any] = []
    compute = ActorWorker.compute_log_prob

    @functools.wraps(compute)
    def counted(worker: ActorWorker, batch: Any) -> Any:
        passes.append(batch)
        return compute(worker, batch)

    monkeypatch.setattr(ActorWorker, "compute_log_prob", counted)
    more = [
        "actor_rollout_ref.rollout.dtype=bf16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.probs_diff_limit=1.0",
        f"algorithm.use_kl_in_reward={str(in_reward).lower()}",
    ]
    PPOJob(config(tmp_path, recipe_cache, *more)).run()
    assert len(passes) == (2 if in_reward else 1)
    rows = [row for row in read_steps(tmp_path) if row["step"] > 0]
    names = [f"training/rollout_probs_diff_{what}" for what in ("mean", "max", "std")]
    names += [f"{name}/replica-0" for name in names[:2]]
    assert all(row[name] > 0 for row in rows for name in names)
    if not in_reward:
        assert [row["actor/ppo_kl"] for row in rows] == [0.0, 0.0]
        assert [row["actor/pg_clipfrac"] for row in rows] == [0.0, 0.0]
