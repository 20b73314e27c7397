"""Which keys a run may change when it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig, SFTConfig
from hydraflow.trainer.identity import Identity, identity_of

Change = Callable[[PPOConfig], None]


def ppo(*changes: Change, estimator: str = "grpo") -> Identity:
    config = PPOConfig()
    config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, 4
    config.algorithm.adv_estimator = estimator
    for change in changes:
        change(config)
    return identity_of(config, resolve_plan(config, prompts=100, devices_per_node=2))


def differing(one: Identity, other: Identity) -> list[str]:
    return [problem.field for problem in one.differences(other.values, where="x")]


def set_lr(config: PPOConfig) -> None:
    config.actor_rollout_ref.actor.optim.lr = 3e-6


def set_seed(config: PPOConfig) -> None:
    config.trainer.seed = 7


def set_steps(config: PPOConfig) -> None:
    config.trainer.total_training_steps = 5


def decay(config: PPOConfig) -> None:
    config.actor_rollout_ref.actor.optim.lr_scheduler_type = "linear"


def more_room(config: PPOConfig) -> None:
    """What one changes after running out of memory or time."""
    actor = config.actor_rollout_ref.actor
    actor.ppo_micro_batch_size_per_gpu, actor.fsdp_config.param_offload = 1, True
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.actor_rollout_ref.rollout.max_num_seqs = 3
    config.trainer.n_gpus_per_node, config.trainer.save_freq, config.trainer.test_freq = 1, 5, 9
    config.trainer.default_local_dir, config.data.val_files, config.trainer.max_wall_time = (
        "elsewhere",
        "more.parquet",
        "1h",
    )
    actor.checkpoint.async_save = False
    config.reward.timeout, config.reward.max_memory, config.reward.max_failed_share = 99.0, 99.0, 1.0


def written_otherwise(config: PPOConfig) -> None:
    config.batch.optimizer_steps_per_step = 2


def start_from_core(config: PPOConfig) -> None:
    config.actor_rollout_ref.actor.megatron.dist_checkpointing_path = "/checkpoint"


def change_the_critic(config: PPOConfig) -> None:
    config.critic.optim.lr = 1.0


def test_weights_of_another_checkpoint_are_another_run() -> None:
    key = "actor_rollout_ref.actor.megatron.dist_checkpointing_path"
    assert differing(ppo(start_from_core), ppo()) == [key]


def test_what_shapes_training_is_named_with_both_values() -> None:
    problems = ppo(set_lr, set_seed).differences(ppo().values, where="out/global_step_4")
    assert [problem.field for problem in problems] == ["actor_rollout_ref.actor.optim.lr", "trainer.seed"]
    assert (
        str(problems[0])
        == "actor_rollout_ref.actor.optim.lr=3e-06: out/global_step_4 was trained with 1e-06\n      ->"
        " actor_rollout_ref.actor.optim.lr=1e-06"
    )
    assert ppo(set_lr).hash != ppo().hash


def judged_with(key: str) -> Change:
    def change(config: PPOConfig) -> None:
        config.reward.custom_reward_function.reward_kwargs = {
            "api_key": key,
            "url": f"https://host/?token={key}",
            "n": 1,
        }

    return change


def test_secrets_are_neither_kept_nor_shown_but_a_change_is_noticed() -> None:
    old, new = ppo(judged_with("s3cr3t")), ppo(judged_with("t00s3cr3t"))
    section = "reward.custom_reward_function.reward_kwargs"
    assert "s3cr3t" not in json.dumps(old.values) and old.values[f"{section}.n"] == 1
    assert (
        differing(ppo(judged_with("s3cr3t")), old) == []
        and ppo(judged_with("s3cr3t")).hash == old.hash != new.hash
    )
    problems = new.differences(json.loads(json.dumps(old.values)), where="out/global_step_4")
    assert [problem.field for problem in problems] == [f"{section}.api_key", f"{section}.url"]
    assert "s3cr3t" not in str(ConfigError(problems))
    assert (
        f"{section}.api_key=(hidden): out/global_step_4 was trained with another value, which is hidden"
        in str(problems[0])
    )


def test_checkpoints_of_earlier_versions_have_secrets_as_they_were() -> None:
    values = ppo(judged_with("s3cr3t")).values
    section = "reward.custom_reward_function.reward_kwargs"
    stored = values | {f"{section}.api_key": "s3cr3t", f"{section}.url": "https://host/?token=s3cr3t"}
    assert ppo(judged_with("s3cr3t")).differences(stored, where="x") == []
    problems = ppo(judged_with("other")).differences(stored, where="x")
    assert len(problems) == 2 and "s3cr3t" not in str(ConfigError(problems))


@pytest.mark.parametrize(
    "change", [more_room, written_otherwise, set_steps, change_the_critic], ids=lambda change: change.__name__
)
def test_what_does_not_shape_it_may_change(change: Change) -> None:
    assert differing(ppo(change), ppo()) == []
    assert ppo(change).hash == ppo().hash


def given(**entries: object) -> Identity:
    def change(config: PPOConfig) -> None:
        config.reward.custom_reward_function.reward_kwargs = dict(entries)

    return ppo(change)


def test_an_entry_that_only_one_of_the_two_has_is_a_difference() -> None:
    """Of a mapping; an entry that is itself one, and a mapping that was None, too."""
    section = "reward.custom_reward_function.reward_kwargs"
    for more, fewer in ((given(n=1), given()), (given(n=1, m=2), given(m=2)), (given(n={"a": 1}), given())):
        [name] = more.values.keys() - fewer.values.keys()
        [added], [removed] = (
            one.differences(json.loads(json.dumps(other.values)), where="x")
            for one, other in ((more, fewer), (fewer, more))
        )
        assert added.field == removed.field == name and name.startswith(f"{section}.n")
        assert str(added) == f"{name}=1: x was trained without it\n      -> leave out {name}"
        assert str(removed) == f"{name}: x was trained with 1\n      -> +{name}=1"
        assert more.hash != fewer.hash
    without = {key: value for key, value in given().values.items() if key != section}
    assert given().differences(without | {f"{section}.n": 1}, where="x") != []
    assert given(n=1).differences(without, where="x") == [], "a version that did not have the mapping"
    assert given(n=1).differences(without | {section: None}, where="x") != []


def test_the_critic_counts_where_there_is_one() -> None:
    assert differing(ppo(change_the_critic, estimator="gae"), ppo(estimator="gae")) == ["critic.optim.lr"]


def test_the_number_of_steps_counts_where_the_rate_follows_it() -> None:
    assert differing(ppo(decay, set_steps), ppo(decay)) == ["trainer.total_training_steps"]


def test_keys_that_a_checkpoint_does_not_know_are_of_a_newer_version() -> None:
    older = dict(ppo().values)
    del older["algorithm.gamma"]
    assert ppo().differences(older | {"algorithm.gone": 1}, where="x") == []


def test_supervised_runs_have_one_too() -> None:
    config = SFTConfig()
    config.data.train_batch_size = 8
    plan = resolve_sft_plan(config, conversations=100)
    first = identity_of(config, plan)
    config.optim.lr = 0.5
    assert differing(identity_of(config, plan), first) == ["optim.lr"]
