"""The house rule that no file is unpickled or run: the ways that Python and our libraries have, by name."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from source_tree import FILES, label, tree_of

RUNS_CODE = (
    *(
        "pickle._Unpickler",
        "*pickle.load",
        "*pickle.loads",
        "*pickle._load",
        "*pickle._loads",
        "*pickle.Unpickler",
        "*.read_pickle",
    ),
    *(
        "dill.*",
        "joblib.load",
        "shelve.*",
        "marshal.load*",
        "runpy.*",
        "eval",
        "exec",
        "builtins.eval",
        "builtins.exec",
    ),
    *("yaml.Loader", "yaml.*UnsafeLoader", "yaml.*FullLoader", "yaml.unsafe_load*", "yaml.full_load*"),
    *("torch.hub.*", "torch.package.*", "torch.jit.load", "torch.serialization.load"),
    *(
        "torch.distributed.checkpoint.*load*",
        "torch.distributed.checkpoint.*FileSystemReader",
        "torch.distributed.checkpoint.format_utils*",
    ),
)
"""Names of what unpickles or runs a file. torch.load and from_pretrained are looked at more closely."""

ALLOWED = {
    (
        "hydraflow/rewards/sandbox_program.py",
        "exec",
    ): "runs a response's program, in a sandbox that holds nothing else",
    (
        "hydraflow/engine/dcp_index.py",
        "pickle.Unpickler",
    ): "makes inert records of the few names that an index holds, refuses others",
    (
        "hydraflow/dispatch/transport.py",
        "pickle.Unpickler",
    ): "what processes of one run send each other; no file",
    (
        "hydraflow/workers/weights_shared.py",
        "pickle.loads",
    ): "what the actor sends, on a socket that only this user's processes reach; no file",
    (
        "hydraflow/dispatch/agent.py",
        "runpy.run_path",
    ): "Ray's own agent, which Ray's node process has on its command line",
    (
        "hydraflow/dispatch/template_server.py",
        "runpy.run_path",
    ): "Ray's own worker script, asked for through a socket that only this user reaches",
    (
        "hydraflow/engine/dcp_reader.py",
        "torch.distributed.checkpoint.FileSystemReader",
    ): "its unpickling is overridden there",
    (
        "hydraflow/engine/sharded_checkpoint.py",
        "torch.distributed.checkpoint.load",
    ): "with the reader of dcp_reader.py, which knows tensors alone",
}

PICKLED_WEIGHTS = ("AutoModelForCausalLM", "AutoModelForTokenClassification", "AutoModel", "PreTrainedModel")
"""Classes whose from_pretrained may read pytorch_model.bin."""


def found_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything in a file that unpickles or runs another file."""
    aliases = aliases_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = resolved(node, aliases)
            if any(fnmatchcase(name, pattern) for pattern in RUNS_CODE):
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom):
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                (node.lineno, name)
                for name in named
                if any(fnmatchcase(name, pattern) for pattern in RUNS_CODE)
            )
        elif isinstance(node, ast.Call) and (name := unguarded(node, aliases)):
            yield node.lineno, name


def aliases_in(tree: ast.Module) -> dict[str, str]:
    """What a name stands for that an import made."""
    made = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            made |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            made |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return made


def resolved(node: ast.expr, aliases: dict[str, str]) -> str:
    """A dotted name with its first part as it was imported."""
    first, dot, rest = ast.unparse(node).partition(".")
    return f"{aliases.get(first, first)}{dot}{rest}"


def unguarded(call: ast.Call, aliases: dict[str, str]) -> str | None:
    """A call of torch.load or of a model's from_pretrained that does not say weights_only=True, or one that
    lets numpy unpickle."""
    name = resolved(call.func, aliases)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
    if given.get("allow_pickle", "False") != "False":
        return f"{name} with allow_pickle"
    reads = name == "torch.load" or (
        name.endswith(".from_pretrained") and name.split(".")[-2] in PICKLED_WEIGHTS
    )
    return f"{name} without weights_only=True" if reads and given.get("weights_only") != "True" else None


def test_no_file_is_unpickled_or_run() -> None:
    wrong = [
        f"{label(path)}:{line}: {name}"
        for path in FILES
        for line, name in found_in(tree_of(path))
        if (label(path), name) not in ALLOWED
    ]
    assert wrong == []


def test_no_exception_is_left_over() -> None:
    used = {(label(path), name) for path in FILES for _, name in found_in(tree_of(path))}
    assert ALLOWED.keys() <= used


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(file)",
        "import pickle as p\np.loads(data)",
        "from pickle import Unpickler",
        "from pickle import loads as read\nread(data)",
        "from ray import cloudpickle\ncloudpickle.loads(data)",
        "import pickle\nread = pickle.load",
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=trusted)",
        "from torch import load\nload(file)",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state, checkpoint_id=folder)",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint.filesystem as fs\nfs.FileSystemReader(folder)",
        "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(path)",
        "import yaml\nyaml.load(text, yaml.UnsafeLoader)",
        "import pandas\npandas.read_pickle(file)",
        "eval(text)",
    ],
)
def test_the_rule_sees_a_breach(source: str) -> None:
    assert list(found_in(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(file, weights_only=True)",
        "import pickle\npickle.dumps(value)",
        "import numpy as np\nnp.load(file)",
        "model.eval()",
        (
            "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained(path,"
            " weights_only=True)"
        ),
        "import json\njson.load(file)",
    ],
)
def test_the_rule_lets_pass_what_is_right(source: str) -> None:
    assert not list(found_in(ast.parse(source)))
