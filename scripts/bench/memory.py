"""Measures the peak memory of real worker processes on this CPU, phase by phase, beside the estimates.

    python scripts/bench/memory.py [--cases tied,untied,stored] [--keep-freed]

For each case a model with random weights is written, and two processes with a run's actor and rollout workers
go through the phases of a step, with all rows at maximum length. A phase's measurement is its peak resident
set (VmHWM, reset before it) minus what the process held after its imports and a pass with a tiny model.
Prints one JSON object per case.

glibc keeps freed memory, up to as much again as is in use. The processes therefore return blocks of 256 KiB
and more to the system at once, so that the resident set is the memory in use; `--keep-freed` measures them
with glibc's default.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydraflow.batch_plan.resolve import BatchPlan, resolve_plan
from hydraflow.memory.estimate import estimate
from hydraflow.memory.limits import limits_of
from hydraflow.memory.shape import read_shape
from hydraflow.schema import PPOConfig

RANKS = 2
TOLERANCE = 0.2
"""Maximum relative error of an estimate; checked by tests/memory/test_measured.py."""
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
PRELOADED = [
    "__main__",  # this program
    "hydraflow.workers.actor",
    "hydraflow.workers.rollout",
    "hydraflow.engine.megatron.engine",
    "transformers.models.qwen3.modeling_qwen3",
]
if __name__ == "__mp_main__":
    gc.disable()  # in the process that imports the libraries, from which all others are forked

_M_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt: blocks of this size and more go back to the system when freed."""


@dataclass(frozen=True)
class Case:
    """A model and the sizes of a run with it."""

    architecture: str
    sizes: Mapping[str, Any]
    prompt: int
    response: int
    rows: int
    """Trajectories of one rank in a step; two of them share a prompt."""
    micro: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings, by dotted key."""


# 15 M parameters; no activation checkpointing, head in chunks: memory is mostly activations and logits
STORED = Case(
    "qwen2",
    dict(vocab_size=10000, hidden_size=384, intermediate_size=1152, num_hidden_layers=4)
    | dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False),
    prompt=184, response=8, rows=4, micro=4,
    settings={
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.fsdp_config.head_chunk_tokens": 128,
    },
)  # fmt: skip
# 15 M parameters, tied embeddings, each layer an FSDP unit; two micro-batches, so gradients are accumulated
# unsharded
TIED = Case(
    "qwen3",
    dict(vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True),
    prompt=88, response=8, rows=4, micro=2,
    settings={"actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": 0},
)  # fmt: skip
MEGATRON = {
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.actor.megatron.dtype": "fp32",
}
CASES = {
    "tied": TIED,
    # 22 M parameters, three quarters of them in the embedding and the output matrix; one micro-batch
    "untied": Case(
        "llama",
        dict(vocab_size=16000, hidden_size=512, intermediate_size=1408, num_hidden_layers=2)
        | dict(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False),
        prompt=32, response=8, rows=4, micro=4,
    ),
    "stored": STORED,
    # STORED with Ulysses: the two processes share the tokens of each row
    "shared": replace(
        STORED,
        micro=8,
        settings={
            **STORED.settings,
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": RANKS,
        },
    ),
    # Megatron-Core: tensor parallel, pipeline parallel, or a distributed optimizer over the two processes
    "matrices": replace(
        STORED,
        settings={
            **MEGATRON,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": RANKS,
            "actor_rollout_ref.actor.megatron.head_chunk_tokens": 128,
        },
    ),
    "stages": replace(
        TIED,
        settings={**MEGATRON, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": RANKS},
    ),
    "state": replace(TIED, settings=MEGATRON),
}  # fmt: skip


def configure(case: Case, model: str) -> PPOConfig:
    """The run's configuration: GRPO with two responses per prompt, in float32."""
    config = PPOConfig()
    policy, data = config.actor_rollout_ref, config.data
    config.algorithm.adv_estimator = "grpo"
    config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.device = 1, RANKS, "cpu"
    data.max_prompt_length, data.max_response_length = case.prompt, case.response
    data.train_batch_size = policy.actor.ppo_mini_batch_size = case.rows * RANKS // 2
    policy.model.path, policy.rollout.n = model, 2
    policy.rollout.ignore_eos, policy.rollout.dtype = True, "fp32"
    policy.actor.ppo_micro_batch_size_per_gpu = policy.rollout.log_prob_micro_batch_size_per_gpu = case.micro
    policy.actor.fsdp_config.dtype = "fp32"
    for key, value in case.settings.items():
        section: Any = config
        *path, last = key.split(".")
        for name in path:
            section = getattr(section, name)
        setattr(section, last, value)
    return config


def estimated(config: PPOConfig, plan: BatchPlan) -> dict[str, int]:
    """Estimated bytes of each phase, per process."""
    shape = read_shape(config.actor_rollout_ref.model)
    assert shape is not None, "the model was just written"
    (group,) = estimate(plan, config, shape, limits=limits_of(config)).groups
    return dict(group.phases)


# --- in the worker processes --------------------------------------------------


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


def settle() -> None:
    """Returns freed memory to the system, and resets VmHWM."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_of(work: Callable[[], Any]) -> int:
    """The peak resident set while `work` runs, in bytes."""
    settle()
    work()
    return status("VmHWM")


class Rank:
    """The actor and rollout workers of one process, and their inputs."""

    def __init__(self, rank: int, port: int, config: PPOConfig, plan: BatchPlan):
        from hydraflow.dispatch.worker import ProcessContext
        from hydraflow.workers.actor import ActorSpec, ActorWorker
        from hydraflow.workers.rollout import RolloutSpec, RolloutWorker

        policy, response = config.actor_rollout_ref, config.data.max_response_length
        actor = ActorSpec(
            model=policy.model,
            actor=policy.actor,
            plan=plan.actor,
            log_prob=plan.old_log_prob,
            ref=None,
            temperature=1.0,
            response_tokens=response,
            total_steps=1,
            seed=1,
        )
        context = ProcessContext(rank, RANKS, rank, "here", "127.0.0.1", "127.0.0.1", port, "cpu", 120.0)
        self.config, self.plan = config, plan
        self.actor = context.roles["actor"] = ActorWorker(context, actor)
        self.rollout = RolloutWorker(
            context,
            RolloutSpec(
                policy.model,
                policy.rollout,
                max_prompt=config.data.max_prompt_length,
                max_tokens=response,
                seed=1,
            ),
        )

    def sync(self) -> None:
        self.rollout.sync_from_actor(1)

    def sample(self) -> Any:
        """Samples a step's trajectories, from prompts of maximum length."""
        import numpy as np
        import torch

        from hydraflow.protocol import ragged
        from hydraflow.protocol.batch import DataProto
        from hydraflow.workers.rollout import SamplingSpec

        count = self.plan.trajectories_per_step // RANKS // 2
        prompts = torch.randint(2, 60, (count, self.config.data.max_prompt_length))
        batch = DataProto.from_dict(
            {"prompts": ragged.from_rows(list(prompts))}, {"uid": np.arange(count).astype(str).astype(object)}
        )
        batch.meta_info |= {"sampling": SamplingSpec(2, 1.0, -1, 1.0), "visit": 1, "version": 1}
        return self.rollout.generate(batch)

    def make_optimizer_state(self) -> None:
        """Runs an update on minimal rows."""
        self.actor.update(self.rows(1, 1), step=1)

    def rows(self, prompt: int, response: int) -> Any:
        """The rank's rows of a step, all of these lengths; the same on ranks that share rows."""
        import torch

        from hydraflow.protocol import ragged
        from hydraflow.protocol.batch import DataProto

        count = self.plan.actor.rows_per_rank
        draw = torch.Generator().manual_seed(self.actor.engine.coordinates().data_rank)
        prompts = torch.randint(2, 60, (count // 2, prompt), generator=draw).repeat_interleave(2, 0)
        lengths = torch.full((count,), response)
        values = torch.zeros(count * response)
        columns = {
            "responses": torch.randint(2, 60, (count * response,), generator=draw),
            "response_mask": values.long() + 1,
            "old_log_probs": values,
            "advantages": values + 1,
        }
        return DataProto.from_dict(
            {"prompts": ragged.from_rows(list(prompts))}
            | {name: ragged.from_parts(column, lengths) for name, column in columns.items()}
        )

    def step(self) -> dict[str, int]:
        """The peak of each phase, in the order of a step."""
        peaks = {"sync": peak_of(self.sync), "sample": peak_of(self.sample)}
        rows = self.rows(self.config.data.max_prompt_length, self.config.data.max_response_length)
        inputs = rows.select(["prompts", "responses", "response_mask"])
        peaks["log_probs"] = peak_of(lambda: self.actor.compute_log_prob(inputs))
        peaks["update"] = peak_of(lambda: self.actor.update(rows, step=1))
        return peaks


def rank_main(
    rank: int, port: int, jobs: list[tuple[PPOConfig, BatchPlan]], keep_freed: bool, pipe: Connection
) -> None:
    """Runs a tiny model, which triggers all lazy imports, and then the model to measure."""
    import torch

    from hydraflow.engine import process_group

    gc.freeze()  # what was imported is never garbage, and looking for it takes longer than the phases
    gc.enable()
    torch.set_num_threads(1)
    if not keep_freed:
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 256 * 1024)
    tiny, real = jobs
    Rank(rank, port, *tiny).step()
    settle()
    baseline = status("VmRSS")
    run = Rank(rank, port, *real)
    run.make_optimizer_state()
    run.sync()  # the rollout's weights take up memory only once they are written
    pipe.send({"baseline": baseline, **{phase: peak - baseline for phase, peak in run.step().items()}})
    process_group.stop()


# --- in the parent process --------------------------------------------------


def write_model(architecture: str, sizes: Mapping[str, Any], folder: Path) -> None:
    """Writes a model with random weights; runs in a process of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(case: Case, folder: Path, *, keep_freed: bool = False) -> dict[str, Any]:
    """Estimates, measurements (maxima over the processes) and their ratios."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    tiny = Case("qwen3", TINY, prompt=8, response=8, rows=4, micro=2, settings=case.settings)
    jobs = []
    for name, one in (("tiny", tiny), ("model", case)):
        if not (folder / name).exists():
            writer = context.Process(target=write_model, args=(one.architecture, one.sizes, folder / name))
            writer.start()
            writer.join()
        config = configure(one, str(folder / name))
        jobs.append((config, resolve_plan(config, prompts=None)))
    peaks = run_ranks(jobs, keep_freed)
    found = {phase: max(peak[phase] for peak in peaks) for phase in peaks[0]}
    baseline, expected = found.pop("baseline"), estimated(*jobs[1])
    phases = {
        phase: {"estimate": expected[phase], "measured": peak, "ratio": round(expected[phase] / peak, 3)}
        for phase, peak in found.items()
    }
    return {"baseline": baseline, "phases": phases}


def run_ranks(jobs: list[tuple[PPOConfig, BatchPlan]], keep_freed: bool) -> list[dict[str, int]]:
    """The measurements of each rank. RuntimeError if one ends without a result."""
    import socket

    context = get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        context.Process(target=rank_main, args=(rank, port, jobs, keep_freed, pipes[rank][1]))
        for rank in range(RANKS)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        return [mine.recv() for mine, _ in pipes]
    except EOFError as error:
        raise RuntimeError("a rank ended without a result; its messages are above") from error
    finally:
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names")
    parser.add_argument("--keep-freed", action="store_true", help="leave glibc's allocator as it is")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in args.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(
                json.dumps({"case": name, **measure(CASES[name], Path(folder), keep_freed=args.keep_freed)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
