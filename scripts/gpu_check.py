"""Checks what one GPU computes and measures its speed; run by scripts/gpu_check.sh, within 8 minutes.

    python scripts/gpu_check.py [--device cuda] [--size large]

Needs torch, transformers, tensordict, hydra-core, ray and codetiming, and names the missing ones. Checks:

- attention over packed rows and the fused head, with and without kernels, against float64; the head's seconds
  and bytes beside those of plain operations
- log-probabilities, gradients and greedy samples of a tiny model against the CPU's
- that a second backward pass gives the same bits
- weights read by another process (CUDA IPC), with bytes per second, and broadcast in a group of one (NCCL)
- if Megatron-Core is installed, its log-probabilities and weights after a step against FSDP2's, for a dense
  model and a mixture of experts, also with its state offloaded to host memory; in bf16, Transformer Engine's
  linear layers against Megatron-Core's own

Measurements of a model with random weights (large: 0.5 billion, bf16): a training step, packed rows against
padded ones, generation, weight transfer to the generation engine. Prints one JSON object per check. Exit code
1: a number is wrong; 2: the check cannot run here; 124: it took more than 8 minutes. `--device cpu --size
small` tests the check itself; its times mean nothing. Results: docs/gpu.md.

gpu_ranks.py checks ranks that divide a model. Neither covers: bidirectional sends of the interleaved
schedule; Transformer Engine's layers on several ranks; sums of expert load over ranks (moe_aux_loss_coeff,
moe_router_bias_update_rate); optimizers of Transformer Engine and Apex, which count updates per group;
moe_permute_fusion and the fusions that override_transformer_config enables; recovery from out-of-memory
errors. All but the kernels and those optimizers are tested on CPUs with gloo (tests/engine/test_*.py;
docs/megatron.md has a table).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hydraflow.engine.fsdp.engine import FSDPEngine
    from hydraflow.protocol.batch import DataProto

NEEDED = ("torch", "transformers", "tensordict", "hydra-core", "ray", "codetiming")
OPTIONAL = ("flash-attn", "vllm", "peft", "megatron-core", "transformer-engine")
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""The sizes of Qwen2.5-0.5B."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: Mapping[str, Mapping[str, int]] = {"small": SMALL, "large": LARGE}
SENT = {"small": 2**20, "large": 2**30}
"""Bytes that are sent to measure the link between processes."""
WORK = {"small": (8, 8, 16, 3), "large": (64, 128, 512, 5)}
"""Rows, tokens per prompt, maximum tokens per response, repetitions."""


def say(check: str, **facts: object) -> None:
    """Prints one check's JSON object."""
    print(json.dumps({"check": check, **facts}), flush=True)


def installed() -> dict[str, str]:
    """Versions of the libraries, or "missing"."""
    found = {}
    for name in NEEDED + OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def least_versions() -> dict[str, str]:
    """The lowest versions of the needed libraries, by setup.py."""
    text = (Path(__file__).parents[1] / "setup.py").read_text()
    found = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', text))
    return {name: found[name] for name in NEEDED}


def write_model(sizes: Mapping[str, int], folder: Path, dtype: torch.dtype, kind: str = "qwen3") -> str:
    """Writes a model with random weights; returns its path."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return str(folder)


def rows(vocabulary: int, count: int, prompt: int, longest: int) -> DataProto:
    """Two rows per prompt; responses of all lengths up to `longest`."""
    import torch

    from hydraflow.protocol import ragged
    from hydraflow.protocol.batch import DataProto

    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, (length,), generator=draw)

    prompts = [ids(prompt) for _ in range(count // 2)]
    responses = ragged.from_rows([ids(1 + i * (longest - 1) // (count - 1)) for i in range(count)])
    lengths = ragged.lengths(responses)
    mask = ragged.from_parts(torch.ones(int(lengths.sum()), dtype=torch.int64), lengths)
    columns = {
        "prompts": ragged.from_rows([one for one in prompts for _ in range(2)]),
        "responses": responses,
    }
    return DataProto.from_dict(columns | {"response_mask": mask})


def engine_of(
    path: str, device: torch.device, dtype: str, *, packed: bool = True, optim: Any = None
) -> FSDPEngine:
    """A single-rank training engine."""
    from hydraflow.engine.config import FSDPConfig, OptimConfig
    from hydraflow.engine.fsdp.engine import FSDPEngine
    from hydraflow.models.config import ModelConfig

    model = ModelConfig(path=path, enable_gradient_checkpointing=False, use_remove_padding=packed)
    how = FSDPConfig(dtype=dtype, model_dtype="fp32")
    return FSDPEngine(model, how, optim or OptimConfig(lr=1e-6), head="policy", device=device)


def loss(output: Any, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The summed log-probability."""
    return -(output.log_probs * columns["response_mask"]).sum(), {}


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of one rank."""
    import torch.distributed as dist

    from hydraflow.device import collective_backend

    dist.init_process_group(collective_backend(device.type), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers(device: torch.device) -> bool:
    """Whether a tiny model gives the same numbers as on the CPU, in float32."""
    import torch

    from hydraflow.generation.base import GenerationRequest, SamplingParams
    from hydraflow.protocol import ragged

    batch, found = rows(SMALL["vocab_size"], 8, 8, 16), []
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(SMALL, Path(folder), torch.float32)
        for where in (torch.device("cpu"), device):
            engine = engine_of(path, where, "fp32")
            log_probs = engine.forward([batch]).get("log_probs").values()
            engine.forward_backward([batch], loss)
            gradients: list[Any] = [p.grad for p in engine.module.parameters()]
            gradient = torch.cat([one.to_local().flatten().cpu() for one in gradients])
            native = sampler(engine, where, torch.float32)
            request = GenerationRequest(ragged.rows(batch.get("prompts")), [1] * 8, [(i,) for i in range(8)])
            sampled = native.generate(request, SamplingParams(max_tokens=16, temperature=0)).responses
            found.append((log_probs, gradient, sampled.values()))
    (wanted, of_cpu, tokens), (log_probs, gradient, sampled) = found
    off = float((log_probs - wanted).abs().max())
    far = float((gradient - of_cpu).norm() / of_cpu.norm())
    same = tokens.shape == sampled.shape and float((tokens == sampled.cpu()).float().mean())
    good = off < 1e-3 and far < 1e-3 and same > 0.9
    say("numbers", log_probs=off, gradient=far, same_tokens=same, right=good)
    return good


def repeated(device: torch.device, size: str) -> bool:
    """Whether two backward passes over the same rows give bit-identical gradients, in bf16."""
    import torch

    sizes, (count, prompt, longest, _) = MODELS[size], WORK[size]
    batch, found = rows(sizes["vocab_size"], count, prompt, longest), []
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(write_model(sizes, Path(folder), torch.bfloat16), device, "bf16")
    for _ in range(2):
        engine.forward_backward([batch], loss)
        gradients: list[Any] = [p.grad for p in engine.module.parameters()]
        found.append([one.to_local() for one in gradients])
        engine.module.zero_grad(set_to_none=True)
    differ = sum(not torch.equal(one, other) for one, other in zip(*found, strict=True))
    say("repeated", tensors=len(found[0]), differ=differ, right=differ == 0)
    return differ == 0


def megatron(device: torch.device, kind: str, sizes: Mapping[str, int]) -> bool:
    """Whether Megatron-Core's log-probabilities, and its weights after a step, are FSDP2's, in float32; also
    with everything offloaded to host memory after each call, which must free the device's memory."""
    import torch

    from hydraflow.engine.config import TRAIN_ENGINES, MegatronConfig, OptimConfig
    from hydraflow.models.config import ModelConfig

    batch, found, freed = rows(SMALL["vocab_size"], 8, 8, 16), [], 0
    # with a large epsilon, Adam's first step depends on the gradient's size, not only on its sign
    optim, settings = OptimConfig(lr=1e-2, eps=1e-1), MegatronConfig(dtype="fp32")
    offloaded = replace(settings, param_offload=True, grad_offload=True, optimizer_offload=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(sizes, Path(folder), torch.float32, kind)
        core = TRAIN_ENGINES["megatron"].load()
        for engine in (
            engine_of(path, device, "fp32", optim=optim),
            *(
                core(ModelConfig(path=path), one, optim, head="policy", device=device)
                for one in (settings, offloaded)
            ),
        ):
            log_probs = engine.forward([batch]).get("log_probs").values()
            engine.rest()
            engine.forward_backward([batch], loss)
            engine.optimizer_step()
            held = allocated(device)
            engine.rest()
            freed = held - allocated(device)
            weights = {name: tensor.flatten().cpu() for name, tensor in engine.weights()}
            found.append((log_probs, torch.cat([weights[name] for name in sorted(weights)])))
    (wanted, trained), *others = found
    off = float(torch.stack([(log_probs - wanted).abs().max() for log_probs, _ in others]).max())
    far = float(torch.stack([(weights - trained).abs().max() for _, weights in others]).max())
    least = 0 if device.type == "cpu" else 8 * len(trained)  # weights and gradients
    good = off < 1e-3 and far < 1e-4 and freed >= least
    say("megatron", model=kind, log_probs=off, weights=far, freed=freed, right=good)
    return good


def matrices(device: torch.device) -> bool:
    """Whether Transformer Engine's linear layers give Megatron-Core the same numbers as its own, in bf16."""
    import torch

    from hydraflow.engine.config import TRAIN_ENGINES, MegatronConfig, OptimConfig
    from hydraflow.models.config import ModelConfig

    batch, found = rows(SMALL["vocab_size"], 8, 8, 16), {}
    core, optim = TRAIN_ENGINES["megatron"].load(), OptimConfig(lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(path=write_model(SMALL, Path(folder), torch.bfloat16))
        for kind in ("local", "transformer_engine"):
            settings = MegatronConfig(dtype="bf16", override_transformer_config={"transformer_impl": kind})
            engine = core(model, settings, optim, head="policy", device=device)
            weights = {name: tensor.clone() for name, tensor in engine.weights()}
            log_probs = engine.forward([batch]).get("log_probs").values()
            engine.forward_backward([batch], loss)
            found[kind] = (log_probs, engine.optimizer_step()["grad_norm"], weights)
    (wanted, norm, loaded), (log_probs, other, others) = found.values()
    off, far = float((log_probs - wanted).abs().max()), abs(other / norm - 1)
    same = loaded.keys() == others.keys() and all(torch.equal(loaded[name], others[name]) for name in loaded)
    good = off < 0.05 and far < 0.02 and same
    say("matrices", log_probs=off, gradient=far, right=good)
    return good


def read_elsewhere(sent: Any) -> list[int]:
    """Checksums of the weights in a bucket of another process; runs in a child process."""
    from hydraflow.weights.buckets import checksum_of
    from hydraflow.weights.slots import OpenSlots

    weights: Any = OpenSlots().read(sent).weights()
    return [checksum_of(one) for _, one in weights]


def copied_elsewhere(sent: Any) -> float:
    """Seconds in which another process copies a bucket of this one; runs in a child process."""
    from hydraflow.weights.slots import OpenSlots

    weights: list[Any] = [one for _, one in OpenSlots().read(sent).weights()]
    return seconds(weights[0].device, lambda: [one.clone() for one in weights], 3)


def links(device: torch.device, size: str) -> bool:
    """Whether another process reads weights from the device's memory bit by bit (CUDA IPC), also from a
    reused slot; and whether a group, here of one process, broadcasts from it (NCCL). Bytes per second of
    filling a slot and copying it elsewhere; a broadcast to nobody sends none."""
    import torch

    from hydraflow.engine.broadcast_group import BroadcastGroup
    from hydraflow.weights.buckets import BucketOptions, checksum_of, into_buckets
    from hydraflow.weights.slots import Slots

    weights = {f"w{i}": torch.randn(1000 + i, device=device) for i in range(5)}
    how, slots = BucketOptions(1, 4100, torch.float32, checked=False), Slots(device)
    with multiprocessing.get_context("spawn").Pool(1) as other:
        found = []
        for header, numbers in into_buckets(weights.items(), how):
            if header is not None:
                found += other.apply(read_elsewhere, (slots.put(header, numbers),))
        large = torch.randn(SENT[size] // 4, device=device)
        ((header, numbers),) = into_buckets([("w", large)], replace(how, max_bytes=SENT[size]))
        assert header is not None
        took = seconds(device, lambda: slots.put(header, numbers), 3)
        took += other.apply(copied_elsewhere, (slots.put(header, numbers),))
    same = found == [checksum_of(one) for one in weights.values()]
    group = BroadcastGroup(
        device, rank=0, world_size=1, timeout_s=60, address="127.0.0.1", port=0, own_address="127.0.0.1"
    )
    sent = group.broadcast(weights["w0"].clone()).wait()
    good = same and torch.equal(sent, weights["w0"])
    say("links", weights=len(found), bytes_per_second=SENT[size] / took, right=good)
    return good


def allocated(device: torch.device) -> int:
    """Bytes allocated on a GPU; 0 on a CPU."""
    import torch

    return 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)


def attention(device: torch.device) -> bool:
    """Whether attention over packed rows in bf16 is that in float64, with and without a sliding window."""
    import numpy as np
    import torch

    from hydraflow.models.attention import attend_rows, flash_kernel, plan_rows

    lengths = np.array([700, 33, 200, 1])
    draw = torch.Generator().manual_seed(1)
    exact = [torch.randn(int(lengths.sum()), heads, 64, generator=draw).double() for heads in (4, 2, 2)]

    def results(where: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        given, found = [one.to(where, dtype).requires_grad_() for one in exact], []
        q, k, v = given
        for window in (None, 100):
            out = attend_rows(q, k, v, plan_rows(lengths, where), None, window)
            found += [out, *torch.autograd.grad(out.sum(), given)]
        return [x.detach().cpu().double() for x in found]

    wanted, found = results(torch.device("cpu"), torch.float64), results(device, torch.bfloat16)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    good = all(error < 0.02 for error in errors)  # not by max, which may miss a NaN
    say("attention", errors=errors, flash_attn=flash_kernel() is not None, right=good)
    return good


def head_inputs(device: torch.device, sizes: Mapping[str, int], tokens: int) -> list[torch.Tensor]:
    """float64 hidden states and weight matrix, exact in bf16, and target tokens."""
    import torch

    draw = torch.Generator().manual_seed(0)
    width, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    hidden = torch.randn(tokens, width, generator=draw)
    weight = torch.randn(vocabulary, width, generator=draw) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    return [*(one.bfloat16().double().to(device) for one in (hidden, weight)), targets.to(device)]


def by_fused_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, kernels: bool = False
) -> list[torch.Tensor]:
    """Log-probabilities of the targets and the gradients of their sum, in four chunks."""
    import torch

    from hydraflow.models.ask import LOG_PROBS
    from hydraflow.models.fused_head import FusedHead, HeadWork
    from hydraflow.models.kernel_head import KernelHead

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    work = HeadWork(LOG_PROBS, lambda logits: logits, chunk=-(-len(targets) // 4))
    function = KernelHead if kernels else FusedHead
    log_probs, _ = function.apply(*leaves, None, targets, work)
    return [log_probs.detach(), *torch.autograd.grad(log_probs.sum(), leaves)]


def by_all_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """As `by_fused_head`, with plain operations."""
    import torch

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = leaves[0] @ leaves[1].t()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    log_probs = wide.gather(-1, targets[:, None])[:, 0]
    return [log_probs.detach(), *torch.autograd.grad(log_probs.sum(), leaves)]


def fused_head(device: torch.device, size: str) -> bool:
    """Whether the fused head's log-probabilities and gradients, with and without kernels, are those in
    float64; and their seconds and bytes beside those of plain operations, in bf16."""
    import torch

    from hydraflow.models.gpu_kernels import kernels_for

    sizes, (count, _, longest, repetitions) = MODELS[size], WORK[size]
    ways: dict[str, Callable[..., list[torch.Tensor]]] = {"fused": by_fused_head}
    if kernels_for(torch.empty(0, device=device)) is not None:
        ways["kernels"] = partial(by_fused_head, kernels=True)
    errors, good = {}, True
    hidden, weight, targets = head_inputs(device, sizes, 256)
    wanted = by_all_logits(hidden.clone(), weight.clone(), targets)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        for way, work in ways.items():
            found = work(hidden.to(dtype), weight.to(dtype), targets)
            off = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
            errors[f"{way}, {dtype}"] = off
            good = good and all(error < limit for error in off)  # not by max, which may miss a NaN
    del wanted, found
    hidden, weight, targets = head_inputs(device, sizes, count * longest // 8)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    took, held = {}, {}
    for way, work in (ways | {"all logits": by_all_logits}).items():
        before = allocated(device)
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats()
        took[way] = seconds(device, partial(work, hidden, weight, targets), repetitions)
        if device.type != "cpu":
            held[way] = torch.get_device_module(device).max_memory_allocated() - before
    say("fused head", errors=errors, seconds=took, memory=held or None, right=good)
    return good


def sampler(engine: FSDPEngine, device: torch.device, dtype: torch.dtype) -> Any:
    """A generation engine with the trainer's weights."""
    from hydraflow.generation.base import EngineSpec
    from hydraflow.generation.config import RolloutConfig
    from hydraflow.generation.native import build

    native = build(engine.module.hf.config, EngineSpec(RolloutConfig(), device, dtype, None, longest_row=64))
    native.update_weights(engine.weights())
    return native


def seconds(device: torch.device, work: Callable[[], object], repetitions: int) -> float:
    """Seconds of the fastest of `repetitions` calls, after a warm-up call."""
    import torch

    found = []
    for _ in range(1 + repetitions):
        since = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        found.append(time.perf_counter() - since)
    return min(found[1:])


def figures(device: torch.device, size: str) -> None:
    """Measures a training step, packing, weight transfer and generation."""
    import torch

    from hydraflow.device import peak_flops, return_memory
    from hydraflow.generation.base import GenerationRequest, SamplingParams
    from hydraflow.protocol import ragged

    sizes, (count, prompt, longest, repetitions) = MODELS[size], WORK[size]
    batch = rows(sizes["vocab_size"], count, prompt, longest)
    micro = [batch.slice(i, i + count // 2) for i in range(0, count, count // 2)]
    # two rows share a prompt
    tokens = prompt * count // 2 + int(ragged.lengths(batch.get("responses")).sum())
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(sizes, Path(folder), torch.bfloat16)
        times: dict[bool, float] = {}
        engine: Any = None
        for packed in (False, True):
            del engine
            return_memory(device.type)
            engine = engine_of(path, device, "bf16", packed=packed)

            def step(engine: FSDPEngine = engine) -> None:
                engine.forward_backward(micro, loss)
                engine.optimizer_step()

            if device.type != "cpu":
                torch.get_device_module(device).reset_peak_memory_stats()
            times[packed] = seconds(device, step, repetitions)
    weights = sum(p.numel() for p in engine.module.parameters())
    flops = 6 * weights * tokens / times[True]
    memory = None if device.type == "cpu" else torch.get_device_module(device).max_memory_allocated()
    peak = None if device.type == "cpu" else peak_flops(device, torch.bfloat16)
    mfu = None if peak is None else flops / peak
    say("step", parameters=weights, tokens=tokens, seconds=times[True], mfu=mfu, memory=memory)
    say("packing", padded=times[False], packed=times[True], ratio=times[False] / times[True])
    native = sampler(engine, device, torch.bfloat16)
    took = seconds(device, lambda: native.update_weights(engine.weights()), repetitions)
    say("weights", seconds=took, bytes_per_second=4 * weights / took)
    prompts = ragged.rows(batch.get("prompts"))
    request = GenerationRequest(prompts, [1] * count, [(i,) for i in range(count)])
    params = SamplingParams(max_tokens=longest // 4, ignore_eos=True)
    took = seconds(device, lambda: native.generate(request, params), 1)
    say("generation", sequences=count, seconds=took, tokens_per_second=count * params.max_tokens / took)


def main() -> int:
    """Runs all checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(MODELS), default="large")
    given = parser.parse_args()
    libraries = installed()
    say("libraries", python=platform.python_version(), **libraries)
    if missing := [name for name in NEEDED if libraries[name] == "missing"]:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
        return 2
    from packaging.version import Version  # transformers needs it, too

    for name, least in least_versions().items():
        if Version(libraries[name]) < Version(least):
            print(f"{name} {libraries[name]} is older than hydraflow requires ({least})", file=sys.stderr)
    import torch

    if given.device != "cpu" and not torch.get_device_module(given.device).is_available():
        print(f"torch {torch.__version__} finds no {given.device} device here", file=sys.stderr)
        return 2
    device = torch.device("cpu" if given.device == "cpu" else f"{given.device}:0")
    name = platform.machine() if device.type == "cpu" else torch.get_device_module(device).get_device_name(0)
    say("device", name=name)
    with one_rank(device):
        right = [attention(device), fused_head(device, given.size), numbers(device)]
        right += [repeated(device, given.size), links(device, given.size)]
        if libraries["megatron-core"] != "missing":
            right.append(megatron(device, "qwen3", SMALL))
            right.append(megatron(device, "qwen3_moe", SMALL | EXPERTS))
            if device.type != "cpu" and libraries["transformer-engine"] != "missing":
                right.append(matrices(device))
        figures(device, given.size)
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
