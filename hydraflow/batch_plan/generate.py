"""The batch plan of generation alone: how the sampling processes share the prompts of a file.

In: the configuration, how many prompts there are. Out: one `GeneratePlan`, or one `ConfigError` with every
broken rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hydraflow.batch_plan.layout import Cluster, Devices, Layout, Pool
from hydraflow.batch_plan.parts import Plan, Quantity, no_sizes
from hydraflow.batch_plan.repair import Violation, problems
from hydraflow.batch_plan.rules import engine_violations
from hydraflow.batch_plan.settings import Settings, value_at
from hydraflow.device import planned_type
from hydraflow.errors import ConfigError
from hydraflow.schema import GenerateConfig

WAVES_PER_CALL = 4
"""How often a call fills `rollout.max_num_seqs`. Bounded, so that long files show progress and no call hits
`trainer.rpc_timeout`; more than one, so that prompts of similar length can share a wave."""


@dataclass(frozen=True)
class GeneratePlan(Plan):
    """Every number that generation takes from the batch-size keys."""

    samples_per_prompt: int
    """n: responses per prompt."""
    replicas: int
    """Processes that sample, each with the whole model."""
    concurrent_sequences: int
    """Sequences that one of them decodes at the same time."""
    prompts_per_call: int
    """Prompts in one call, over all processes."""
    prompts: int | None
    """None: not known."""
    cluster: Cluster
    layouts: dict[str, Layout]
    quantities: tuple[Quantity, ...]
    """The same numbers for the table: unit, formula, origin."""
    notes: tuple[str, ...] = ()


def resolve_generate_plan(
    config: GenerateConfig,
    *,
    prompts: int | None,
    devices_per_node: int = 2,
    origins: Mapping[str, str] | None = None,
) -> GeneratePlan:
    """The plan of sampling for `prompts` prompts (None: not known). `origins`: where each key's value comes
    from.

    `devices_per_node` is used if `trainer.n_gpus_per_node` is null. Raises ConfigError with all broken rules.

    >>> config = GenerateConfig()
    >>> config.rollout.n, config.rollout.max_num_seqs = 4, 100
    >>> resolve_generate_plan(config, prompts=1000).prompts_per_call
    200
    """
    settings = Settings(config, GenerateConfig(), origins or {})

    def judge(values: Mapping[str, object]) -> list[Violation]:
        changed = settings.changed(values)
        rollout, data = changed.config.rollout, changed.config.data
        tokens = (data.max_prompt_length, data.max_response_length)
        device_type = planned_type(changed.config.trainer.device)
        limits = engine_violations(rollout, "rollout", tokens=tokens, device_type=device_type)
        return no_sizes(changed) or list(limits)

    if judge({}):
        raise ConfigError(problems(judge, lambda key: value_at(config, key)))
    per_node = config.trainer.n_gpus_per_node or devices_per_node
    replicas, n, concurrent = config.trainer.nnodes * per_node, config.rollout.n, config.rollout.max_num_seqs
    per_call = max(1, WAVES_PER_CALL * concurrent * replicas // n)
    layout = Layout("rollout", config.rollout.name, Devices((range(replicas),)), per_node)
    return GeneratePlan(
        samples_per_prompt=n,
        replicas=replicas,
        concurrent_sequences=concurrent,
        prompts_per_call=per_call,
        prompts=prompts,
        cluster=Cluster((Pool("trainer", config.trainer.nnodes, per_node, 0),)),
        layouts={"rollout": layout},
        quantities=tuple(_quantities(settings, prompts, replicas, per_call)),
    )


def _quantities(
    settings: Settings[GenerateConfig], prompts: int | None, replicas: int, per_call: int
) -> Iterator[Quantity]:
    n, concurrent = settings.config.rollout.n, settings.config.rollout.max_num_seqs
    if prompts is not None:
        yield Quantity("prompts", "prompts", prompts, "counted in the files")
    yield Quantity("responses per prompt n", "responses", n, "", settings.origin("rollout.n"))
    if prompts is not None:
        yield Quantity("responses", "responses", prompts * n, f"prompts·n = {prompts}·{n}")
    yield Quantity("replicas", "processes", replicas, "one per process")
    given = settings.origin("rollout.max_num_seqs")
    yield Quantity("sequences at a time", "sequences per replica", concurrent, "", given)
    formula = f"⌊{WAVES_PER_CALL}·sequences·replicas/n⌋ = ⌊{WAVES_PER_CALL}·{concurrent}·{replicas}/{n}⌋"
    yield Quantity("prompts per call", "prompts", per_call, formula)
    if prompts is not None:
        yield Quantity("calls", "calls", -(-prompts // per_call), f"⌈{prompts}/{per_call}⌉")
