"""Free disk space for what the run will write, computed from the plan and the models' shapes: checkpoints
and trained models; and the folder of a recipe.

In: how often checkpoints are saved and how many are kept, sizes and dtypes of the models. Out: findings. Left
out on purpose: adapters and their optimizer state, which are small.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydraflow.batch_plan.resolve import BatchPlan
from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, ok, problem, warning
from hydraflow.engine.config import engine_config
from hydraflow.memory.limits import BYTES
from hydraflow.memory.report import size_text
from hydraflow.memory.shape import ModelShape
from hydraflow.models.config import ModelConfig
from hydraflow.recipes import arithmetic
from hydraflow.schema import PPOConfig
from hydraflow.system.paths import expanded
from hydraflow.system.whole_files import prove_writable
from hydraflow.workers.config import ActorConfig, CriticConfig

MOMENTS = 2
"""Numbers that AdamW keeps per weight."""
SPARE = 2**30
"""Room for metrics, samples and logs; less causes a warning."""


@dataclass(frozen=True)
class PlannedFiles:
    """Files that will be on the disk: `count` times `size` bytes."""

    name: str
    size: int
    count: int = 1
    keep_key: str = ""
    """Configuration key that limits `count`."""

    def __str__(self) -> str:
        times = "" if self.count == 1 else f"{self.count} times "
        return f"{times}{self.name} {size_text(self.size)}"


def check_disk(context: CheckContext) -> Iterator[Finding]:
    """The disk of the run folder, which may not exist yet."""
    trainer = context.config.trainer
    saves = not trainer.val_only and (trainer.save_final_model or trainer.save_freq > 0)
    written: list[PlannedFiles] = []
    if saves:
        written = what_is_written(context.config, context.plan, context.shape, context.critic_shape)
    folder = expanded(trainer.default_local_dir or "runs").absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise CheckSkipped(f"{folder} cannot be read: {error.strerror}") from None
    yield judge(folder, written, free=free)


def check_recipe(context: CheckContext) -> Iterator[Finding]:
    """The cache folder of a recipe: its assets must exist, or it must be writable."""
    recipe = context.config.recipe
    if recipe.name == "none":
        raise CheckSkipped("no recipe is used")
    folder = arithmetic.cache_folder(recipe, context.config.trainer.seed)
    if arithmetic.is_made(folder):
        yield ok(f"{folder} exists")
        return
    try:
        prove_writable(folder)
    except OSError as error:
        rule = f"{folder} cannot be created ({error.strerror})"
        yield problem(rule, f"{arithmetic.KEY}=<a folder that you may write to>, or set HYDRAFLOW_CACHE")
        return
    yield ok(f"{folder} will be created")


def what_is_written(
    config: PPOConfig, plan: BatchPlan, shape: ModelShape, critic_shape: ModelShape | None
) -> list[PlannedFiles]:
    """Checkpoints and final models of the trained roles."""
    trainer, policy, critic = config.trainer, config.actor_rollout_ref, config.critic
    roles: list[tuple[str, int, ActorConfig | CriticConfig, ModelConfig, int | None]] = [
        ("actor", shape.parameters, policy.actor, policy.model, trainer.max_actor_ckpt_to_keep)
    ]
    if plan.critic is not None:
        weights = (critic_shape or shape).value_parameters
        roles.append(("critic", weights, critic, critic.model, trainer.max_critic_ckpt_to_keep))
    found = []
    for name, weights, role, model, keep in roles:
        full = weights * BYTES[engine_config(role.strategy, role).model_dtype]
        if trainer.save_final_model:
            found.append(PlannedFiles(f"final_model/{name}", full))
        parts = {"model": full, "optimizer": 0 if model.lora_rank > 0 else MOMENTS * full, "hf_model": full}
        size = sum(parts.get(part, 0) for part in role.checkpoint.save_contents)
        if count := checkpoints(plan.total_steps, trainer.save_freq, keep):
            key = f"trainer.max_{name}_ckpt_to_keep"
            found.append(PlannedFiles(f"checkpoint of the {name}", size, count, key))
            if trainer.keep_best is not None:
                found.append(PlannedFiles(f"best checkpoint of the {name}", size))
    return found


def checkpoints(total_steps: int, save_freq: int, keep: int | None) -> int:
    """Largest number on the disk at one time: a new one is written before the oldest is deleted. An unknown
    number of steps counts as one save.

    >>> checkpoints(100, 20, None), checkpoints(100, 30, None)
    (5, 4)
    >>> checkpoints(100, 20, 2), checkpoints(100, -1, None)
    (3, 0)
    """
    if save_freq <= 0:
        return 0
    saves = -(-total_steps // save_freq) if total_steps else 1
    return saves if keep is None else min(saves, keep + 1)


def judge(folder: Path, written: Sequence[PlannedFiles], *, free: int) -> Finding:
    """`free`: bytes on the disk of `folder`. A problem if not one of each fits, a warning if not all do."""
    least, most = sum(each.size for each in written), sum(each.size * each.count for each in written)
    parts = " + ".join(map(str, written))
    writes = f"the run writes {size_text(most)} ({parts})" if written else "no model will be saved"
    seen = f"{folder}: {size_text(free)} free, {writes}"
    elsewhere = "trainer.default_local_dir=<a folder on a larger disk>"
    if free < least:
        return problem(seen, f"{elsewhere} or trainer.save_final_model=false" if most == least else elsewhere)
    if free < most:
        fewer = _kept(written, free)
        return warning(
            f"{seen}: later checkpoints will fail", f"{fewer} or {elsewhere}" if fewer else elsewhere
        )
    if free < most + SPARE:
        return warning(f"{seen}; little is left for metrics and logs", elsewhere)
    return ok(seen)


def _kept(written: Sequence[PlannedFiles], free: int) -> str:
    """Overrides that keep as many checkpoints as fit beside the newest one; empty: none do."""
    keys = [each.keep_key for each in written if each.keep_key]
    for keep in range(max(each.count for each in written), 0, -1):
        if sum(each.size * min(each.count, keep + 1) for each in written) <= free:
            return " ".join(f"{key}={keep}" for key in keys)
    return ""
