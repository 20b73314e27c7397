"""Samples responses, with weights from the actor or from a model directory.

In: prompts, one row each. Out: the samples of each, prompt by prompt: `prompts`, `responses`,
`response_mask`, `rollout_log_probs`, `lengths`, `versions`, `replica`, `finish_reason`. What is sampled
depends on the seed, the epoch, the prompt's uid and the sample's number, never on the process that drew it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import TokenizersBackend

from hydraflow.device import current_device, resolve_dtype
from hydraflow.dispatch.modes import Coordinates, Dispatch, mesh_mode, register
from hydraflow.dispatch.transport import StoredValue
from hydraflow.dispatch.worker import ProcessContext, Worker
from hydraflow.engine import process_group
from hydraflow.errors import GuardStop
from hydraflow.generation.base import (
    EngineSpec,
    GenerationEngine,
    GenerationOutput,
    GenerationRequest,
    ReadableEngine,
    SamplingParams,
)
from hydraflow.generation.config import (
    GENERATION_ENGINES,
    RolloutConfig,
    SamplingConfig,
    every_stop_string,
    stop_strings,
)
from hydraflow.generation.stopping import streaming_tokenizer
from hydraflow.generation.weights import first_difference
from hydraflow.models.config import ModelSourceConfig
from hydraflow.models.loading import load_config, load_generation_config, load_tokenizer, read_weights
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.fields import FINISH_REASONS
from hydraflow.protocol.ragged import from_parts, parts, rows, take
from hydraflow.weights.buckets import Bucket, FlatBucket, Header
from hydraflow.workers.joining import join_group
from hydraflow.workers.weights_group import WeightsReceiver


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
    """First part of the key of every random draw."""
    tensor_parallel: int = 1
    """Neighbouring ranks that have one engine together."""
    section: str = "actor_rollout_ref.rollout"
    """Where the configuration has `rollout`, and beside it `model`; for messages."""
    start_seconds: float = math.inf
    """An engine's own process may take so long to start."""


@dataclass(frozen=True)
class SamplingSpec:
    """How prompts are sampled; travels as `meta_info["sampling"]`."""

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
    """Tokens that end it, besides the model's own."""

    @classmethod
    def of_training(cls, rollout: SamplingConfig, n: int) -> SamplingSpec:
        """As `rollout` says."""
        stops = stop_strings(rollout.stop), tuple(rollout.stop_token_ids)
        return cls(n, rollout.temperature, rollout.top_k, rollout.top_p, *stops)

    @classmethod
    def of_validation(cls, rollout: RolloutConfig, n: int) -> SamplingSpec:
        """As `rollout.val_kwargs` says."""
        val = rollout.val_kwargs
        strings = rollout.stop if val.stop is None else val.stop
        tokens = rollout.stop_token_ids if val.stop_token_ids is None else val.stop_token_ids
        temperature = val.temperature if val.do_sample else 0.0
        return cls(n, temperature, val.top_k, val.top_p, stop_strings(strings), tuple(tokens))


class RolloutWorker(Worker):
    """One process of the generation engine."""

    def __init__(self, process: ProcessContext, spec: RolloutSpec):
        super().__init__(process)
        self.spec = spec
        self.replica = process.rank // spec.tensor_parallel
        """Number of its engine."""
        if spec.tensor_parallel > 1:
            join_group(process, spec.tensor_parallel)
        engine_spec = EngineSpec(
            spec.rollout,
            current_device(process.device_type, process.local_rank),
            resolve_dtype(spec.rollout.dtype, process.device_type),
            load_generation_config(spec.model),
            longest_row=spec.max_prompt + spec.max_tokens,
            processes=process.world_size,
            tensor_parallel=spec.tensor_parallel,
            rank=process.rank % spec.tensor_parallel,
            section=spec.section,
            seed=(spec.seed + self.replica) % 2**31,
            tokenizer=_stop_tokenizer(spec),
            start_seconds=spec.start_seconds,
        )
        build = GENERATION_ENGINES[spec.rollout.name].load()
        self.engine: GenerationEngine = build(load_config(spec.model), engine_spec)
        self.version: int | None = None
        """Of the weights: the training steps that made them."""
        self.receiver: WeightsReceiver | None = None
        self.sleeps_beside: Sequence[str] = ()
        """While it sleeps: the roles that work on its devices."""

    def mesh_coordinates(self, mesh: str) -> Coordinates:
        """The ranks of one engine get the same rows; the first of them answers."""
        size, rank = self.spec.tensor_parallel, self.process.rank
        return Coordinates(self.replica, self.process.world_size // size, rank % size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sync_from_actor(self, version: int) -> None:
        """Loads the weights of the actor in this process, and calls them `version`."""
        actor = self.process.roles["actor"]
        self.version = None  # until all of them are there
        self.engine.update_weights(actor.engine.weights())  # type: ignore[attr-defined]
        self.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self) -> None:
        """Loads the weights of the model directory, version 0."""
        config = load_config(self.spec.model)
        dtype = resolve_dtype(self.spec.rollout.dtype, self.process.device_type)
        field = f"{self.spec.section.removesuffix('rollout')}model"
        weights = read_weights(config, self.spec.model, head="policy", dtype=dtype, field=field)
        self.engine.update_weights(weights.items())
        self.version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, read_only=True)
    def first_difference_from_actor(self) -> str | None:
        """The first tensor that is not the one of the actor in this process; None: all are."""
        actor = self.process.roles["actor"]
        return first_difference(self._held(), actor.engine.weights())  # type: ignore[attr-defined]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True, resend=False)
    def load_bucket(self, stored: StoredValue) -> None:
        """Loads some of the weights; after the last bucket they are those of its version.

        GuardStop when it has a checksum, and that of what is held now is another one.
        """
        self._load(stored.read())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def join_weights_group(self, address: str, port: int, world_size: int) -> bool:
        """Joins the group in which the actor broadcasts weights; whether all of it have."""
        self.receiver = None  # the group before it
        self.receiver = WeightsReceiver.join(self.process, address, port, world_size)
        return self.receiver is not None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def receive_weights(self) -> bool:
        """Loads what the actor broadcasts; whether all of it has arrived. GuardStop as in `load_bucket`."""
        return self.receiver is not None and self.receiver.receive(self._load)

    def _load(self, bucket: Bucket | FlatBucket) -> None:
        header = bucket.header
        self.version, self.sleeps_beside = None, ()
        self.engine.update_weights(bucket.weights(), first=header.number == 0, last=header.last)
        if header.checksums and (differing := self._differing(header)):
            raise GuardStop(
                f"generation rank {self.process.rank}: weights of version {header.version} did not arrive as"
                f" they were sent (bucket {header.number}, {differing})"
            )
        if header.last:
            self.version = header.version

    def _held(self) -> Mapping[str, torch.Tensor]:
        """The weights of an engine that gives them back; others are never asked (`config.Engine`)."""
        assert isinstance(self.engine, ReadableEngine)
        return self.engine.held()

    def _differing(self, header: Header) -> str:
        """The first weight that is not held as it was sent; "" where all processes of the engine hold all of
        them."""
        found = next(iter(header.differing(self._held())), "")
        if self.spec.tensor_parallel > 1:
            somewhere = process_group.all_reduce(torch.tensor([bool(found)]), "max").any()
            return found or ("one of another process" if somewhere else "")
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, read_only=True)
    def first_difference_in_bucket(self, stored: StoredValue) -> str | None:
        """The first tensor of the bucket that is not the one held; None: all are."""
        return first_difference(self._held(), stored.read().weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, beside: Sequence[str]) -> None:
        """Gives back the memory of the weights until new ones come, for other roles that work on the same
        devices."""
        self.engine.sleep()
        self.version, self.sleeps_beside = None, beside

    @register(dispatch_mode=mesh_mode("rollout"), blocking=False, read_only=True)
    def generate(self, batch: DataProto) -> DataProto:
        """Samples as `meta_info["sampling"]` says. `meta_info["visit"]` is the second part of the key of
        every random draw: the epoch, negative for validation. GuardStop when the weights are not of
        `meta_info["version"]`.
        """
        promised = batch.meta_info["version"]
        if self.version != promised:
            held = "none that are complete" if self.version is None else f"those of version {self.version}"
            if self.sleeps_beside:
                held = f"none: it sleeps while {' and '.join(self.sleeps_beside)} work on its devices"
            raise GuardStop(
                f"generation rank {self.process.rank} was to sample with weights of version {promised}, and"
                f" holds {held}"
            )
        sampling_spec: SamplingSpec = batch.meta_info["sampling"]
        prompts, visit = rows(batch.get("prompts")), batch.meta_info["visit"]
        request = GenerationRequest(
            prompts=prompts,
            samples=[sampling_spec.n] * len(prompts),
            keys=[(self.spec.seed, visit, str(uid)) for uid in batch.non_tensor_batch["uid"]],
        )
        output = self.engine.generate(request, self._params(sampling_spec))
        return _trajectories(batch.get("prompts"), request.samples, output, promised, self.replica)

    def _params(self, sampling_spec: SamplingSpec) -> SamplingParams:
        return SamplingParams(
            temperature=sampling_spec.temperature,
            top_k=sampling_spec.top_k,
            top_p=sampling_spec.top_p,
            max_tokens=self.spec.max_tokens,
            ignore_eos=self.spec.rollout.ignore_eos,
            stop_token_ids=sampling_spec.stop_token_ids,
            stop=sampling_spec.stop,
        )


def _stop_tokenizer(spec: RolloutSpec) -> TokenizersBackend | None:
    """None where no response ends at a string."""
    if not every_stop_string(spec.rollout):
        return None
    field = f"{spec.section.removesuffix('rollout')}model"
    return streaming_tokenizer(
        load_tokenizer(spec.model, field=field, chat=False), spec.rollout, section=spec.section
    )


def _trajectories(
    prompts: torch.Tensor, samples: Sequence[int], output: GenerationOutput, version: int, replica: int
) -> DataProto:
    """Columns of `samples[i]` trajectories for each prompt i; `lengths` (B,) int32 counts prompt and
    response."""
    values, response_lengths = parts(output.responses)
    repeated = take(prompts, np.repeat(np.arange(len(samples)), samples))
    lengths = parts(repeated)[1] + response_lengths
    return DataProto.from_dict(
        tensors={
            "prompts": repeated,
            "responses": output.responses,
            "response_mask": from_parts(torch.ones_like(values), response_lengths),
            "rollout_log_probs": output.log_probs,
            "lengths": lengths.to(torch.int32),
            "versions": torch.full((len(lengths),), version, dtype=torch.int32),
            "replica": torch.full((len(lengths),), replica, dtype=torch.int32),
            "finish_reason": torch.tensor(
                [FINISH_REASONS.index(reason) for reason in output.finish_reason], dtype=torch.int8
            ),
        }
    )
