"""What ranks do in the tests of the Megatron engine; in a file of its own so that spawned processes can
import it. Jobs get the options of `rank_jobs.make_engine`; with `megatron` among them the engine is that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import megatron_apart, rank_jobs
from engine.ulysses_jobs import observed
from megatron.core import parallel_state

from hydraflow.engine.config import MegatronConfig, OptimConfig
from hydraflow.engine.megatron import export
from hydraflow.engine.megatron.engine import MegatronEngine
from hydraflow.engine.megatron.head import VocabularyParallelHead, VocabularyShare
from hydraflow.engine.megatron.names import Part, vocabulary_share
from hydraflow.engine.megatron.optimizer import SLOTS, WEIGHT, is_expert, sharers
from hydraflow.errors import ConfigError
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

TEMPERATURE = 0.8
OPTIM = {"lr": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1, "eps": 1e-3}
"""Clips; epsilon is large, because AdamW otherwise divides rounding errors by gradients next to 0."""
Sizes = tuple[int | None, ...]
Pieces = list[tuple[Part, torch.Tensor]]
"""A rank's parts of Hugging Face tensors, and their values."""
_groups: dict[Sizes, dict[str, Any]] = {}
_sizes: Sizes | None = None


def make_engine(path: str, options: Mapping[str, Any]) -> Any:
    """An engine of either kind in float32; the groups of ranks are new where their sizes are. With something
    to offload it rests after each call, in a memory apart."""
    options = {
        **options,
        "optim": None if options.get("optim", 0) is None else {**OPTIM, **options.get("optim", {})},
    }
    if "megatron" not in options:
        return rank_jobs.make_engine(path, options)
    settings = MegatronConfig(**{"dtype": "fp32", **options.pop("megatron")})
    restart(settings)
    optim = options.pop("optim")
    rests = any(getattr(settings, name) for name in megatron_apart.OFFLOADS)
    return (megatron_apart.RestingMegatron if rests else MegatronEngine)(
        ModelConfig(path=path, **options.pop("model", {})),
        settings,
        None if optim is None else OptimConfig(**optim),
        head=options.pop("head", "policy"),
        device=rank_jobs.CPU,
        **options,
    )


def restart(settings: MegatronConfig) -> None:
    """Makes way for groups of other sizes, or takes those that were there before: Megatron-Core forgets
    groups, but their threads stay, and hundreds of them take minutes."""
    global _sizes
    names = [name for name in vars(settings) if name.endswith("parallel_size")]
    sizes = tuple(getattr(settings, name) for name in names)
    if sizes == _sizes:
        return
    if _sizes is not None:
        names = [name for name in vars(parallel_state) if name.startswith("_") and name.isupper()]
        _groups[_sizes] = {name: getattr(parallel_state, name) for name in names}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    vars(parallel_state).update(_groups.get(sizes, {}))
    _sizes = sizes


# --- whole tensors from all ranks' parts


def pieces(engine: MegatronEngine, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> Pieces:
    """Of everything; `of` gives each parameter's values. Of a tied embedding both copies."""
    return [
        (part, value.detach().clone())
        for parameter, holding in engine._built.holdings(copies=True).values()
        for part, value in zip(holding.parts, holding.cut(of(parameter)), strict=True)
    ]


def assembled(found: Sequence[Pieces]) -> dict[str, torch.Tensor]:
    """Whole tensors. What several ranks have must be the same on all, and every number must be on one."""
    whole: dict[str, torch.Tensor] = {}
    for part, value in (piece for of_rank in found for piece in of_rank):
        place = part.of(whole.setdefault(part.name, value.new_full(part.shape, torch.nan)))
        known = ~place.isnan()
        assert torch.equal(place[known], value[known]), f"copies of {part.name} differ"
        place.copy_(value)
    assert not [name for name, tensor in whole.items() if bool(tensor.isnan().any())]
    return whole


def whole_gradients(engine: MegatronEngine) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Summed over data ranks, all in one exchange: with a distributed optimizer each has its range of the
    buffer."""
    parameters = [parameter for parameter, _ in engine._built.holdings(copies=True).values()]
    found: dict[torch.nn.Parameter, Any] = {parameter: parameter.main_grad for parameter in parameters}
    if not engine._optimizer._is_shared:
        return found
    for kind in (False, True):
        shared = [p for p in parameters if is_expert(p) == kind]
        if shared and sharers(shared[0]).size() > 1:
            flat = torch.cat([_own_range(engine, p) for p in shared])
            dist.all_reduce(flat, group=sharers(shared[0]))
            summed = flat.split([p.numel() for p in shared])
            found |= {p: one.view(p.shape) for p, one in zip(shared, summed, strict=True)}
    return found


def _own_range(engine: MegatronEngine, parameter: Any) -> torch.Tensor:
    """A flat gradient with this rank's range of numbers, the others 0."""
    main, start = engine._optimizer._main(parameter)
    full = torch.zeros(parameter.numel(), dtype=parameter.main_grad.dtype)
    if main is not None:
        end = start + main.numel()
        full[start:end] = parameter.main_grad.view(-1)[start:end]
    return full


def gradients(engine: Any) -> Any:
    """This rank's parts of the gradient; of the FSDP engine whole tensors by name."""
    if not isinstance(engine, MegatronEngine):
        return rank_jobs.gradients(engine)
    return pieces(engine, whole_gradients(engine).__getitem__)


def state(engine: Any) -> dict[str, Pieces]:
    """This rank's parts of weights and moments by slot, as the optimizer has them; no moments before the
    first step. Collective over data ranks."""
    optimizer = engine._optimizer
    found = {}
    for slot in (WEIGHT, *(SLOTS if optimizer.has_moments() else ())):
        found[slot] = pieces(engine, partial(optimizer.whole, slot=slot))
    return found


# --- numbers of a batch


def numbers(path: str, options: Mapping[str, Any], kind: str, micro_batches: int) -> dict[str, Any]:
    """What `observed` finds, the engine's gradient, and two steps."""
    engine = make_engine(path, options)
    head = options.get("head", "policy")
    found, learn = observed(engine, kind, micro_batches, head=head)
    found["gradient"] = gradients(engine)
    found["on_all_stages"] = engine.on_all_stages(
        found["said"]["log_probs" if head == "policy" else "values"]
    )
    found["steps"] = [engine.optimizer_step()]
    engine.lr_step()
    learn()
    found["steps"].append(engine.optimizer_step())
    found["weights"] = rank_jobs.full_weights(engine)
    return found


def cut_gradients(
    path: str, options: Mapping[str, Any], batch: DataProto, cuts: Sequence[tuple[Sequence[int], int]]
) -> list[Pieces]:
    """The gradient with the rows in each order and that many of them in a micro-batch."""
    engine = make_engine(path, options)
    found = []
    for order, rows in cuts:
        share = rank_jobs.my_share(batch.select_idxs(order), engine)
        engine.forward_backward(share.split(rows), rank_jobs.loss_of, Ask(TEMPERATURE, entropy=True))
        found.append(gradients(engine))
        engine._drop_gradient()
    return found


# --- weights


weights_to = partial(rank_jobs.weights_to, make=make_engine)


def save_hf(path: str, options: Mapping[str, Any], directory: str) -> int:
    """How many models of transformers this rank builds for it."""
    engine, build, built = make_engine(path, options), export.empty_model, []
    try:
        export.empty_model = lambda *args: built.append(build(*args)) or built[-1]  # type: ignore[func-returns-value]
        engine.save_hf(directory)
    finally:
        export.empty_model = build
    return len(built)


refusal = partial(rank_jobs.refusal, make=make_engine)


# --- checkpoints


def everything(engine: Any) -> dict[str, Any]:
    """All weights, the optimizer's state (Megatron-Core's: this rank's parts), and the learning rate."""
    found: dict[str, Any] = {"weights": rank_jobs.full_weights(engine), "lr": engine._lr()}
    if not isinstance(engine, MegatronEngine):
        return found | {"moments": rank_jobs.moments(engine)}
    optimizer, steps = engine._optimizer, set()
    assert optimizer is not None
    if optimizer.has_moments():
        steps = {float(optimizer.steps(p)) for p, _ in engine._built.holdings().values()}
    return found | {"state": state(engine), "steps": steps}


def state_of(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole moments by Hugging Face name and slot, of what `everything` found on all ranks."""
    if "moments" in found[0]:
        moments = {name.partition(".")[2]: value for name, value in found[0]["moments"].items()}
        return {name: value for name, value in moments.items() if not name.endswith(".step")}
    whole = {slot: assembled([rank["state"][slot] for rank in found]) for slot in found[0]["state"]}
    del whole[WEIGHT]  # `assembled` has checked them
    return {f"{name}.{slot}": value for slot in whole for name, value in whole[slot].items()}


write_checkpoint = partial(rank_jobs.write_checkpoint, make=make_engine, look=everything)
read_checkpoint = partial(rank_jobs.read_checkpoint, make=make_engine, look=everything)


def pass_on(path: str, options: Mapping[str, Any], source: str, target: str) -> dict[str, Any]:
    """Reads a checkpoint and writes it; what the engine holds."""
    engine = make_engine(path, options)
    engine.load(source, rank_jobs.CONTENTS)
    engine.snapshot(rank_jobs.CONTENTS).write(Path(target))
    return everything(engine)


def load_refusal(path: str, options: Mapping[str, Any], directory: str) -> str:
    """The class and words of what an engine says to a checkpoint."""
    from hydraflow.errors import EnvironmentFault

    engine = make_engine(path, options)
    try:
        engine.load(directory, rank_jobs.CONTENTS)
    except (ConfigError, EnvironmentFault) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_both(path: str, options: Mapping[str, Any], directory: str) -> None:
    """A checkpoint as training saves it, after two steps; and beside it what the engine itself exports."""
    engine = make_engine(path, options)
    for step in range(2):
        rank_jobs.step_once(engine, step)
    engine.snapshot(rank_jobs.CONTENTS).write(Path(directory) / "actor")
    engine.save_hf(Path(directory) / "exported")


def rest(path: str, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """What an engine returns, gets and becomes that may rest; what is on the device meanwhile."""
    engine = make_engine(path, options)
    return megatron_apart.train(engine, Path(directory)) | {"state": state(engine)}


def rest_held(path: str, options: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """What is on the device at times of two steps of an engine that may rest."""
    found, _ = megatron_apart.begin(make_engine(path, options))
    return found["held"]


def rest_frozen(path: str, options: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """What a model without optimizer says the second time, and the bytes of weights on the device then."""
    engine = make_engine(path, {**options, "optim": None})
    said = [ragged.parts(engine.forward([rank_jobs.make_batch()]).get("log_probs"))[0] for _ in range(2)]
    return said[1], megatron_apart.held(engine)[0]


# --- the head


def my_vocabulary(weight: torch.Tensor, chunk: int) -> tuple[torch.Tensor, VocabularyShare]:
    """This rank's rows of the matrix, filled up with rows of zeros."""
    rank, width = dist.get_rank(), vocabulary_share(len(weight), dist.get_world_size())
    mine = weight.new_zeros(width, weight.shape[1])
    own = weight[rank * width : (rank + 1) * width]
    mine[: len(own)] = own
    assert dist.group.WORLD is not None
    return mine, VocabularyShare(dist.group.WORLD, rank * width, len(own), chunk)


def likeliest(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ask: Ask, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids, as every rank has them."""
    mine, share = my_vocabulary(weight, chunk)
    log_probs, ids = VocabularyParallelHead.apply(hidden, mine.requires_grad_(), targets, ask, share)
    assert not log_probs.requires_grad
    return log_probs, ids


def head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ask: Ask, chunk: int
) -> dict[str, Any]:
    """Outputs of this rank's share of the vocabulary, and its parts of the gradients."""
    mine, share = my_vocabulary(weight, chunk)
    hidden, mine = hidden.clone().requires_grad_(), mine.requires_grad_()
    outputs = [
        output
        for output in VocabularyParallelHead.apply(hidden, mine, targets, ask, share)
        if output is not None
    ]
    head_loss(outputs, ask).backward()
    return {
        "outputs": [output.detach() for output in outputs],
        "hidden": hidden.grad,
        "weight": mine.grad,
    }


def head_loss(outputs: Sequence[torch.Tensor], ask: Ask) -> torch.Tensor:
    """A sum with another weight for each token, and a curve in it."""
    log_probs = outputs[0]
    weights = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)
    loss = (weights * (log_probs + 0.1 * log_probs.square())).sum()
    return loss + (weights.flip(0) * outputs[1].square()).sum() if ask.entropy else loss
