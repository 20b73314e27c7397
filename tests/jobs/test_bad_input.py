"""Mistakes of a user, each as the command line shows it: one clear message, exit code 2, nothing started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from jobs.command import assert_refused, hydraflow
from transformers import CanineTokenizer, GPT2Config, GPT2LMHeadModel

from hydraflow.models.tiny import make_model

ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "002"},
    "extra_info": {"index": 0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", hidden=32, layers=1, heads=2, kv_heads=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return _parquet(tmp_path / "data.parquet", [ROW] * 8)


def _parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def ppo(tmp_path: Path, model: Path | str, data: Path | str, *more: str):
    """main_ppo with these files, in an otherwise valid small configuration."""
    small = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "algorithm.adv_estimator=grpo",
    ]
    files = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}"]
    done = hydraflow("main_ppo", *files, *small, *more, cwd=tmp_path)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/metrics.jsonl")), (
        "nothing was started"
    )
    return done


def test_a_missing_data_file(tmp_path: Path, model: Path) -> None:
    assert_refused(ppo(tmp_path, model, "nowhere.parquet"), "data.train_files", "nowhere.parquet")


def test_an_unreadable_data_file(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("this is no parquet")
    assert_refused(ppo(tmp_path, model, broken), "broken.parquet")


def test_a_row_without_a_needed_column(tmp_path: Path, model: Path) -> None:
    lines = [ROW, {name: value for name, value in ROW.items() if name != "reward_model"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    assert_refused(ppo(tmp_path, model, path), "rows.jsonl", "row 1", "reward_model")


def test_empty_data(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert_refused(ppo(tmp_path, model, path), "empty.jsonl")


def test_a_model_path_that_is_not_there(tmp_path: Path, data: Path) -> None:
    assert_refused(ppo(tmp_path, tmp_path / "nothing", data), "actor_rollout_ref.model.path", "nothing")


def test_a_model_path_without_a_config(tmp_path: Path, model: Path, data: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").unlink()
    assert_refused(ppo(tmp_path, copy, data), "actor_rollout_ref.model.path", "config.json")


def test_a_model_path_without_a_tokenizer(tmp_path: Path, model: Path, data: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    for file in copy.glob("token*"):
        file.unlink()
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    assert_refused(ppo(tmp_path, copy, data), "actor_rollout_ref.model", "tokenizer")


def test_a_tokenizer_without_a_chat_template(tmp_path: Path, model: Path, data: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    assert_refused(ppo(tmp_path, copy, data), "chat template", "custom_chat_template")


def test_stop_strings_for_a_tokenizer_that_cannot_find_them(tmp_path: Path, model: Path, data: Path) -> None:
    CanineTokenizer().save_pretrained(tmp_path / "canine")
    (tmp_path / "canine" / "vocab.txt").write_text("")
    rollout = "actor_rollout_ref.rollout"
    given = [f"actor_rollout_ref.model.tokenizer_path={tmp_path}/canine", f"{rollout}.val_kwargs.stop=a"]
    given.append("actor_rollout_ref.model.custom_chat_template='{{messages[0].content}}'")
    assert_refused(ppo(tmp_path, model, data, *given), f"{rollout}.stop=[a]: needs a tokenizer of the")


def test_an_unknown_key_names_the_nearest(tmp_path: Path, model: Path, data: Path) -> None:
    done = ppo(tmp_path, model, data, "actor_rollout_ref.actor.ppo_minibatch_size=4")
    assert_refused(done, "ppo_minibatch_size", "ppo_mini_batch_size")


def test_wrong_types_are_reported_together(tmp_path: Path, model: Path, data: Path) -> None:
    done = ppo(tmp_path, model, data, "trainer.seed=abc", "actor_rollout_ref.rollout.temperature=warm")
    assert_refused(done, "trainer.seed", "actor_rollout_ref.rollout.temperature", "2 problems")


def test_gpus_that_the_machine_does_not_have(tmp_path: Path, model: Path, data: Path) -> None:
    import torch

    if torch.cuda.is_available():
        done = ppo(tmp_path, model, data, f"trainer.n_gpus_per_node={torch.cuda.device_count() + 1}")
        assert_refused(done, "trainer.n_gpus_per_node")
    else:
        assert_refused(ppo(tmp_path, model, data, "trainer.device=cuda"), "trainer.device", "cpu")


def test_more_nodes_than_there_are(tmp_path: Path, model: Path, data: Path) -> None:
    assert_refused(
        ppo(tmp_path, model, data, "trainer.nnodes=2"),
        "before anything was started",
        "ray_init.address=local",
        "needs 2 nodes",
    )
    assert not (tmp_path / "runs").exists()


def test_a_reward_file_that_does_not_import(tmp_path: Path, model: Path, data: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_module_anywhere\n")
    done = ppo(tmp_path, model, data, f"reward.custom_reward_function.path={reward}")
    assert_refused(done, "reward.custom_reward_function.path", "no_such_module_anywhere")


def test_a_reward_function_with_another_signature(tmp_path: Path, model: Path, data: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(text):\n    return 1.0\n")
    done = ppo(tmp_path, model, data, f"reward.custom_reward_function.path={reward}")
    assert_refused(done, "compute_score", "solution_str")


def test_a_data_source_without_a_reward_function(tmp_path: Path, model: Path) -> None:
    data = _parquet(tmp_path / "other.parquet", [{**ROW, "data_source": "my/own"}] * 8)
    assert_refused(ppo(tmp_path, model, data), "my/own")


def test_an_output_directory_that_cannot_be_written(tmp_path: Path, model: Path, data: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ppo(tmp_path, model, data, f"trainer.default_local_dir={tmp_path}/file/out")
    assert_refused(done, "trainer.default_local_dir")


@pytest.mark.parametrize("size", [3, 0])
def test_a_shard_size_that_does_not_divide_the_devices(
    tmp_path: Path, model: Path, data: Path, size: int
) -> None:
    given = [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=4",
        f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size}",
    ]
    rule = f"fsdp_size={size}: must be -1 or divide the 4 devices of the actor"
    assert_refused(
        ppo(tmp_path, model, data, *given), rule, "-> actor_rollout_ref.actor.fsdp_config.fsdp_size="
    )


def test_heads_that_devices_cannot_share(tmp_path: Path, model: Path, data: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    done = ppo(tmp_path, model, data, "trainer.device=cpu", "trainer.n_gpus_per_node=4", f"{key}=4")
    assert_refused(done, f"{key}=4: must divide the 2 attention heads of the model: 1 or 2", f"-> {key}=2")


@pytest.mark.parametrize("job", ["main_ppo", "main_sft"])
def test_products_that_cannot_be_rounded(tmp_path: Path, model: Path, data: Path, job: str) -> None:
    """GPT-2's layers are not linear layers."""
    gpt2 = shutil.copytree(model, tmp_path / "gpt2")
    for weights in gpt2.glob("*.safetensors"):
        weights.unlink()
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=17, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    if job == "main_ppo":
        key = "actor_rollout_ref.actor.fsdp_config.dtype"
        done = ppo(tmp_path, gpt2, data, f"{key}=bf32")
    else:
        key, chats = "fsdp_config.dtype", tmp_path / "chats.jsonl"
        chats.write_text(json.dumps({"messages": [*ROW["prompt"], {"role": "assistant", "content": "2"}]}))
        given = [f"model.path={gpt2}", f"data.train_files={chats}", "data.train_batch_size=1"]
        done = hydraflow(job, *given, "trainer.n_gpus_per_node=1", f"{key}=bf32", cwd=tmp_path)
    assert_refused(done, f"{key}=bf32: rounds products", "GPT2LMHeadModel has none", f"-> {key}=bf16")
    assert not list(tmp_path.glob("runs/*/metrics.jsonl")) and "before anything was started" in done.stderr


def test_batch_sizes_that_do_not_fit(tmp_path: Path, model: Path, data: Path) -> None:
    done = ppo(tmp_path, model, data, "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    assert_refused(done, "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size")
