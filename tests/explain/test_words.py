"""What a step does, in words: every number can be worked out by hand."""

from hydraflow.batch_plan.generate import resolve_generate_plan
from hydraflow.batch_plan.resolve import resolve_plan
from hydraflow.batch_plan.sft import resolve_sft_plan
from hydraflow.explain.words import generate_phases, ppo_phases, sft_phases
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig
from hydraflow.trainer.phases import step_phases


def ppo_config() -> PPOConfig:
    """64 prompts with 4 responses each, 2 optimizer steps, on 2 devices."""
    config = PPOConfig()
    config.algorithm.adv_estimator = "grpo"
    config.data.train_batch_size, config.data.max_prompt_length, config.data.max_response_length = (
        64,
        100,
        200,
    )
    config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.rollout.max_num_seqs = 4, 50
    (
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
        config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,
    ) = (32, 16)
    return config


def words(config: PPOConfig, prompts: int | None = 640) -> dict[str, str]:
    return {phase.name: phase.text for phase in ppo_phases(resolve_plan(config, prompts=prompts), config)}


def test_a_step_of_grpo() -> None:
    found = words(ppo_config())
    assert found["prompts"] == "64 prompts of at most 100 tokens are drawn"
    assert (
        "256 trajectories from 2 engines, 128 trajectories each, in 3 waves of at most 100 at a time"
        in found["generate"]
    )
    assert found["advantages"].endswith("by groups of 4")
    assert (
        found["actor"]
        == "2 optimizer steps (2 mini-batches): each takes 32 prompts = 128 trajectories, on 2 data ranks of"
        " 64 rows, in 4 forwards of 16 rows"
    )
    assert found["run"].startswith(
        "10 training steps (10 are one pass over the prompts, 64 each), 20 optimizer steps"
    )
    assert not {"critic", "values", "reference"} & set(found)


def test_remax_samples_once_more() -> None:
    config = ppo_config()
    config.algorithm.adv_estimator = "remax"
    found = words(config)
    assert "256 trajectories from 2 engines" in found["generate"]
    assert found["generate"].endswith(
        "and a greedy response to each prompt, which is scored but not trained on"
    )


def test_the_generation_engines_log_probs_are_taken_where_they_are_the_actors() -> None:
    config = ppo_config()
    plan = resolve_plan(config, prompts=640)
    exact, again = (
        {phase.name: phase.text for phase in ppo_phases(plan, config, exact=exact)}["log-probs"]
        for exact in (True, False)
    )
    assert exact.startswith("those of the generation engine") and "in the first step after a start" in exact
    assert again.startswith("the actor computes log-probabilities again, on 2 data ranks of 128 rows, in 3")


def test_the_words_follow_the_phases_of_the_step() -> None:
    config = ppo_config()
    config.algorithm.adv_estimator = "gae"
    config.actor_rollout_ref.actor.use_kl_loss = True
    for one in (ppo_config(), config):
        assert list(words(one)) == [*(phase.name for phase in step_phases(one)), "run"]


def test_roles_that_run_are_said() -> None:
    config = ppo_config()
    config.algorithm.adv_estimator = "gae"
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.actor.ppo_epochs = 3
    found = words(config)
    assert {"critic", "values", "reference"} <= set(found)
    assert found["actor"].startswith("6 optimizer steps (2 mini-batches, 3 passes)")


def test_forwards_that_are_filled_by_tokens() -> None:
    config = ppo_config()
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = None
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 1000
    assert "2 data ranks of 64 rows, in forwards of at most 1,000 tokens" in words(config)["actor"]


def test_an_unknown_number_of_prompts_is_said() -> None:
    assert "is not known" in words(ppo_config(), prompts=None)["run"]


def test_a_step_of_supervised_training() -> None:
    config = SFTConfig()
    config.data.train_batch_size, config.data.use_dynamic_bsz, config.data.micro_batch_size_per_gpu = (
        32,
        False,
        4,
    )
    found = {
        phase.name: phase.text
        for phase in sft_phases(resolve_sft_plan(config, conversations=320, devices_per_node=2), config)
    }
    assert found["update"] == "1 optimizer step: 2 data ranks of 16 conversations, in 4 forwards of 4 rows"
    assert found["run"].startswith("10 training steps")


def test_generation() -> None:
    config = GenerateConfig()
    config.rollout.n, config.rollout.max_num_seqs = 4, 100
    found = {
        phase.name: phase.text
        for phase in generate_phases(resolve_generate_plan(config, prompts=500), config)
    }
    # 4 waves of 100 sequences on 2 processes.
    assert found["call"].startswith("200 prompts together: 4 responses")
    assert found["run"] == "500 prompts in 3 calls: 2,000 responses"
