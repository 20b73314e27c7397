"""Lists how each type of causal language model is handled (packed, padded or refused), and checks its numbers
against transformers' own.

    python scripts/model_types.py                  # all types that transformers has; writes docs/models.md
    python scripts/model_types.py qwen3 mamba2     # only these; prints to the terminal

In: tiny models with random weights (`tiny_types.py`). The training engine loads each as a policy, with
adapters, and as a value model; its numbers and gradients are compared with those of transformers' own code,
row by row; the built-in engine samples from it, and its log-probabilities are compared likewise.
In bf16 only the decision is compared: a type that is refused in float32 must not be accepted there. Each type
runs in its own process. Out: a table; exit code 1 if a type gives wrong numbers, or fails with anything but a
refusal. Left out on purpose: pretrained weights, and rows longer than a few dozen tokens.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

sys.path.insert(0, str(Path(__file__).parents[1]))  # `scripts` is not installed

from hydraflow import metrics
from hydraflow.engine.base import ModelOutput
from hydraflow.engine.config import FSDPConfig, OptimConfig, WrapPolicyConfig
from hydraflow.engine.fsdp.build import hf_name
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.errors import ConfigError
from hydraflow.generation.base import EngineSpec, GenerationRequest, SamplingParams
from hydraflow.generation.config import RolloutConfig
from hydraflow.generation.native import NativeEngine, build
from hydraflow.metrics import Metric
from hydraflow.models.config import ModelConfig
from hydraflow.models.heads import ValueModel, backbone_of
from hydraflow.models.loading import load_config
from hydraflow.models.probe import own_log_probs
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from scripts.tiny_types import TYPES, VOCABULARY, save_tiny, tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SECONDS = 600
"""Time limit per type; on a quiet machine each takes a second or two."""
ROWS = ((5, 6), (5, 21), (2, 3), (19, 17))
"""Tokens of each row's prompt and response; some exceed the sliding windows of the tiny models. The first two
rows have the same prompt."""
LOG_PROBS, GRADIENTS = 1e-3, 1e-2
"""Tolerances in float32: absolute, of log-probabilities; and of gradients, relative to the largest of each
tensor."""
PACKED, PADDED, RIGHT = "packed", "padded", "yes"
REFUSED, UNMADE, WRONG, BROKEN = "refused", "not tried", "WRONG", "ERROR"
BF16 = " in bf16"
"""Suffix of the ways to use a model that are in bf16."""


@dataclass(frozen=True)
class Outcome:
    """The result of one way to use a model."""

    word: str
    """PACKED or PADDED, for sampling RIGHT; REFUSED, UNMADE, WRONG or BROKEN."""
    why: str = ""
    """Reason, unless the numbers are right."""
    log_probs: float = 0.0
    """Largest difference from transformers' own."""
    gradients: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it is a defect."""
        return self.word in (WRONG, BROKEN)


def rows_of() -> DataProto:
    """The test rows, with random tokens."""
    draw = torch.Generator().manual_seed(1)
    tokens = [[torch.randint(2, VOCABULARY, (n,), generator=draw) for n in lengths] for lengths in ROWS]
    tokens[1][0] = tokens[0][0]
    responses = ragged.from_rows([response for _, response in tokens])
    ones = torch.ones(len(ragged.parts(responses)[0]), dtype=torch.int64)
    return DataProto.from_dict(
        {
            "prompts": ragged.from_rows([prompt for prompt, _ in tokens]),
            "responses": responses,
            "response_mask": ragged.from_parts(ones, ragged.lengths(responses)),
        }
    )


def own_model(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it, in float32."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(lm.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        lm.set_attn_implementation("eager")  # SDPA ignores the cap
    return lm


def log_probs_of_all(lm: PreTrainedModel, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
    """Log-probabilities (K,) of all response tokens by transformers' own code, row by row."""
    rows = zip(prompts, responses, strict=True)
    return torch.cat([own_log_probs(lm, prompt, response, lm.device) for prompt, response in rows])


def engine_of(folder: Path, *, head: str = "policy", lora_rank: int = 0, dtype: str = "fp32") -> FSDPEngine:
    """As a run makes it, except for the dtype. Each layer is an FSDP unit, as in larger models by default."""
    return FSDPEngine(
        ModelConfig(path=str(folder), lora_rank=lora_rank),
        FSDPConfig(dtype=dtype, wrap_policy=WrapPolicyConfig(min_num_params=0)),
        OptimConfig(),
        head=head,
        device=torch.device("cpu"),
    )


def loss_of(output: ModelOutput, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
    """The sum of all log-probabilities or values."""
    found = output.log_probs if output.values is None else output.values
    assert found is not None
    return found.sum(), {"n": metrics.summed(1)}


def compared(
    engine: FSDPEngine,
    numbers: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    gradients: Callable[[], Mapping[str, Tensor | None]],
) -> Outcome:
    """Compares with transformers' numbers (K,), given prompts and responses, and with the gradients of their
    sum, by the name of the engine's parameter, after a backward pass; then the engine takes a step."""
    rows = rows_of()
    expected = numbers(ragged.rows(rows.get("prompts")), ragged.rows(rows.get("responses")))
    column = "values" if isinstance(engine.module, ValueModel) else "log_probs"
    found = ragged.parts(engine.forward(rows.split(3)).get(column))[0]
    off = float((found - expected.detach()).abs().max())
    engine.forward_backward([rows], loss_of)
    expected.sum().backward()
    wanted = gradients()
    trained = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    worst = largest(
        gradient_difference(one.grad, wanted[hf_name(engine.module, name)]) for name, one in trained
    )
    engine.optimizer_step()
    word = PADDED if engine._padded else PACKED
    right = off < LOG_PROBS and worst < GRADIENTS
    return Outcome(word if right else WRONG, "" if right else f"{word}: {off:.2g}, {worst:.2g}", off, worst)


def gradients_of(model: nn.Module, prefix: str = "") -> dict[str, Tensor | None]:
    """Gradients by parameter; tied ones under each of their names."""
    return {f"{prefix}{name}": one.grad for name, one in model.named_parameters(remove_duplicate=False)}


def as_policy(folder: Path) -> Outcome:
    """Compares log-probabilities and their gradients."""
    engine, lm = engine_of(folder), own_model(folder)
    return compared(engine, partial(log_probs_of_all, lm), partial(gradients_of, lm))


def redraw(parameter: Tensor, draw: torch.Generator) -> Tensor:
    """Sets a parameter to random values; returns a copy of them."""
    mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    with torch.no_grad():
        mine.copy_(torch.randn(mine.shape, generator=draw) * 0.1)
    return mine.detach().clone()


def as_value_model(folder: Path) -> Outcome:
    """Compares a critic's values and their gradients with those of a linear layer on transformers' model
    without its head."""
    engine, lm = engine_of(folder, head="value"), own_model(folder)
    name, backbone = backbone_of(lm)
    weight = engine.module.get_parameter("score.weight")  # zero at the start
    score = redraw(weight, torch.Generator().manual_seed(2)).requires_grad_()

    def values(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            states = backbone(input_ids=torch.cat([prompt, response])[None], use_cache=False)
            found.append(states.last_hidden_state[0, len(prompt) - 1 : -1] @ score[0])
        return torch.cat(found)

    def gradients() -> dict[str, Tensor | None]:
        return gradients_of(backbone, f"{name}.") | {"score.weight": score.grad}

    return compared(engine, values, gradients)


def with_adapters(folder: Path) -> Outcome:
    """LoRA on all linear layers: compares with transformers' model whose matrices are W + s B A, where the
    gradient D of such a matrix gives s B^T D for A and s D A^T for B."""
    engine, lm = engine_of(folder, lora_rank=2), own_model(folder)
    scale = ModelConfig().lora_alpha / 2
    draw = torch.Generator().manual_seed(2)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, one in engine.module.named_parameters():
        if one.requires_grad:
            layer, _, side = hf_name(engine.module, name).partition(".lora_")
            sides.setdefault(layer, {})[f"{layer}.lora_{side}"] = redraw(one, draw)  # B is zero at the start
    for layer, pair in sides.items():
        a, b = pair.values()
        part: Any = lm.get_submodule(layer)
        part.weight.data += outputs_first(part, scale * (b @ a))

    def gradients() -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for layer, pair in sides.items():
            a, b = pair.values()
            part: Any = lm.get_submodule(layer)
            both: tuple[Tensor | None, Tensor | None] = None, None  # of an expert that no token is sent to
            if part.weight.grad is not None:
                grad = outputs_first(part, part.weight.grad)
                both = scale * b.T @ grad, scale * grad @ a.T
            found |= dict(zip(pair, both, strict=True))
        return found

    return compared(engine, partial(log_probs_of_all, lm), gradients)


def outputs_first(part: Any, matrix: Tensor) -> Tensor:
    """(outputs, inputs) from a matrix in the form of that layer's weight, or the reverse."""
    return matrix.T if isinstance(part, Conv1D) else matrix


def largest(differences: Iterable[float]) -> float:
    """The largest; NaN if one is NaN, which `max` may pass over."""
    return float(torch.tensor(list(differences)).max())


def gradient_difference(mine: Tensor | None, wanted: Tensor | None) -> float:
    """Largest difference, relative to the largest wanted number; a missing gradient counts as zeros."""
    ours = mine.to_local() if isinstance(mine, DTensor) else mine
    found = ours if ours is not None else wanted
    if found is None:
        return 0.0
    ours, theirs = (torch.zeros_like(found) if one is None else one for one in (ours, wanted))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


def sampler_of(folder: Path, lm: PreTrainedModel, dtype: torch.dtype) -> NativeEngine:
    """The built-in engine with the model's weights."""
    spec = EngineSpec(RolloutConfig(), torch.device("cpu"), dtype, None, longest_row=64)
    engine = build(load_config(ModelConfig(path=str(folder))), spec)
    engine.update_weights((name, one.detach()) for name, one in lm.state_dict(keep_vars=True).items())
    return engine


def sampled(folder: Path) -> Outcome:
    """Samples twice from prompts of different lengths; compares log-probabilities with transformers' own, and
    the tokens of the two calls with each other."""
    lm, prompts = own_model(folder), ragged.rows(rows_of().get("prompts"))
    engine = sampler_of(folder, lm, torch.float32)
    off, seen = 0.0, []
    for _ in range(2):
        request = GenerationRequest(prompts, [2] * len(prompts), [(0, i) for i in range(len(prompts))])
        output = engine.generate(request, SamplingParams(max_tokens=12, ignore_eos=True))
        responses = ragged.rows(output.responses)
        with torch.no_grad():
            expected = log_probs_of_all(lm, [one for one in prompts for _ in range(2)], responses)
        off = largest([off, *(ragged.parts(output.log_probs)[0] - expected).abs().tolist()])
        seen.append(torch.cat(list(responses)))
    same = torch.equal(*seen)
    why = f"off by {off:.2g}" if same else "different tokens in the second call"
    return Outcome(RIGHT, log_probs=off) if off < LOG_PROBS and same else Outcome(WRONG, why, off)


def in_bf16(found: Outcome, folder: Path) -> Outcome:
    """The decision for a policy, given that in float32. Padding or refusing is never wrong."""
    word = PADDED if engine_of(folder, dtype="bf16")._padded else PACKED
    lax = found.word == REFUSED or (found.word == PADDED and word == PACKED)
    return Outcome(WRONG, f"{WRONG}: {word} in bf16") if lax else Outcome(word)


def sampled_in_bf16(found: Outcome, folder: Path) -> Outcome:
    """The decision of the built-in engine, given that in float32."""
    sampler_of(folder, own_model(folder), torch.bfloat16)
    return Outcome(WRONG, f"{WRONG}: sampled in bf16") if found.word == REFUSED else Outcome(RIGHT)


def tried(way: Callable[[Path], Outcome], folder: Path) -> Outcome:
    """The outcome of one way to use a model; a ConfigError is a refusal, any other error a defect."""
    try:
        return way(folder)
    except ConfigError as error:
        return Outcome(REFUSED, str(error.problems[0].rule))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(BROKEN, f"{first_words(error)} ({Path(at.filename).name}:{at.lineno})")


def first_words(error: BaseException) -> str:
    """Class and start of the message of an error, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:160]}" if said else type(error).__name__


def examine(model_type: str) -> dict[str, Outcome]:
    """Tries all ways to use one type; adapters and sampling only if it is not refused as a policy."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            save_tiny(tiny_config(model_type), folder)
        except Exception as error:
            return {"policy": Outcome(UNMADE, f"transformers makes no tiny one: {first_words(error)}")}
        found = {"policy": tried(as_policy, folder), "value": tried(as_value_model, folder)}
        if found["policy"].word != REFUSED:
            found |= {"lora": tried(with_adapters, folder), "native": tried(sampled, folder)}
            found[f"native{BF16}"] = tried(partial(sampled_in_bf16, found["native"]), folder)
        found[f"policy{BF16}"] = tried(partial(in_bf16, found["policy"]), folder)
        return found


def child_main(model_type: str, answer: Connection) -> None:
    """Sends the result of `examine` to the parent; silences the output of libraries."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    answer.send(examine(model_type))


def examine_in_child(model_type: str) -> dict[str, Outcome]:
    """`examine` in a child process, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child_main, args=(model_type, theirs))
    process.start()
    theirs.close()
    found = {"policy": Outcome(BROKEN, "hangs")}
    try:
        if mine.poll(SECONDS):
            found = mine.recv()
    except EOFError:
        found = {"policy": Outcome(BROKEN, "the process died")}
    process.kill()
    process.join()
    return found


HEAD = """# Types of models

Written by `python scripts/model_types.py` with transformers {version}: for each type of causal language model
that it has, what happens to a tiny model with random weights. Log-probabilities, values and gradients of the
training engine (FSDP2), and log-probabilities of the built-in generation engine, were compared with those of
transformers' own code, row by row, in float32; some rows are longer than the windows of these models. Where a
type is accepted, log-probabilities and values differ by less than {log_probs}, gradients by less than
{gradients} of the largest of their tensor. In bf16 nothing is accepted that is wrong in float32.

Types that can be encoders are made decoders (`is_decoder=true`), and windows that are off by default are used
(`use_sliding_window=true`). BERT as it is published is refused, as a critic too: its tokens see later ones.

{counts}

| column | |
|---|---|
| policy | how rows are computed: `packed` into one line, or right `padded`; or `refused`, with a sentence |
| critic | the same for a value model |
| LoRA | the same with `target_modules=all-linear`. Experts that are one tensor for a layer get no adapter |
| sampled | whether the built-in engine samples from it; `refused`: the last column says why |

| type | policy | critic | LoRA | sampled | why not |
|---|---|---|---|---|---|
"""


def page(lines: Sequence[str], version: str) -> str:
    """The Markdown page with these rows in its table. version: of transformers."""
    words = [one.split("|")[2].strip() for one in lines]
    head = HEAD.format(
        version=version,
        log_probs=LOG_PROBS,
        gradients=GRADIENTS,
        counts=", ".join(f"{words.count(word)} {word}" for word in sorted(set(words))) + ".",
    )
    return head + "".join(f"{one}\n" for one in lines)


def line(name: str, ways: Mapping[str, Outcome]) -> str:
    """One row of the table. Reasons that float32 gives already are not repeated for bf16."""
    cells = [ways[way].word if way in ways else "" for way in ("policy", "value", "lora", "native")]
    reasons: dict[str, None] = {}
    for way, one in ways.items():
        if one.word in (PACKED, PADDED, RIGHT) or not one.why:
            continue
        if way.endswith(BF16) and not one.bad:
            if ways[way.removesuffix(BF16)].word != REFUSED:  # else float32 says why
                reasons[f"in bf16: {one.why}"] = None
        else:
            reasons[one.why] = None
    why = "; ".join(reasons).replace("|", "/")
    return f"| {name} | {' | '.join(cells)} | {why} |"


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if there is a defect, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="by default all")
    wanted = parser.parse_args(arguments).types
    found = {}
    for name in wanted or TYPES:
        found[name] = examine_in_child(name)
        print(line(name, found[name]), flush=True)
    if not wanted:
        lines = [line(name, ways) for name, ways in found.items()]
        PAGE.write_text(page(lines, transformers.__version__))
    return int(any(one.bad for ways in found.values() for one in ways.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
