"""Configuration of rewards. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import (
    FINITE,
    GIBIBYTES,
    SECONDS,
    Implementation,
    Planned,
    Switch,
    free,
    no_effect_when,
    option,
    required,
    unless,
)

FUNCTIONS: dict[str, Implementation] = {
    "data_source": Implementation("hydraflow.rewards.functions:by_source", reads=("sandbox", "timeout")),
    "exact": Implementation("hydraflow.rewards.functions:exact"),
    "gsm8k": Implementation("hydraflow.rewards.functions:gsm8k"),
    "math": Implementation("hydraflow.rewards.mathematics:equivalent"),
    "math_dapo": Implementation("hydraflow.rewards.mathematics:after_answer"),
    "mcq": Implementation("hydraflow.rewards.multiple_choice:mcq"),
    "code": Implementation("hydraflow.rewards.code:passed_tests", reads=("sandbox", "timeout")),
    "format": Implementation("hydraflow.rewards.functions:follows_format"),
    "length": Implementation("hydraflow.rewards.functions:length"),
    "judge": Implementation("hydraflow.rewards.judge:judged", reads=("judge",)),
}
"""The built-in functions for `reward.functions`. Each takes any of data_source, solution_str, ground_truth
and extra_info, and its own keyword arguments."""
MANAGERS = ("naive", "batch", "prime", "dapo")

NO_FUNCTION = no_effect_when(lambda s: s.path is None, "{s}.path is not given", "{s}.path=...")
NO_PROCESS = no_effect_when(
    lambda s: s.num_workers == 0,
    "rows that are scored in the calling process have no limits",
    "{s}.num_workers=1",
)
SHARED_DEVICES = unless(
    "enable_resource_pool", why="{s}.enable_resource_pool=false: it shares the trainer's devices"
)


@dataclass
class CustomRewardConfig:
    """A reward function from a file of the user's."""

    path: str | None = None
    """Python file with the function; null: the built-in functions, selected by data.reward_fn_key."""
    name: str = option("compute_score", no_effect=NO_FUNCTION)
    """Name of the function, def or async def: name(data_source, solution_str, ground_truth, extra_info,
    **reward_kwargs) -> float or dict with 'score'."""
    reward_kwargs: dict[str, Any] = option(factory=dict, no_effect=NO_FUNCTION)
    """Extra keyword arguments of the function."""


@dataclass
class RewardManagerConfig:
    """How reward functions are called."""

    name: str = option("naive", choices=MANAGERS)
    """naive, prime and dapo: call with one row. batch: call reward.custom_reward_function with many rows, as
    lists named data_sources, solution_strs, ground_truths and extra_infos; it returns a list of scores."""


@dataclass
class SandboxConfig:
    """Limits for the programs that the code function runs. Each runs in its own namespaces, without network
    and with no files except the interpreter's and a temporary folder."""

    timeout: float = option(4.0, rule=SECONDS)
    """Wall-clock limit of one test, in seconds; reward.timeout limits all tests of a row together."""
    memory: float = option(1.0, rule=GIBIBYTES)
    """Memory limit of each process of a program, and size limit of its temporary folder, in GiB."""
    processes: int = option(16, ge=1)
    """Maximum processes and threads of a program."""
    output: int = option(1_000_000, ge=1)
    """Maximum output of a program in one test, in bytes."""
    python: str | None = None
    """Python interpreter for programs, such as that of a virtual environment with numpy; null: this
    interpreter, with the standard library only."""


@dataclass
class JudgeConfig:
    """The judge function: a language model behind an OpenAI-compatible endpoint (vLLM, SGLang, a service)."""

    base_url: str | None = None
    """Address of the endpoint, such as http://host:8000/v1."""
    model: str | None = None
    """Model name in requests to the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; null: the endpoint needs none."""
    prompt: str = (
        "Judge the answer to a task.\n\nReference answer: {ground_truth}\n\nAnswer: {solution_str}\n\n"
        "Is the answer right? Explain in a few words, then end with a line 'Score: 1' or 'Score: 0'."
    )
    """The user message; {data_source}, {solution_str}, {ground_truth} and {extra_info[<key>]} are replaced by
    the row's."""
    pattern: str = r"Score:\s*(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression whose only group is the score; the last match in the answer counts."""
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further fields of a request, such as max_tokens."""
    timeout: float = free(10.0, rule=SECONDS)
    """Time limit of one request in seconds; reward.timeout limits all attempts together."""
    max_retries: int = free(2, ge=0)
    """Retries if the endpoint cannot be reached, is overloaded (429) or fails (5xx), with exponential backoff
    from half a second, or as the endpoint's Retry-After says."""
    cache_dir: str | None = free(None)
    """Folder that caches answers with a score by request; null: no cache."""


@dataclass
class RewardModelConfig:
    """A model that scores responses."""

    enable: bool = option(False, switch=Switch(off=False, remedy="{s}.enable=true"))
    """Score with a reward model. A reward function for the row's data source still provides acc."""
    model_path: str | None = option(
        None, beside=required("{s}.enable=true scores with it", "{s}.model_path=...")
    )
    """Directory of the model, as main_rm writes it: with score.weight and the policy's tokenizer."""
    micro_batch_size_per_gpu: int | None = free(None, size=True)
    """Micro-batch size in trajectories per data rank; null: the largest that fits max_token_len_per_gpu."""
    max_token_len_per_gpu: int = free(32768, size=True)
    """Token budget per device of one forward pass."""
    enable_resource_pool: bool = free(False)
    """Dedicated devices for the reward model: nnodes machines with n_gpus_per_node each."""
    nnodes: int = free(1, size=True, no_effect=SHARED_DEVICES)
    """Number of dedicated machines."""
    n_gpus_per_node: int = free(8, size=True, no_effect=SHARED_DEVICES)
    """Devices on each dedicated machine."""
    device_mapping: Any = free(None)
    """Devices of the role; null: all devices of the trainer, or the dedicated ones."""
    tensor_model_parallel_size: int = free(
        1,
        size=True,
        planned=Planned(lambda value: value > 1, "divide the model's matrices among {value} devices"),
        verl=("rollout.tensor_model_parallel_size",),
    )
    """Tensor-parallel size."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    functions: list[Any] = field(default_factory=list)
    """Several functions whose weighted sum is the score: a list of {name, weight, kwargs}, or for your own
    file {path, name, weight, kwargs}. The mean of each is logged as reward/<name>. Empty:
    custom_reward_function, or else the function of the row's data source."""
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    max_concurrent: int = free(64, ge=1, no_effect=NO_PROCESS)
    """Maximum rows that a reward process scores concurrently with an asynchronous function, such as the
    judge."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    num_workers: int = free(1, ge=0, le=1024)
    """Number of reward processes, each scoring one row at a time unless the function is asynchronous; a
    function of batches gets all rows in one process. 0: score in the calling process, where breakpoint()
    works and rows have no limits."""
    timeout: float = free(10.0, rule=SECONDS, no_effect=NO_PROCESS)
    """Time limit per row in seconds, not counting time spent waiting for a CPU; at most four times as long in
    wall-clock time. A row over the limit fails."""
    max_memory: float = free(16.0, rule=GIBIBYTES, no_effect=NO_PROCESS)
    """Memory limit, in GiB, of a reward process and of each process it starts (RLIMIT_DATA: allocated, used
    or not). A row over the limit raises MemoryError."""
    failure_score: float = option(0.0, rule=FINITE)
    """Score of a failed row: in main_eval, and in training with on_failure=score."""
    max_failed_share: float = free(0.5, ge=0, le=1)
    """Fraction of failed rows in a step, a validation or a file of main_eval above which the run ends with
    exit code 5; 1.0: never."""


@dataclass
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO), in training."""

    enable: bool = option(False, switch=Switch(off=False, remedy="{s}.enable=true"))
    """Penalize responses that nearly reach the maximum length."""
    len: int = option(512, ge=1)
    """Buffer length: tokens before the maximum length over which the penalty grows from 0."""
    penalty_factor: float = option(1.0, ge=0)
    """Penalty at the maximum length."""
    log: bool = False
    """Log the penalties: critic/overlong_reward, and critic/overlong, the fraction of responses with one."""


@dataclass
class RewardKwargsConfig:
    """Adjustments of the reward function's scores, under verl's names."""

    overlong_buffer_cfg: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    max_resp_len: int | None = option(
        None,
        ge=1,
        no_effect=no_effect_when(
            lambda s: not s.overlong_buffer_cfg.enable,
            "{s}.overlong_buffer_cfg.enable=false",
            "{s}.overlong_buffer_cfg.enable=true",
        ),
    )
    """Maximum response length for overlong_buffer_cfg, in tokens; null: data.max_response_length."""


@dataclass
class ModelRewardConfig(RewardConfig):
    """Rewards of a training run, with an optional reward model."""

    on_failure: str = option("mask", choices=("mask", "score"))
    """What to do with a row whose function raised or exceeded a limit. mask: exclude it from training and
    from its group's statistics; score: train on it with failure_score."""
    reward_kwargs: RewardKwargsConfig = field(default_factory=RewardKwargsConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
