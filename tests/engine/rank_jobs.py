"""What ranks do in the tests of the engine; in a file of its own so that spawned processes can import it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from engine.memory_apart import RestingEngine

from hydraflow import metrics
from hydraflow.device import current_device
from hydraflow.engine import process_group, shared_memory
from hydraflow.engine.base import ModelOutput
from hydraflow.engine.config import FSDPConfig, OptimConfig, WrapPolicyConfig
from hydraflow.engine.fsdp import oom_recovery
from hydraflow.engine.fsdp.engine import FSDPEngine
from hydraflow.engine.fsdp.gather import gathered
from hydraflow.errors import ConfigError
from hydraflow.metrics import Metric
from hydraflow.models.adapters import Form
from hydraflow.models.ask import Ask
from hydraflow.models.config import ModelConfig
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

CPU = torch.device("cpu")
CONTENTS = ["model", "optimizer", "extra"]
ROWS = 8
EACH_LAYER = WrapPolicyConfig(min_num_params=0)
"""Every layer is an FSDP unit; by default the tests' models would be one."""


def make_engine(path: str, options: Mapping[str, Any] | None = None) -> FSDPEngine:
    """An engine of that model; options: `model`, `fsdp`, `optim` (None: frozen), `head`, `total_steps`. With
    param_offload it rests after each call, in a memory apart. Layers are FSDP units unless `fsdp` says
    otherwise."""
    options = dict(options or {})
    optim = options.pop("optim", {})
    fsdp = FSDPConfig(**{"dtype": "fp32", "wrap_policy": EACH_LAYER, **options.pop("fsdp", {})})
    return (RestingEngine if fsdp.param_offload else FSDPEngine)(
        ModelConfig(path=path, **options.pop("model", {})),
        fsdp,
        None
        if optim is None
        else OptimConfig(**{"lr": 1e-2, "clip_grad": 1e9, "weight_decay": 0.1, **optim}),
        head=options.pop("head", "policy"),
        device=CPU,
        **options,
    )


def padding_of(path: str, options: Mapping[str, Any]) -> bool:
    """Whether the engine pads the rows of that model."""
    return make_engine(path, options)._padded


def make_batch(step: int = 0, rows: int = ROWS) -> DataProto:
    """Rows of different lengths, with some response tokens that are not trained and a weight for each
    token."""
    draw = torch.Generator().manual_seed(100 + step)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(2, 17, (n,), generator=draw)

    prompts, lengths = (
        [ids(1 + (3 * i + step) % 7) for i in range(rows)],
        [1 + (5 * i + step) % 9 for i in range(rows)],
    )
    total = sum(lengths)
    mask, weight = (
        torch.rand(total, generator=draw) > 0.2,
        torch.randn(total, generator=draw, dtype=torch.float64),
    )
    sizes = torch.tensor(lengths)
    columns = {"response_mask": mask.long(), "advantages": weight}
    return DataProto.from_dict(
        {
            "prompts": ragged.from_rows(prompts),
            "responses": ragged.from_rows([ids(n) for n in lengths]),
            **{name: ragged.from_parts(values, sizes) for name, values in columns.items()},
        }
    )


def untrained(rows: DataProto, chosen: slice) -> DataProto:
    """The rows, of which the chosen ones have no trained token."""
    masks = [mask.clone() for mask in ragged.rows(rows.get("response_mask"))]
    for mask in masks[chosen]:
        mask.zero_()
    return rows.with_columns({"response_mask": ragged.from_rows(masks)})


def loss_of(
    output: ModelOutput, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """A weighted sum of what the model says, with a curve in it; entropy too when there is one."""
    said = output.log_probs if output.values is None else output.values
    assert said is not None
    weight = columns["advantages"].to(said.dtype) * columns["response_mask"]
    loss = (weight * (said + 0.1 * said.square())).sum() / 10
    if output.entropy is not None:
        loss = loss - 0.05 * (output.entropy * columns["response_mask"]).sum()
    return loss, {
        "loss": metrics.summed(loss.item()),
        "tokens": metrics.summed(float(columns["response_mask"].sum())),
    }


def my_share(batch: DataProto, engine: FSDPEngine | None = None) -> DataProto:
    """What a controller would send to this rank of an engine; without one, each rank gets rows of its own."""
    if engine is None:
        return batch.chunk(dist.get_world_size())[dist.get_rank()]
    return batch.chunk(engine.coordinates().data_size)[engine.coordinates().data_rank]


def weights_to(
    path: str,
    options: Mapping[str, Any],
    ranks: Sequence[int | None] = (None,),
    form: Form = Form.MERGED,
    make: Callable[..., Any] = make_engine,
) -> list[dict[str, torch.Tensor]]:
    """Those of one engine, sent to each rank, or to all, one after the other; in the order in which they
    come. make: makes the engine."""
    engine = make(path, options)
    return [by_name(engine.weights(to=rank, form=form)) for rank in ranks]


def full_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return by_name(engine.weights())


def by_name(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of an engine's weights, each of which comes once."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        assert name not in found, f"{name} comes twice"
        found[name] = tensor.clone()
    return found


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    engine._param_offload.wake()
    named = engine.module.named_parameters()
    return whole({name: p.grad for name, p in named if p.grad is not None})


def whole(shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors, many in an exchange: an exchange of each would take longer than a pass."""
    return {name: full.clone() for name, full in gathered(shards)}


def one_gradient(
    path: str, options: Mapping[str, Any], micro_rows: int, entropy: bool = False
) -> dict[str, torch.Tensor]:
    return cut_gradients(path, options, [micro_rows], entropy)[0]


def cut_gradients(
    path: str, options: Mapping[str, Any], cuts: Sequence[int], entropy: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The gradient of one engine with so many rows in a micro-batch, for each number."""
    engine, found = make_engine(path, options), []
    for micro_rows in cuts:
        share = my_share(make_batch(), engine)
        engine.forward_backward(share.split(micro_rows), loss_of, Ask(0.8, entropy=entropy))
        found.append(gradients(engine))
        engine.module.zero_grad()
    return found


def train(path: str, options: Mapping[str, Any], micro_rows: int = 2, steps: int = 2) -> dict[str, Any]:
    """Optimizer steps, of which the second has moments; also what a forward pass before each sees, which must
    be the newest weights."""
    engine = make_engine(path, options)
    reported, seen = [], []
    for step in range(steps):
        share = my_share(make_batch(step), engine)
        seen.append(ragged.parts(engine.forward([share], Ask(0.8)).batch[_column(engine)])[0])
        engine.forward_backward(share.split(micro_rows), loss_of, Ask(0.8))
        reported.append(engine.optimizer_step())
        engine.lr_step()
    return {"reported": reported, "seen": seen, "weights": full_weights(engine)}


def _column(engine: FSDPEngine) -> str:
    return "values" if hasattr(engine.module, "score") else "log_probs"


def groups_of(size: int) -> list[tuple[list[int], float]]:
    """Ranks and deadline, in seconds, of the groups of neighbours and of those with the same place."""
    groups = process_group.groups_of(size, "copies")
    backends = [group._get_backend(CPU) for group in groups]
    return [
        (dist.get_process_group_ranks(group), backend.options._timeout.total_seconds())
        for group, backend in zip(groups, backends, strict=True)
    ]


def loops_of_gloo() -> int:
    """Threads of this process that move bytes of gloo's groups; there are two groups more than before."""
    process_group.groups_of(2, "loops")
    names = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def exchanged(dtype: torch.dtype, window: int = 0, unreachable: int | None = None) -> dict[str, Any]:
    """What `gather_parts`, `exchange` and `add_parts` give a rank, and whether ranks shared memory: number k
    of a row from rank r to rank s is 10 r + s + k mod 3, of a part 10 r + k mod 3; a rank's own row, which is
    not touched, is -1. window: bytes of shared memory, for rows of any size; 0: gloo sends such small
    rows. unreachable: a rank that finds no window."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    numbers = torch.arange(100) % 3
    whole = torch.zeros(size, 100, dtype=dtype)
    whole[rank] = 10 * rank + numbers
    received = torch.full((size, 100), -1, dtype=dtype)
    sent = (10 * rank + torch.arange(size)[:, None] + numbers).to(dtype)
    total = torch.empty(100, dtype=dtype)
    finding: Any = {"return_value": None} if rank == unreachable else {"wraps": shared_memory._map}
    with (
        patch.object(shared_memory, "LEAST_BYTES", 0 if window else shared_memory.LEAST_BYTES),
        patch.object(shared_memory, "WINDOW_BYTES", window),
        patch.object(shared_memory, "_map", **finding),
    ):
        process_group.gather_parts(whole.view(-1), whole[rank].clone() if rank % 2 else whole[rank], group)
        process_group.exchange(received, sent, group)
        process_group.add_parts(total, sent, group, process_group.room_to_add(sent, group))
        shared = shared_memory.windows_for(sent, group) is not None
    open_files = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    kept = [one for one in open_files if "memfd" in one]
    return {"whole": whole, "received": received, "total": total, "shared": shared, "kept": kept}


def awaited_in_vain(numbers: int) -> tuple[float, str]:
    """Seconds that rank 0 waits for a rank that sends nothing in a group with a deadline of one second, and
    the error. numbers: of each part."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank():
        return 0.0, ""
    since, error = time.monotonic(), ""
    try:
        process_group.gather_parts(torch.zeros(numbers * dist.get_world_size()), torch.zeros(numbers), group)
    except RuntimeError as raised:
        error = str(raised)
    return time.monotonic() - since, error


SCATTERED, REDUCED = "exchanges of gradients", "c10d::allreduce_"
"""What sums gradients in a copy of the model on CPUs; and over copies, the start of a name in a profile."""


def count_reductions(
    path: str, micro_batches: int, options: Mapping[str, Any] | None = None
) -> list[dict[str, int]]:
    """How many there are in one update with one micro-batch, and in one with several."""
    engine, found = make_engine(path, options), []
    share = my_share(make_batch(), engine)
    for n in (1, micro_batches):
        engine.module.zero_grad()
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            patch.object(oom_recovery, "add_parts", wraps=oom_recovery.add_parts) as add_parts,
        ):
            engine.forward_backward(share.split(len(share) // n), loss_of)
        # a profile's own tables of them take a second
        events = profile.profiler.kineto_results.events()
        reduced = sum(event.name().startswith(REDUCED) for event in events)
        found.append({SCATTERED: add_parts.call_count, REDUCED: reduced})
    return found


def held_bytes(path: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and moments after a step, and of its part of a checkpoint."""
    engine = make_engine(path, options)
    engine.forward_backward([my_share(make_batch(), engine)], loss_of)
    gradients = sum(one.nbytes for one in engine._gradients())
    engine.optimizer_step()
    states = engine._optimizer.state.values()
    return {
        "weights": sum(parameter.to_local().nbytes for parameter in engine.module.parameters()),
        "gradients": gradients,
        "moments": sum(
            state[name].to_local().nbytes for state in states for name in ("exp_avg", "exp_avg_sq")
        ),
        "stored": engine.stored_bytes(CONTENTS),
    }


def break_one_rank(
    path: str, options: Mapping[str, Any] | None = None, make: Callable[..., Any] = make_engine
) -> tuple[dict[str, float], bool, dict[str, float]]:
    """An infinite loss on the last rank only: what is reported to each rank, whether its weights moved, and
    what it reports of a sound step after that. make: makes the engine."""
    engine = make(path, options)
    before = full_weights(engine)

    def broken(*args: Any) -> Any:
        loss, reported = loss_of(*args)
        return (loss * float("inf") if dist.get_rank() == dist.get_world_size() - 1 else loss), reported

    share = my_share(make_batch(), engine)
    engine.forward_backward([share], broken)
    reported = engine.optimizer_step()
    after = full_weights(engine)
    engine.forward_backward([share], loss_of)
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    return reported, moved, engine.optimizer_step()


def save_both(path: str, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Two steps, then a Hugging Face directory and a sharded one, then one more step."""
    engine = make_engine(path, options)
    for step in range(2):
        step_once(engine, step)
    engine.save_hf(directory + "/hf")
    engine.snapshot(CONTENTS).write(Path(directory) / "state")
    return third_step(engine)


def resume(path: str, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    engine = make_engine(path, options)
    engine.load(directory + "/state", CONTENTS)
    return third_step(engine)


def third_step(engine: FSDPEngine) -> dict[str, Any]:
    """Weights before and after it."""
    saved = full_weights(engine)
    step_once(engine, 2)
    return {"saved": saved, "next": full_weights(engine), "lr": engine._lr()}


def refusal(
    path: str, options: Mapping[str, Any] | None = None, make: Callable[..., Any] = make_engine
) -> str:
    """What a rank raises that cannot have this model."""
    try:
        make(path, options)
    except ConfigError as error:
        return str(error)
    return ""


def split_by_tokens(max_tokens: int) -> tuple[int, list[int]]:
    from hydraflow.engine.micro_batcher import split_tokens

    data = make_batch().slice(0, 4) if dist.get_rank() == 0 else make_batch().slice(4, 8)
    parts = split_tokens(data, max_tokens, lambda values: process_group.all_reduce(values, "max"))
    return len(parts.parts), parts.order.tolist()


def step_once(engine: FSDPEngine, step: int) -> None:
    engine.forward_backward([my_share(make_batch(step), engine)], loss_of)
    engine.optimizer_step()
    engine.lr_step()


def moments(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The optimizer's whole state, by parameter and slot."""
    return whole(
        {
            f"{name}.{slot}": value
            for name, parameter in engine.module.named_parameters()
            for slot, value in engine._optimizer.state.get(parameter, {}).items()
        }
    )


def everything(engine: FSDPEngine) -> dict[str, Any]:
    return {"weights": full_weights(engine), "moments": moments(engine), "lr": engine._lr()}


def write_checkpoint(
    path: str,
    options: Mapping[str, Any],
    directory: str,
    steps: int = 2,
    contents: Sequence[str] = CONTENTS,
    make: Callable[..., Any] = make_engine,
    look: Callable[[Any], dict[str, Any]] = everything,
) -> dict[str, Any]:
    """Some steps, a snapshot that is written by another thread while two more are taken; what the snapshot
    must hold. make: makes the engine; look: what it holds."""
    engine = make(path, options)
    for step in range(steps):
        step_once(engine, step)
    held = look(engine)
    snapshot = engine.snapshot(contents)
    files: list[Path] = []
    thread = threading.Thread(target=lambda: files.extend(snapshot.write(Path(directory))))
    thread.start()
    went_on = go_on(engine, steps)
    thread.join()
    names = [str(path.relative_to(directory)) for path in files]
    return held | {"next": went_on, "files": names, "bytes": engine.stored_bytes(contents)}


def read_checkpoint(
    path: str,
    options: Mapping[str, Any],
    directory: str,
    steps: int = 2,
    contents: Sequence[str] = CONTENTS,
    trained: int = 0,
    more: int = 2,
    make: Callable[..., Any] = make_engine,
    look: Callable[[Any], dict[str, Any]] = everything,
) -> dict[str, Any]:
    """What an engine holds after reading, and after more steps if it goes on. trained: steps before it
    reads."""
    engine = make(path, options)
    for step in range(trained):
        step_once(engine, 50 + step)
    engine.load(directory, contents)
    return look(engine) | ({"next": go_on(engine, steps, more)} if more else {})


def go_on(engine: Any, steps: int, more: int = 2) -> dict[str, torch.Tensor]:
    for step in range(steps, steps + more):
        step_once(engine, step)
    return full_weights(engine)


def write_on_a_full_disk(path: str, directory: str) -> str:
    """Rank 1's disk is full while the first snapshot is written: what is reported to each rank. The second
    one is written well."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    from hydraflow.errors import EnvironmentFault

    engine = make_engine(path)
    whole = FileSystem.create_stream

    def full(self: FileSystem, name: Any, mode: str) -> Any:
        if dist.get_rank() == 1 and mode == "wb":
            raise OSError(28, "No space left on device")
        return whole(self, name, mode)

    FileSystem.create_stream = full  # type: ignore[method-assign]
    try:
        engine.snapshot(CONTENTS).write(Path(directory) / "first")
        reported = "written"
    except EnvironmentFault as error:
        reported = str(error)
    finally:
        FileSystem.create_stream = whole  # type: ignore[method-assign]
    engine.snapshot(CONTENTS).write(Path(directory) / "second")
    return reported


def train_and_rest(path: str, device_type: str, fsdp: Mapping[str, Any]) -> dict[str, Any]:
    """Steps with an engine of that device which rests after each: the bytes that every rest frees there, and
    the weights at the end."""
    device = current_device(device_type, 0)
    config = FSDPConfig(**{"model_dtype": "fp64", "dtype": "fp64", "wrap_policy": EACH_LAYER, **fsdp})
    engine = FSDPEngine(ModelConfig(path=path), config, OptimConfig(lr=1e-2), head="policy", device=device)
    freed = []
    for step in range(3):
        engine.forward([make_batch(step)])
        step_once(engine, step)
        before = _allocated(device)
        engine.rest()
        freed.append(before - _allocated(device))
    shards = sum(p.to_local().nbytes for p in engine.module.parameters())
    weights = {name: tensor.cpu() for name, tensor in full_weights(engine).items()}
    return {"freed": freed, "shards": shards, "weights": weights}


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)
