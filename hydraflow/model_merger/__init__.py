"""Sharded checkpoints to Hugging Face directories and back: `python -m hydraflow.model_merger
merge|test|info|split`.

As a library: `hydraflow.model_merger.load_state_dict(CHECKPOINT)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load_state_dict(
    checkpoint: str | Path,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    hf_model_path: str | None = None,
) -> dict[str, torch.Tensor]:
    """Weights on the CPU by the names of transformers' modules, adapters merged, tied tensors under each of
    their names. Nothing is written.

    `checkpoint`: a model's directory, a step's or a run's. `dtype`: auto (as saved), fp32, bf16 or fp16.
    `hf_model_path`: the Hugging Face directory of the model that was trained, for a checkpoint without
    `huggingface/`. Raises ConfigError when the checkpoint is broken, or does not hold the model that its
    config.json describes.

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{checkpoint}/huggingface"))
        model.load_state_dict(hydraflow.model_merger.load_state_dict(checkpoint))
    """
    from hydraflow.engine.stored.pieces import whole
    from hydraflow.errors import ConfigError
    from hydraflow.model_merger.opening import open_checkpoint
    from hydraflow.model_merger.outputs import DTYPES, MergeOptions, cast, outputs_of

    if dtype not in ("auto", *DTYPES):
        raise ConfigError.one("dtype", dtype, f"is none of auto, {', '.join(DTYPES)}")
    options = MergeOptions(dtype=dtype, trust_remote_code=trust_remote_code)
    outputs = outputs_of(open_checkpoint(checkpoint, settings=hf_model_path), options)
    state = {}
    for name, source in outputs.sources.items():
        state[name] = cast(whole(source), outputs.dtype_of(name), name)
    for name, same in outputs.architecture.tied.items():
        state[name] = state[same]
    return state
