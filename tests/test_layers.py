"""The architecture, as a law: imports go down the layers, folders form no cycle, and each dependency has one
door."""

import ast
import sys
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_tree import FILES, MODULES, ROOT, imports, label, module_name, top_part, tree_of

LAYERS = (
    {"schema", "options", "errors", "device", "redact", "system"},
    {"batch_plan", "memory", "metrics", "protocol", "algorithms", "models", "weights"},
    {"dispatch", "engine", "generation", "data", "rewards", "tracking"},
    {"workers"},
    {"trainer"},
    {"compose", "recipes"},
    {"jobs", "explain", "checkup", "main_*", "plan", "doctor", "slurm", "logs", "report", "model_merger"},
)
"""By folder or file directly below hydraflow/. Besides these, every config.py is in layer 0."""

STRANGERS = 2
"""The layer whose folders do not import each other."""

DOORS = {
    "ray": ["dispatch/*"],
    "hydra": ["compose/*", "main_*.py"],
    "omegaconf": ["compose/*", "main_*.py"],
    "torch.distributed": ["engine/*", "model_merger/split.py", "generation/vllm.py"],
    "torch.utils.tensorboard": ["tracking/tensorboard.py"],
    "tensorboard": ["tracking/tensorboard.py"],
    "wandb": ["tracking/wandb.py"],
    "mlflow": ["tracking/mlflow.py"],
    "swanlab": ["tracking/swanlab.py"],
    "vllm": [
        "generation/vllm.py",
        "generation/vllm_worker.py",
        "generation/vllm_executor.py",
        "generation/vllm_experts.py",
        "generation/vllm_adapters.py",
    ],
    "megatron": ["engine/megatron/*"],
    "flash_attn": ["models/attention.py"],
    "triton": ["models/triton_kernels.py"],
}
"""Library -> the only files below hydraflow/ that may use it."""


def layer_of(module: str) -> int:
    """Layer of one of our modules; the package itself is below everything."""
    if module == "hydraflow" or is_config(module):
        return 0
    part = top_part(module)
    found = [number for number, names in enumerate(LAYERS) if any(fnmatch(part, name) for name in names)]
    assert found, f"{module}: tests/test_layers.py gives {part!r} no layer"
    return found[0]


def is_config(module: str) -> bool:
    return module.endswith(".config") or module == "hydraflow.schema"


def our_imports(path: Path, tree: ast.Module | None = None) -> set[str]:
    return {name for name in imports(path, tree) if name.split(".")[0] == "hydraflow"}


def upward(module: str, imported: str) -> str | None:
    """What is wrong with the import, or None."""
    if layer_of(imported) > layer_of(module):
        return f"layer {layer_of(module)} imports {imported} of layer {layer_of(imported)}"
    if layer_of(module) == layer_of(imported) == STRANGERS and top_part(module) != top_part(imported):
        return f"imports {imported}: folders of layer {STRANGERS} do not know each other"
    if top_part(module) == "compose" != top_part(imported):
        allowed = layer_of(imported) == 0 or top_part(imported) == "batch_plan"
        return None if allowed else f"imports {imported}: compose knows layer 0 and batch_plan only"
    return None


def test_imports_go_down() -> None:
    wrong = [
        f"{label(path)}: {problem}"
        for path in FILES
        for imported in sorted(our_imports(path))
        if (problem := upward(module_name(path), imported))
    ]
    assert wrong == []


def test_folders_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        module = module_name(path)
        if is_config(module):
            continue
        others = {top_part(name) for name in our_imports(path) if not is_config(name)} - {
            top_part(module),
            "",
        }
        graph.setdefault(top_part(module), set()).update(others)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"folders import each other: {' <- '.join(error.args[1])}")


def test_config_needs_the_standard_library_only() -> None:
    facts = {"hydraflow.options", "hydraflow.device"}
    for path in FILES:
        if not is_config(module_name(path)):
            continue
        ours = {name for name in imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
        assert {name for name in ours if not is_config(name)} <= facts, label(path)


def test_each_dependency_has_one_door() -> None:
    wrong = [
        f"{label(path)} uses {name}; only {doors} may"
        for path in FILES
        for name in sorted(set(imports(path)) | attribute_chains(tree_of(path)))
        for library, doors in DOORS.items()
        if (name == library or name.startswith(f"{library}."))
        and not any(fnmatch(path.relative_to(ROOT / "hydraflow").as_posix(), door) for door in doors)
    ]
    assert wrong == []


KNOW_CUDA = {"device.py", "no_cuda.py"}
"""The one place that asks for a device, and what stands in for CUDA in a library."""


def test_only_device_py_knows_cuda() -> None:
    wrong = [
        f"{label(path)}:{getattr(node, 'lineno', '?')}: ask hydraflow.device instead"
        for path in FILES
        if path.name not in KNOW_CUDA
        for node in ast.walk(tree_of(path))
        if names_cuda(node)
    ]
    assert wrong == []


def names_cuda(node: ast.AST) -> bool:
    """`x.cuda`, `x.cuda(...)`, "cuda", "cuda:0". Docstrings and messages may say the word."""
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == "cuda" or node.value.startswith("cuda:"))
    )


def attribute_chains(tree: ast.Module) -> set[str]:
    """`torch.distributed.barrier()` without an import of its own -> torch.distributed,
    torch.distributed.barrier."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.")
    }


ENGINE = MODULES["hydraflow.engine"]


@pytest.mark.parametrize(
    "source",
    [
        "from hydraflow.trainer.ppo import step",
        "def f():\n    import hydraflow.workers.actor",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hydraflow.generation import base",
        "from ..trainer import ppo",
        "from hydraflow import compose",
    ],
)
def test_the_law_sees_a_breach(source: str) -> None:
    assert [name for name in our_imports(ENGINE, ast.parse(source)) if upward("hydraflow.engine", name)]


@pytest.mark.parametrize(
    "source",
    ["from hydraflow.trainer.config import RunConfig", "from hydraflow import metrics", "from . import base"],
)
def test_the_law_lets_pass_what_is_right(source: str) -> None:
    assert not [name for name in our_imports(ENGINE, ast.parse(source)) if upward("hydraflow.engine", name)]


def test_the_doors_see_a_use_without_an_import() -> None:
    assert "torch.distributed" in attribute_chains(ast.parse("import torch\ntorch.distributed.barrier()"))
    assert any(names_cuda(node) for node in ast.walk(ast.parse("tensor.cuda()")))
    assert any(names_cuda(node) for node in ast.walk(ast.parse("device = f'cuda:{rank}'")))
    assert not any(names_cuda(node) for node in ast.walk(ast.parse("raise ValueError('cpu or cuda')")))
