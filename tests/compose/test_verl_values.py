"""Legal lines of verl's whose values mean something else beside other keys, and engines that are not here."""

import pytest
from compose.legal import translated

from hydraflow.compose import loading
from hydraflow.compose.loading import load_command
from hydraflow.errors import ConfigError
from hydraflow.schema import PPOConfig
from hydraflow.system.allocation import Allocation

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
LOSS, BYPASS = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"
OWN = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "trainer.n_gpus_per_node=8"]


@pytest.mark.parametrize(("name", "ours"), [("param_dtype", "dtype"), ("reduce_dtype", "reduce_dtype")])
@pytest.mark.parametrize("section", [f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"])
def test_mixed_precision_is_taken(section, name, ours):
    found, said = translated({f"{section}.mixed_precision.{name}": "float32"})
    assert found[f"{section.replace('fsdp_config', 'fsdp').replace('fsdp', 'fsdp_config')}.{ours}"] == "fp32"
    assert said.problems == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype", "fp32"),
        *(("trainer.use_legacy_worker_impl", word) for word in ("disable", "auto", "enable")),
    ],
)
def test_these_have_no_effect(key, value):
    _, said = translated({key: value})
    assert (said.problems, [one.field for one in said.ignored]) == ([], [key])


def test_weights_to_resume_from_are_added_to_hf_model():
    config, command = load_command("ppo", PPOConfig, [*OWN, f"{ACTOR}.checkpoint.save_contents=[hf_model]"])
    saved = config.actor_rollout_ref.actor.checkpoint
    assert (saved.save_contents, saved.load_contents) == (["model", "hf_model"], ["model"])
    assert command.notes[0].endswith("taken as [model,hf_model], since a run resumes from model")


@pytest.mark.parametrize(
    ("size", "machines", "taken"),
    [
        (32, ["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], -1),
        (16, ["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], 16),
        (4, ["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], 4),
        (32, ["trainer.device=cpu"], -1),
        (2, ["trainer.device=cpu"], 2),
        (16, ["cluster=h100"], -1),
        (8, ["cluster=h100"], 8),
        (16, ["cluster=h100", "cluster.nodes=4"], 16),
        (64, ["cluster=h100", "cluster.nodes=4"], -1),
    ],
)
def test_a_shard_size_above_the_devices_shards_over_all(size, machines, taken):
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    config, command = load_command("ppo", PPOConfig, [*OWN[:2], f"{key}={size}", *machines], tolerant=True)
    assert config.actor_rollout_ref.actor.fsdp_config.fsdp_size == taken
    said = [note for note in command.notes if note.startswith(f"{key}={size}: more than the ")]
    assert len(said) == (size != taken) and all("sharded over all of them" in note for note in said)


def test_a_shard_size_is_compared_with_what_the_batch_system_gave(monkeypatch):
    """A machine that submits jobs may have other devices than those that they get."""
    given = Allocation(job="1", gpus=8)
    monkeypatch.setattr(loading, "allocation", lambda: given)
    size = "actor.fsdp_config.fsdp_size"
    config, _ = load_command("ppo", PPOConfig, [*OWN[:2], f"actor_rollout_ref.{size}=8"], tolerant=True)
    assert config.actor_rollout_ref.actor.fsdp_config.fsdp_size == 8


def test_a_profiler_without_steps_profiles_nothing():
    config, command = load_command("ppo", PPOConfig, [*OWN, "global_profiler.tool=torch_memory"])
    assert config.global_profiler.tool is None
    assert "profiles nothing without global_profiler.steps" in command.notes[0]
    config, _ = load_command(
        "ppo", PPOConfig, [*OWN, "global_profiler.tool=torch", "global_profiler.steps=[2]"]
    )
    assert config.global_profiler.tool == "torch"


@pytest.mark.parametrize("also", [[], [f"{BYPASS}=true", "algorithm.rollout_correction.loss_type=reinforce"]])
def test_the_loss_of_bypass_mode_is_that_of_the_correction(also):
    config, command = load_command("ppo", PPOConfig, [*OWN, f"{LOSS}=bypass_mode", *also])
    correction = config.algorithm.rollout_correction
    assert correction.bypass_mode and config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert correction.loss_type == ("reinforce" if also else "ppo_clip")
    assert f"{LOSS}=bypass_mode: taken as vanilla with {BYPASS}=true" in command.notes
    with pytest.raises(ConfigError, match="loss_mode=bypass_mode: must be vanilla"):
        load_command("ppo", PPOConfig, [*OWN, f"{LOSS}=bypass_mode", f"{BYPASS}=false"])


def test_what_takes_the_place_of_verls_eight_gpus_is_said():
    words = [*OWN[:2], f"{ACTOR}.grad_clip=0.5"]
    said = "trainer.n_gpus_per_node: not set; verl takes 8, here it is the number on this machine ("
    assert any(note.startswith(said) for note in load_command("ppo", PPOConfig, words)[1].notes)
    # These words are not a command of verl's.
    assert not any(said in note for note in load_command("ppo", PPOConfig, OWN[:2])[1].notes)
    assert not any(said in note for note in load_command("ppo", PPOConfig, [*words, OWN[2]])[1].notes)


@pytest.mark.parametrize("extra", [{}, {f"{REF}.ulysses_sequence_parallel_size": 4}])
def test_a_size_over_all_ranks_is_divided_by_the_ranks_of_its_role(extra):
    """8 devices share 4 rows at a time with a sequence parallel size of 2, which the reference takes from the
    actor."""
    sizes = {f"{role}.log_prob_micro_batch_size": 32 for role in (REF, ROLLOUT)}
    layout = {"trainer.n_gpus_per_node": 8, f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    found, said = translated({**sizes, **layout, **extra})
    assert said.problems == []
    assert found[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"] == 8
    assert found[f"{REF}.log_prob_micro_batch_size_per_gpu"] == (16 if extra else 8)


# --- engines that are not here --------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [f"{ROLLOUT}.name=trtllm", f"{ROLLOUT}.tensor_model_parallel_size=2"],
        [f"{ROLLOUT}.name=trtllm"],
        [f"{ACTOR}.strategy=fsdp_turbo", f"{REF}.strategy=fsdp_turbo"],
        [f"{ACTOR}.strategy=veomni", f"{REF}.strategy=veomni", "critic.strategy=veomni"],
        [f"{ACTOR}.strategy=fsdp2", f"{REF}.strategy=veomni"],
    ],
)
def test_pasting_the_remedies_of_unbuilt_engines_ends_in_a_run(words):
    with pytest.raises(ConfigError) as refused:
        load_command("ppo", PPOConfig, [*OWN, *words])
    remedies = [
        word for problem in refused.value.problems for word in problem.remedy.split(" or ")[0].split()
    ]
    changed = {word.partition("=")[0]: word for word in [*words, *remedies]}
    load_command("ppo", PPOConfig, [*OWN, *changed.values()])
    load_command("ppo", PPOConfig, [*OWN, *words], tolerant=True)


def test_the_remedy_of_an_unbuilt_rollout_engine_keeps_the_sizes():
    size = f"{ROLLOUT}.tensor_model_parallel_size=8"
    with pytest.raises(ConfigError) as refused:
        load_command("ppo", PPOConfig, [*OWN, f"{ROLLOUT}.name=trtllm", size])
    assert [problem.remedy for problem in refused.value.problems] == [f"{ROLLOUT}.name=vllm"]


def test_an_engine_that_a_file_leaves_to_the_user_is_vllm_where_a_replica_is_divided():
    """verl's own files have `name: ???` and a tensor-parallel size of 2."""
    name, size = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size"
    found, said = translated({name: "???", size: 2, "trainer.val_only": False, "data.use_shm": False})
    assert found[name] == "vllm"
    assert f"{name}: not set, and {size}=2; taken as vllm, as in earlier versions of verl" in said.notes
