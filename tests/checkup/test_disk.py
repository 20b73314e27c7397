"""Room for the models and checkpoints that are saved."""

from __future__ import annotations

from pathlib import Path

from checkup.given import configured, findings

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.disk import PlannedFiles, check_recipe, judge, what_is_written
from hydraflow.checkup.finding import State
from hydraflow.recipes.arithmetic import cache_folder

GIB = 2**30


def test_enough_tight_and_too_little(tmp_path: Path) -> None:
    written = [PlannedFiles("final_model/actor", 4 * GIB), PlannedFiles("final_model/critic", 2 * GIB)]
    fits = judge(tmp_path, written, free=20 * GIB)
    assert fits.state is State.OK
    assert (
        "the run writes 6.00 GiB (final_model/actor 4.00 GiB + final_model/critic 2.00 GiB)" in fits.evidence
    )
    assert judge(tmp_path, written, free=6 * GIB + 1).state is State.WARNING
    short = judge(tmp_path, written, free=5 * GIB)
    assert short.state is State.PROBLEM
    assert (
        short.remedy
        == "trainer.default_local_dir=<a folder on a larger disk> or trainer.save_final_model=false"
    )


def checkpoints_of(role: str, size: int, count: int) -> PlannedFiles:
    return PlannedFiles(f"checkpoint of the {role}", size, count, f"trainer.max_{role}_ckpt_to_keep")


def test_checkpoints_that_will_not_all_fit(tmp_path: Path) -> None:
    found = judge(tmp_path, [checkpoints_of("actor", 10 * GIB, 7)], free=45 * GIB)
    assert found.state is State.WARNING and "later checkpoints will fail" in found.evidence
    # 45 GiB hold 4 at a time: 3 that stay, and the one that is being written
    assert found.remedy.startswith("trainer.max_actor_ckpt_to_keep=3 or ")
    assert judge(tmp_path, [checkpoints_of("actor", 10 * GIB, 7)], free=9 * GIB).state is State.PROBLEM


def test_checkpoints_of_several_roles_are_kept_together(tmp_path: Path) -> None:
    """Two roles with five saves, their final models, and the best of the actor's."""
    files = [checkpoints_of(role, 30 * GIB, 5) for role in ("actor", "critic")]
    files += [PlannedFiles(f"final_model/{role}", 10 * GIB) for role in ("actor", "critic")]
    files.append(PlannedFiles("best checkpoint of the actor", 30 * GIB))
    found = judge(tmp_path, files, free=250 * GIB)  # 50 + 2 * 30 * 3 = 230
    both = "trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2"
    assert found.state is State.WARNING and found.remedy.startswith(f"{both} or ")
    found = judge(tmp_path, files, free=160 * GIB)  # not even two of each
    assert found.remedy == "trainer.default_local_dir=<a folder on a larger disk>"


def written(**keys: object) -> dict[str, tuple[int, int]]:
    context = CheckContext(configured(**keys))  # type: ignore[arg-type]
    found = what_is_written(context.config, context.plan, context.shape, context.critic_shape)
    return {each.name: (each.size, each.count) for each in found}


def test_bytes_follow_the_model_and_the_plan(model: Path, data: Path) -> None:
    shape = CheckContext(configured(model, data)).shape
    given = {"model": model, "data": data}
    assert written(**given) == {"final_model/actor": (4 * shape.parameters, 1)}
    half = written(
        **given, algorithm__adv_estimator="gae", actor_rollout_ref__actor__fsdp_config__model_dtype="bf16"
    )
    assert half == {
        "final_model/actor": (2 * shape.parameters, 1),
        "final_model/critic": (4 * shape.value_parameters, 1),
    }


def test_checkpoints_hold_weights_and_two_moments(model: Path, data: Path) -> None:
    weights = 4 * CheckContext(configured(model, data)).shape.parameters
    steps = {"trainer__total_training_steps": 10, "trainer__save_freq": 4, "trainer__save_final_model": False}
    # They are saved at steps 4, 8 and 10.
    assert written(model=model, data=data, **steps) == {"checkpoint of the actor": (3 * weights, 3)}
    assert written(model=model, data=data, **steps, trainer__max_actor_ckpt_to_keep=1) == {
        "checkpoint of the actor": (3 * weights, 2)
    }
    lean = written(
        model=model,
        data=data,
        **steps,
        actor_rollout_ref__actor__checkpoint__save_contents=["model", "extra"],
    )
    assert lean == {"checkpoint of the actor": (weights, 3)}


def test_a_run_that_saves_nothing(model: Path, data: Path) -> None:
    [found] = findings(CheckContext(configured(model, data, trainer__save_final_model=False)), "disk")
    assert found.state is State.OK and "no model will be saved" in found.evidence


def recipe_folder(cache: Path) -> CheckContext:
    return CheckContext(configured(recipe__name="arithmetic", recipe__cache_dir=str(cache)))


def test_a_recipe_needs_a_folder_that_can_be_made(tmp_path: Path) -> None:
    context = recipe_folder(tmp_path / "new")
    [found] = check_recipe(context)
    assert (
        found.state is State.OK
        and found.evidence.endswith("will be created")
        and not list(tmp_path.iterdir())
    )
    (tmp_path / "file").touch()
    [found] = check_recipe(recipe_folder(tmp_path / "file"))
    assert found.state is State.PROBLEM and "cannot be created (Not a directory)" in found.evidence
    assert found.remedy.startswith("recipe.cache_dir=")


def test_what_a_recipe_has_made_need_not_be_writable(tmp_path: Path) -> None:
    context = recipe_folder(tmp_path)
    model = cache_folder(context.config.recipe, context.config.trainer.seed) / "model"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    [found] = check_recipe(context)
    assert found.state is State.OK and found.evidence.endswith("exists")
