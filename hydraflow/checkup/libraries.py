"""Libraries that must fit each other: compares the versions that they require, and tries them.

In: the configuration. Out: findings about our own requirements, tensordict with torch, the libraries of
generation engines with torch, Megatron-Core, flash-attn, and Triton. What may crash the interpreter (compiled
code that was built for another torch) is imported in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import CheckSkipped, Finding, note, ok, problem, warning
from hydraflow.checkup.probe import run_python
from hydraflow.engine.config import MEGATRON
from hydraflow.generation.config import GENERATION_ENGINES

OURS = "hydraflow-trainer"
PROBE_SECONDS = 180.0
"""Seconds that importing a library may take: cold disks are slow."""
_FLASH = """import flash_attn, torch; from flash_attn import flash_attn_varlen_func
print(flash_attn.__version__, torch.__version__)"""
_TRITON = """import sys, triton; from hydraflow.models.triton_kernels import try_out
try_out(sys.argv[1]); print(triton.__version__)"""


def check_versions(context: CheckContext) -> Iterator[Finding]:
    """The installed versions against the requirements of hydraflow and of its libraries."""
    libraries = ["torch", "tensordict", "transformers", "ray"]
    broken = broken_requirements(OURS, "megatron" if trains_with_megatron(context) else "")
    broken += [text for name in ("tensordict", "transformers", "peft") for text in broken_requirements(name)]
    for text in broken:
        yield problem(text, f"pip install {_quoted(text)}")
    if not broken:
        yield ok(", ".join(f"{name} {installed(name) or 'missing'}" for name in libraries))


def broken_requirements(distribution: str, extra: str = "") -> list[str]:
    """Unmet requirements of an installed distribution and of one extra; empty if pip did not install it (a
    clone).

    >>> broken_requirements("no-such-distribution")
    []
    """
    try:
        asked = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in asked:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue  # for another machine, or for another extra
        version = installed(requirement.name)
        needs = f"{distribution} needs {requirement.name}{requirement.specifier}"
        if version is None:
            found.append(f"{needs}, which is not installed")
        elif not any(
            requirement.specifier.contains(one, prereleases=True)
            for one in (version, importlib.metadata.version(requirement.name))  # some require a +cpu build
        ):
            found.append(f"{needs}, but {version} is installed")
    return found


def installed(distribution: str) -> str | None:
    """The installed version, without a build's suffix (2.13.0+cpu counts as 2.13.0); None: not installed."""
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _quoted(text: str) -> str:
    """The requirement in a sentence of `broken_requirements`, for a shell."""
    found = re.search(r"needs ([^,\s]+(?:,[<>=!~][^,\s]+)*)", text)
    return f"'{found.group(1)}'" if found else ""


def check_tensordict(context: CheckContext) -> Iterator[Finding]:
    """Makes, indexes and joins a TensorDict: one built for another torch or machine fails here."""
    remedy, ours = "pip install --force-reinstall 'tensordict>=0.11'", f"tensordict {installed('tensordict')}"
    try:
        import torch
        from tensordict import TensorDict

        rows = TensorDict({"a": torch.arange(6).reshape(3, 2)}, batch_size=[3])
        joined: Any = torch.cat([rows[1:], rows[:1]])
        values = joined["a"].tolist()
    except (ImportError, AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
        yield problem(f"{ours} does not work with torch {installed('torch')}: {error}", remedy)
        return
    if values != [[2, 3], [4, 5], [0, 1]]:
        yield problem(f"{ours} gave {values} for rows 1, 2 and 0 of [[0, 1], [2, 3], [4, 5]]", remedy)
        return
    yield ok(f"{ours} and torch {installed('torch')}: made, indexed and joined rows")


def check_generation(name: str, context: CheckContext) -> Iterator[Finding]:
    """The library of a generation engine: its kernels are compiled against one version of torch, and for one
    kind of device."""
    library = GENERATION_ENGINES[name].needs
    assert library is not None, f"rollout.name={name} needs no library"
    asked = context.config.actor_rollout_ref.rollout.name
    if asked != name and not context.everything:
        raise CheckSkipped(f"actor_rollout_ref.rollout.name={asked}")
    if not library.is_installed:
        if asked != name:
            raise CheckSkipped(f"{library.name} is not installed, and this configuration does not need it")
        seen = f"actor_rollout_ref.rollout.name={asked}, but {library.name} is not installed"
        yield problem(seen, library.install)
        return
    for distribution in library.installed():
        for text in broken_requirements(distribution):
            if re.search(" needs torch[=<]", text):
                other = f"a build of {library.name} for torch {installed('torch')}"
                yield problem(text, f"pip install {_quoted(text)}, {other}, or a separate environment")
                return
    ended = run_python(library.probe, seconds=PROBE_SECONDS)
    printed = dict(re.findall(r"^(version|device)=(.*)$", ended.output, re.MULTILINE))
    version, device = printed.get("version") or library.version, printed.get("device")
    named = f"{library.name} {version or 'without a version'}"
    seen = f"{named}{f' for {device}' if device else ''}, torch {installed('torch')}"
    if ended.code != 0:
        failed = f"{named} cannot be imported with torch {installed('torch')}"
        yield problem(f"{failed}: {ended.reason}", library.install)
    elif not version:
        yield warning(f"{seen}: {library.minimum} or newer is needed", library.install)
    elif Version(version) < Version(library.minimum):
        yield problem(f"{seen}: older than {library.minimum}", library.install)
    elif device is not None and device != context.device_type:
        built = "" if device else ", built for no device here"
        yield problem(f"{seen}{built}: this run is on {context.device_type}", library.install)
    else:
        yield ok(seen)


def check_megatron(context: CheckContext) -> Iterator[Finding]:
    """The training engine imports Megatron-Core, and rewrites it where there is no CUDA."""
    library, version, asked = MEGATRON, MEGATRON.version, trains_with_megatron(context)
    if not asked and not context.everything:
        raise CheckSkipped("no role trains with it")
    if not version:
        if not asked:
            raise CheckSkipped(f"{library.name} is not installed, and this configuration does not need it")
        yield problem(f"strategy=megatron, but {library.name} is not installed", library.install)
        return
    ended = run_python(library.probe, seconds=PROBE_SECONDS)
    if ended.code != 0:
        yield problem(f"{library.name} {version} cannot be imported: {ended.reason}", library.install)
    else:
        yield ok(f"{library.name} {version}, torch {installed('torch')}: the training engine imports it")


def trains_with_megatron(context: CheckContext) -> bool:
    """Whether a role of this configuration uses Megatron-Core."""
    config = context.config
    strategies = {config.actor_rollout_ref.actor.strategy}
    if context.plan.critic is not None:
        strategies.add(config.critic.strategy)
    return "megatron" in strategies


def check_flash_attention(context: CheckContext) -> Iterator[Finding]:
    """flash-attn is optional; a build for another torch is not used, and attention falls back."""
    instead = "attention uses torch's own kernels: variable-length ones on a GPU in 16 bits, else SDPA"
    if importlib.util.find_spec("flash_attn") is None:
        yield ok(f"not installed: {instead}")
        return
    ended = run_python(_FLASH, seconds=PROBE_SECONDS)
    if ended.code == 0:
        yield ok(f"flash-attn and torch {ended.last}")
        return
    remedy = "pip install --force-reinstall --no-build-isolation flash-attn, or pip uninstall flash-attn"
    found = warning if context.device_type != "cpu" else note
    yield found(f"installed, but cannot be imported ({ended.reason}); {instead}", remedy)


def check_triton(context: CheckContext) -> Iterator[Finding]:
    """Tries a kernel. If kernels fail, GPUs compute with plain operations (`models/gpu_kernels.py`)."""
    if context.device_type == "cpu":
        raise CheckSkipped("its kernels are for GPUs")
    ended = run_python(_TRITON, context.device_type, seconds=PROBE_SECONDS)
    if ended.code == 0:
        yield ok(f"a kernel of Triton {ended.last} runs")
        return
    evidence = f"no kernel runs ({ended.reason}): steps are slower and take more memory"
    yield warning(evidence, "a C compiler, Python's headers, and the triton version that torch requires")
