"""Samples responses, with weights from the actor or from a model directory.

In: prompts, one row each. Out: the samples of each, prompt by prompt: `prompts`, `responses`,
`response_mask`, `rollout_log_probs`, `lengths`, `versions`, `replica`, `finish_reason`, and `routed_experts`
on request. Samples depend on the seed, the epoch, the prompt's uid and the sample's number, never on the
process that drew them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from transformers import TokenizersBackend

from hydraflow.device import finish_work, number_of, resolve_dtype
from hydraflow.dispatch.modes import Dispatch, mesh_mode, register
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine import process_group
from hydraflow.engine.broadcast_group import BroadcastGroup
from hydraflow.errors import GuardStop
from hydraflow.generation.base import (
    Completion,
    EngineSpec,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    ReadableEngine,
    SamplingParams,
    TokenRequest,
)
from hydraflow.generation.config import (
    GENERATION_ENGINES,
    RolloutConfig,
    SamplingConfig,
    every_stop_string,
    stop_strings,
)
from hydraflow.generation.requests import output_of
from hydraflow.generation.stopping import streaming_tokenizer
from hydraflow.generation.weights import first_difference
from hydraflow.models.adapters import AdapterLayers, is_adapter
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.loading import load_config, load_generation_config, load_tokenizer, read_weights
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.coordinates import Coordinates
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.protocol.ragged import from_parts, from_rows, parts, rows, take
from hydraflow.weights.buckets import FlatBucket, Header
from hydraflow.weights.connection import ConnectionLost
from hydraflow.weights.slots import OpenSlots
from hydraflow.workers.joining import join_group
from hydraflow.workers.weights_broadcast import joined, received_buckets
from hydraflow.workers.weights_shared import sent_buckets
from hydraflow.workers.weights_transfer import WAIT_SHARE, Received, receive_all


@dataclass(frozen=True)
class RolloutSpec:
    """Constructor arguments of a RolloutWorker."""

    model: ModelSourceConfig
    rollout: SamplingConfig
    max_prompt: int
    """Longest prompt."""
    max_tokens: int
    """Longest response."""
    seed: int
    """First part of every random key."""
    tensor_parallel: int = 1
    """Tensor-parallel size of an engine."""
    pipeline_parallel: int = 1
    """Pipeline-parallel size of an engine."""
    per_machine: int | None = None
    """Most processes on one machine; None: all are on one."""
    section: str = "actor_rollout_ref.rollout"
    """Configuration path of `rollout`, next to `model`; for messages."""
    routes: bool = False
    """Requests will ask for the experts of their tokens."""
    start_seconds: float = math.inf
    """Start timeout, in seconds, of an engine with a process of its own."""
    adapters: AdapterLayers | None = None
    """Adapters that the engine applies itself; None: it gets merged weights."""

    @property
    def model_parallel(self) -> int:
        """Neighbouring ranks that share an engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def model_field(self) -> str:
        """Configuration path of `model`, for messages."""
        return f"{self.section.removesuffix('rollout')}model"


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling parameters; sent as `meta_info["sampling"]`."""

    n: int
    """Responses per prompt."""
    temperature: float
    """Divides the logits; 0 is greedy."""
    top_k: int
    """Sample from the k most probable tokens; -1: all."""
    top_p: float
    """Nucleus sampling: probability mass to sample from; 1: all tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own."""
    routes: bool = False
    """Also return the experts of every token."""

    @classmethod
    def of_training(cls, rollout: SamplingConfig, n: int, *, routes: bool = False) -> SamplingSpec:
        """The parameters of the samples to train on, `n` for each prompt."""
        stops = stop_strings(rollout.stop), tuple(rollout.stop_token_ids)
        return cls(n, rollout.temperature, rollout.top_k, rollout.top_p, *stops, routes)

    def greedy(self) -> SamplingSpec:
        """The same, but for one greedy response per prompt."""
        return replace(self, n=1, temperature=0.0, top_k=-1, top_p=1.0)

    @classmethod
    def of_validation(cls, rollout: RolloutConfig, n: int) -> SamplingSpec:
        """The parameters of validation (`rollout.val_kwargs`)."""
        val = rollout.val_kwargs
        strings = rollout.stop if val.stop is None else val.stop
        tokens = rollout.stop_token_ids if val.stop_token_ids is None else val.stop_token_ids
        temperature = val.temperature if val.do_sample else 0.0
        return cls(n, temperature, val.top_k, val.top_p, stop_strings(strings), tuple(tokens))


@dataclass
class _OpenGroup:
    """A prompt whose samples are in flight."""

    prompt: torch.Tensor
    samples: int
    found: dict[int, Completion] = field(default_factory=dict)
    """Completed samples, by number."""

    def ordered(self) -> list[Completion]:
        return [self.found[sample] for sample in range(self.samples)]

    def left(self) -> list[int]:
        return [sample for sample in range(self.samples) if sample not in self.found]


class RolloutWorker(Worker):
    """One process of the generation engine."""

    def __init__(self, process: ProcessContext, spec: RolloutSpec):
        super().__init__(process)
        self.spec = spec
        self.replica = process.rank // spec.model_parallel
        """Index of its engine."""
        if spec.model_parallel > 1:
            join_group(process, spec.model_parallel)
        engine_spec = EngineSpec(
            spec.rollout,
            process.device(),
            resolve_dtype(spec.rollout.dtype, process.device_type),
            load_generation_config(spec.model, field=spec.model_field),
            longest_row=spec.max_prompt + spec.max_tokens,
            processes=min(process.world_size, spec.per_machine or process.world_size),
            tensor_parallel=spec.tensor_parallel,
            pipeline_parallel=spec.pipeline_parallel,
            rank=process.rank % spec.model_parallel,
            section=spec.section,
            seed=(spec.seed + self.replica) % 2**31,
            tokenizer=_stop_tokenizer(spec),
            routes=spec.routes,
            start_seconds=spec.start_seconds,
            adapters=spec.adapters,
            trust_remote_code=spec.model.trust_remote_code,
        )
        build = GENERATION_ENGINES[spec.rollout.name].load()
        self.engine: GenerationEngine = build(load_config(spec.model, field=spec.model_field), engine_spec)
        self.version: int | None = None
        """Version of the weights: number of training steps."""
        self._has_base = False
        """Whether the engine has ever received base weights, not only adapters."""
        self._headers: list[Header] = []
        """Of the buckets of the current transfer."""
        self._weights_group: BroadcastGroup | None = None
        self.slots = OpenSlots()
        self._open: dict[int, _OpenGroup] = {}
        """Group number -> prompts that `advance` has in flight."""

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """The ranks of one engine get the same rows; the first of them answers."""
        size, rank = self.spec.model_parallel, self.process.rank
        return Coordinates(self.replica, self.process.world_size // size, rank % size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sync_from_actor(self, version: int) -> None:
        """Loads the weights of the actor in this process, which become `version`."""
        actor = self.process.roles["actor"]
        self.version = None  # until all of them have arrived
        self.engine.update_weights(actor.engine.weights())  # type: ignore[attr-defined]
        self.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self) -> None:
        """Loads the weights of the model directory, version 0."""
        model, field = self.spec.model, self.spec.model_field
        dtype = resolve_dtype(self.spec.rollout.dtype, self.process.device_type)
        config = load_config(model, field=field)
        weights = read_weights(config, model, head="policy", dtype=dtype, field=field)
        self.engine.update_weights(weights.items())
        self.version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, read_only=True)
    def first_difference_from_actor(self) -> str | None:
        """The first tensor that differs from that of the actor in this process; None: they agree."""
        actor = self.process.roles["actor"]
        return first_difference(self._held(), actor.engine.weights())  # type: ignore[attr-defined]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sees_device(self, identity: str) -> bool:
        """Whether this process can read the memory of a device."""
        return number_of(identity) is not None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def read_weights(self, place: str, compare: bool) -> Received | None:
        """Loads the weights that the actor's rank 0 shares at `place` on this node; the version is set after
        the last bucket. With `compare`, compares them with the held ones instead. None: not all have arrived.

        GuardStop when a checksum of the loaded weights differs from the bucket's.
        """
        rank, device_type = self.process.rank, self.process.device_type
        seconds = WAIT_SHARE * self.process.timeout_s
        with closing(sent_buckets(place, rank, device_type, seconds, self.slots)) as buckets:
            return receive_all(buckets, partial(self._take, compare))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def join_weights_group(self, address: str, port: int, ranks: Sequence[int], on_device: bool) -> bool:
        """Joins the group in which the actor broadcasts weights to these ranks, between devices or hosts;
        returns whether all members have joined."""
        self._weights_group = None  # releases the previous group
        device = self.process.device() if on_device else torch.device("cpu")
        number, size = 1 + ranks.index(self.process.rank), 1 + len(ranks)
        self._weights_group = joined(self.process, device, address, port, rank=number, world_size=size)
        return self._weights_group is not None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True, resend=False)
    def receive_weights(self, compare: bool) -> Received | None:
        """As `read_weights`, for a broadcast in the joined group."""
        if self._weights_group is None:
            return None
        return receive_all(received_buckets(self._weights_group), partial(self._take, compare))

    def _take(self, compare: bool, bucket: FlatBucket) -> str | None:
        """Loads a bucket, or returns the first difference from it."""
        found = None
        if compare:
            found = first_difference(self._held(), bucket.weights())
        else:
            self._load(bucket)
        finish_work(self.process.device_type)  # the bucket's memory is no longer in use
        return found

    def _load(self, bucket: FlatBucket) -> None:
        header = bucket.header
        adapters_alone = header.number == 0 and all(is_adapter(entry.name) for entry in header.entries)
        if adapters_alone and not self._has_base:
            raise ConnectionLost("a replacement process has no base weights for adapters")
        self.version = None
        self._headers = [header] if header.number == 0 else [*self._headers, header]
        self.engine.update_weights(bucket.weights(), first=header.number == 0, last=header.last)
        if header.checksums and (differing := self._differing(header)):
            raise GuardStop(
                f"generation rank {self.process.rank}: weights of version {header.version} did not arrive as"
                f" they were sent (bucket {header.number}, {differing})"
            )
        if header.last:
            self.version, self._has_base = header.version, True

    def _held(self) -> Mapping[str, torch.Tensor]:
        """The weights of a readable engine; only those are compared (`config.Engine`)."""
        assert isinstance(self.engine, ReadableEngine)
        return self.engine.held()

    def _differing(self, header: Header) -> str:
        """The first weight that differs from what was sent, on any process of the engine; "" if none. The
        engine has an adapter only after the last bucket."""
        differing = header.differing(self._held(), lambda name: not is_adapter(name))
        for earlier in self._headers if header.last else ():
            differing += earlier.differing(self._held(), is_adapter)
        found = next(iter(differing), "")
        if self.spec.model_parallel > 1:
            somewhere = process_group.all_reduce(torch.tensor([bool(found)]), "max").any()
            return found or ("one of another process" if somewhere else "")
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Releases the memory of weights and caches until new weights arrive, for other roles on the same
        devices."""
        self.engine.sleep()
        self.slots.close()
        self.version = None

    @register(dispatch_mode=mesh_mode("rollout"), blocking=False, read_only=True)
    def generate(self, batch: DataProto) -> DataProto:
        """Samples with `meta_info["sampling"]`. `meta_info["visit"]` is the second part of every random key:
        the epoch, negative for validation. GuardStop when the weights are not of `meta_info["version"]`, or
        give log-probabilities that are not numbers.
        """
        version = self._require_version(batch)
        sampling_spec: SamplingSpec = batch.meta_info["sampling"]
        prompts, visit = rows(batch.get("prompts")), batch.meta_info["visit"]
        request = GenerationRequest(
            prompts=prompts,
            samples=[sampling_spec.n] * len(prompts),
            keys=[(self.spec.seed, visit, str(uid)) for uid in batch.non_tensor_batch["uid"]],
        )
        with _finite():
            output = self.engine.generate(request, self._params(sampling_spec))
        return _trajectories(batch.get("prompts"), request.samples, output, version, self.replica)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True, resend=False)
    def advance(self, batch: DataProto | None, to_the_end: bool) -> DataProto | None:
        """Adds prompts, if any, and continues sampling until at least one prompt is complete, or with
        `to_the_end` until all are. Returns the trajectories of the complete prompts, as `generate` does;
        `meta_info["groups"]` lists their numbers from the column `group`. None on all but the first process
        of an engine. GuardStop as in `generate`.
        """
        if batch is not None:
            self._submit(batch)
        ended: list[int] = []
        while len(ended) < len(self._open) and (to_the_end or not ended):
            with _finite():
                completed = self.engine.advance()
            for one in completed:
                group, sample = map(int, one.name.split("-"))
                self._open[group].found[sample] = one
                if not self._open[group].left():
                    ended.append(group)
        done = [self._open.pop(group) for group in ended]
        if self.process.rank % self.spec.model_parallel:
            return None
        output = output_of([one for group in done for one in group.ordered()])
        prompts = from_rows([group.prompt for group in done])
        samples = [group.samples for group in done]
        assert self.version is not None, "the version was compared when the prompts arrived"
        sampled = _trajectories(prompts, samples, output, self.version, self.replica)
        sampled.meta_info["groups"] = ended
        return sampled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def abandon(self) -> None:
        """Aborts everything that `advance` has in flight."""
        names = [f"{number}-{sample}" for number, group in self._open.items() for sample in group.left()]
        self.engine.abort(names)
        self._open = {}

    def _submit(self, batch: DataProto) -> None:
        self._require_version(batch)
        sampling_spec: SamplingSpec = batch.meta_info["sampling"]
        params, visit, requests = self._params(sampling_spec), batch.meta_info["visit"], []
        uids, numbers = batch.non_tensor_batch["uid"], batch.get("group").tolist()
        for number, uid, prompt in zip(numbers, uids, rows(batch.get("prompts")), strict=True):
            self._open[number] = _OpenGroup(prompt, sampling_spec.n)
            key = self.spec.seed, visit, str(uid)
            for sample in range(sampling_spec.n):
                requests.append(TokenRequest(f"{number}-{sample}", prompt, params, key, sample))
        self.engine.submit(requests)

    def _require_version(self, batch: DataProto) -> int:
        """The version that the batch requires; GuardStop when the weights have another."""
        required: int = batch.meta_info["version"]
        if self.version != required:
            held = "no complete weights" if self.version is None else f"version {self.version}"
            raise GuardStop(
                f"generation rank {self.process.rank} was asked to sample with weights of version {required},"
                f" but holds {held}"
            )
        return required

    def _params(self, sampling_spec: SamplingSpec) -> SamplingParams:
        return SamplingParams(
            temperature=sampling_spec.temperature,
            top_k=sampling_spec.top_k,
            top_p=sampling_spec.top_p,
            max_tokens=self.spec.max_tokens,
            ignore_eos=self.spec.rollout.ignore_eos,
            stop_token_ids=sampling_spec.stop_token_ids,
            stop=sampling_spec.stop,
            routes=sampling_spec.routes,
        )


@contextmanager
def _finite() -> Iterator[None]:
    """Raises GuardStop in place of the engine's FloatingPointError."""
    try:
        yield
    except FloatingPointError as error:
        remedy = "a smaller actor_rollout_ref.actor.optim.lr, if it was trained"
        raise GuardStop(f"{error}\n      -> {remedy}") from error


def _stop_tokenizer(spec: RolloutSpec) -> TokenizersBackend | None:
    """The tokenizer for stop strings; None: the run has none."""
    if not every_stop_string(spec.rollout):
        return None
    tokenizer = load_tokenizer(spec.model, field=spec.model_field, chat=False)
    return streaming_tokenizer(tokenizer, spec.rollout, section=spec.section)


def _trajectories(
    prompts: torch.Tensor, samples: Sequence[int], output: GenerationOutput, version: int, replica: int
) -> DataProto:
    """Columns of `samples[i]` trajectories for each prompt i; `lengths` (B,) int32 counts prompt and
    response, `prompt_lengths` the prompt alone."""
    values, response_lengths = parts(output.responses)
    repeated = take(prompts, np.repeat(np.arange(len(samples)), samples))
    prompt_lengths = parts(repeated)[1]
    routed = {} if output.routed_experts is None else {"routed_experts": output.routed_experts}
    return DataProto.from_dict(
        tensors=routed
        | {
            "prompts": repeated,
            "responses": output.responses,
            "response_mask": from_parts(torch.ones_like(values), response_lengths),
            "rollout_log_probs": output.log_probs,
            "lengths": (prompt_lengths + response_lengths).to(torch.int32),
            "prompt_lengths": prompt_lengths.to(torch.int32),
            "versions": torch.full((len(repeated),), version, dtype=torch.int32),
            "replica": torch.full((len(repeated),), replica, dtype=torch.int32),
            "finish_reason": torch.tensor(
                [FINISH_REASONS.index(reason) for reason in output.finish_reason], dtype=torch.int8
            ),
        }
    )
