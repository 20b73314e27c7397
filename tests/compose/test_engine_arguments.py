"""Names in open mappings are those of the library that reads them, where it is installed; here, a stand-in
for each."""

import sys

import pytest

from hydraflow.compose import engine_arguments
from hydraflow.compose.engine_arguments import argument_names, check_names
from hydraflow.options import walk
from hydraflow.schema import PPOConfig

VLLM_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"
MEGATRON_KEY = "critic.megatron.override_transformer_config"
DDP_KEY = "actor_rollout_ref.actor.megatron.override_ddp_config"


def configured(values):
    """A configuration with these open mappings."""
    config = PPOConfig()
    config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.name = "gae", "vllm"
    config.actor_rollout_ref.actor.strategy = config.critic.strategy = "megatron"
    for key, value in values.items():
        section = config
        *path, name = key.split(".")
        for part in path:
            section = getattr(section, part)
        setattr(section, name, value)
    return config


def names_of(key):
    [source] = [leaf.option.passes_to for leaf in walk(PPOConfig()) if leaf.key == key]
    return argument_names(source)


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Packages that fail when they are imported."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    model: str = 'm'\n    swap_space: float = 4\n    def method(self): ...\nclass"
        " AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\nclass Other:\n    strange: int"
        " = 0\n"
    )
    core = tmp_path / "megatron" / "core"
    (core / "transformer").mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (core / "model_parallel_config.py").write_text(
        "class ModelParallelConfig:\n    sequence_parallel: bool = False\n"
    )
    (core / "transformer" / "transformer_config.py").write_text(
        "class TransformerConfig:\n    recompute_granularity: str | None = None\n"
    )
    (core / "distributed").mkdir()
    (core / "distributed" / "distributed_data_parallel_config.py").write_text(
        "class DistributedDataParallelConfig:\n    bucket_size: int | None = None\n"
    )
    for name in ("vllm", "megatron"):  # another test may have imported the real one
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine_arguments.argument_names.cache_clear()
    yield
    engine_arguments.argument_names.cache_clear()


def test_names_are_read_without_importing(libraries):
    assert names_of(VLLM_KEY) == {"model", "swap_space", "enable_log_requests"}
    assert names_of(MEGATRON_KEY) == {"sequence_parallel", "recompute_granularity"}
    assert "vllm" not in sys.modules and "megatron" not in sys.modules


def test_a_name_that_the_library_does_not_have_is_refused_with_the_nearest(libraries):
    mistaken = {VLLM_KEY: {"swap_spaces": 8, "model": "x"}, MEGATRON_KEY: {"recompute_granularty": "full"}}
    problems, notes = check_names(configured(mistaken | {DDP_KEY: {"bucketsize": 8}}))
    assert notes == []
    assert [str(problem) for problem in problems] == [
        f"{DDP_KEY}.bucketsize=8: Megatron-Core has no such argument\n      -> {DDP_KEY}.bucket_size=8",
        f"{VLLM_KEY}.swap_spaces=8: vLLM has no such argument\n      -> {VLLM_KEY}.swap_space=8",
        (
            f"{MEGATRON_KEY}.recompute_granularty=full: Megatron-Core has no such argument\n      ->"
            f" {MEGATRON_KEY}.recompute_granularity=full"
        ),
    ]


def test_names_without_an_effect_are_left_to_their_note(libraries):
    config = configured(
        {VLLM_KEY: {"swap_spaces": 8}, DDP_KEY.replace("actor.m", "ref.m"): {"bucketsize": 8}}
    )
    config.actor_rollout_ref.rollout.name = "native"
    assert check_names(config) == ([], [])


def test_without_the_library_a_note_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    engine_arguments.argument_names.cache_clear()
    problems, notes = check_names(configured({VLLM_KEY: {"anything": 1}, MEGATRON_KEY: {}}))
    engine_arguments.argument_names.cache_clear()
    assert (problems, notes) == ([], [f"{VLLM_KEY}: anything not checked, vLLM is not installed here"])
