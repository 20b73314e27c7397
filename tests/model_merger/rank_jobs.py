"""What ranks do in the tests of the merger; in a file of its own so that spawned processes can import it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine.rank_jobs import make_engine, step_once
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedStateDictConfig, ShardingStrategy, StateDictType, fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

SAVED: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {},
    "bf16": {"fsdp": {"model_dtype": "bf16"}},
    "value": {"head": "value"},
}
"""Models that the engine saves without a step, and its options."""
TRAINED = {
    "model": {"lora_rank": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    "optim": {"lr": 0.1},
}
"""Options for adapters."""
COPIES = {"fsdp": {"fsdp_size": 2}}
"""Options for hybrid sharding."""
SAVED_AS_VERL: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("tied", {}),
    "fsdp2_bf16": ("bf16", {"dtype": "bfloat16"}),
    "fsdp2_ddp": ("untied", {"fsdp_size": 2}),
    "fsdp1": ("tied", {"version": 1}),
    "fsdp1_bf16": ("untied", {"version": 1, "dtype": "bfloat16"}),
    "fsdp1_ddp": ("untied", {"version": 1, "fsdp_size": 2}),
    "value": ("value_bias", {}),
    "lora": ("tied", {"lora": True}),
}
"""Case -> model and options of `save_as_verl`, on four ranks."""


def save(
    path: str,
    options: Mapping[str, Any],
    directory: str,
    *,
    steps: int = 0,
    contents: list[str] | None = None,
) -> None:
    """A checkpoint as training saves it, after that many steps; and beside it what the engine itself
    exports."""
    engine = make_engine(path, options)
    for step in range(steps):
        step_once(engine, step)
    engine.snapshot(contents or ["model", "optimizer", "extra"]).write(Path(directory) / "actor")
    engine.save_hf(Path(directory) / "exported")


def save_many(cases: list[tuple[str, Mapping[str, Any], str]]) -> None:
    """Several checkpoints without a step."""
    for path, options, directory in cases:
        save(path, options, directory)


def save_as_verl(
    path: str,
    directory: str,
    *,
    version: int = 2,
    fsdp_size: int = -1,
    dtype: str = "float32",
    lora: bool = False,
) -> None:
    """A checkpoint with the files that verl's FSDP checkpoint manager writes, from real FSDP ranks."""
    ranks, rank, folder = dist.get_world_size(), dist.get_rank(), Path(directory)
    value = (
        "ForTokenClassification" in json.loads((Path(path) / "config.json").read_text())["architectures"][0]
    )
    auto = AutoModelForTokenClassification if value else AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=getattr(torch, dtype))
    if lora:
        model = _with_adapters(model)
    config = model.config
    if fsdp_size in (-1, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    else:
        mesh = init_device_mesh("cpu", (ranks // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))
    state = _fsdp1_state(model, mesh) if version == 1 else _fsdp2_state(model, mesh)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": version, "world_size": ranks}, indent=4)
        )
        config.save_pretrained(folder / "huggingface")
        AutoTokenizer.from_pretrained(path).save_pretrained(folder / "huggingface")
        if not value:
            GenerationConfig.from_pretrained(path).save_pretrained(folder / "huggingface")
        if lora:
            (folder / "lora_train_meta.json").write_text(
                json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"})
            )
    dist.barrier()


def save_many_as_verl(cases: list[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Several checkpoints in verl's layout."""
    for path, directory, options in cases:
        save_as_verl(path, directory, **options)


def save_plain(path: str, directory: str) -> None:
    """World size 1 where verl does not shard the model: plain tensors, of which two are the same."""
    model, folder = AutoModelForCausalLM.from_pretrained(path), Path(directory)
    (folder / "huggingface").mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    model.config.save_pretrained(folder / "huggingface")


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _fsdp2_state(model: Any, mesh: Any) -> Mapping[str, torch.Tensor]:
    layers = next(part for name, part in model.named_modules() if name.endswith("model.layers"))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def _fsdp1_state(model: Any, mesh: Any) -> Mapping[str, torch.Tensor]:
    strategy = ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    sharded = FSDP1(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        use_orig_params=True,
    )
    with FSDP1.state_dict_type(
        sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    ):
        return sharded.state_dict()
