"""Which fields of configuration classes the source reads, and which of those reads a command can get to.

In: the syntax trees of the package. Out: `reads_below(definition)`: (class, field) of every
`expression.field` where the annotations say that the expression is of that class, in all the code that the
definition names, directly or through what it names.

A type is what the annotations of parameters, fields and return values say, followed through attributes,
assignments, loops and calls. House rules make that enough: every signature is typed, and options are read as
attributes. Containers count as what they hold, and where there are two answers, both are taken. A class
counts as reached when it is named, with all of its methods.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps

from source_tree import MODULES, tree_of

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SAME_TYPE = {"replace", "deepcopy", "copy"}
"""Calls that give what they are given."""
LOOKERS = ("hydraflow.compose.rules.", "hydraflow.compose.algorithm_rules.", "hydraflow.compose.effects.")
"""What only looks whether a value is legal, or has an effect: such a read makes nothing of the option."""
ESTIMATES = ("hydraflow.memory.",)
"""What foretells how much memory a run takes: the use of an option to a command that plans, not to a run."""


@dataclass(frozen=True)
class Scope:
    """The scope of an expression: whose names it sees."""

    module: str
    owner: str = ""
    """The class around it, as module.Class."""
    functions: tuple[Function, ...] = ()
    """The functions around it, the innermost last."""


# --- names --------------------------------------------------


@cache
def definitions(module: str) -> dict[str, ast.stmt]:
    """What a module defines, by name: functions, classes and variables."""
    found: dict[str, ast.stmt] = {}
    for node in tree_of(MODULES[module]).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@cache
def imported(module: str) -> dict[str, str]:
    """Name -> what it stands for, module or module.name, for what is imported from the package anywhere in
    the file."""
    nodes = [
        node
        for node in ast.walk(tree_of(MODULES[module]))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hydraflow")
    ]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names
    }


def resolve(module: str, node: ast.AST) -> str:
    """The definition that a name or module.name stands for, as module.name; empty when it is none of ours."""
    if isinstance(node, ast.Name):
        return f"{module}.{node.id}" if node.id in definitions(module) else imported(module).get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := resolve(module, node.value)) in MODULES:
        return f"{base}.{node.attr}"
    return ""


def definition(key: str) -> ast.stmt | None:
    module, _, name = key.rpartition(".")
    return definitions(module).get(name) if module in MODULES else None


def body_of(class_key: str) -> list[ast.stmt]:
    node = definition(class_key)
    return node.body if isinstance(node, ast.ClassDef) else []


def settled(find: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Remembers what was found; a search that comes back to itself finds nothing."""
    known: dict[tuple, set[str]] = {}

    @wraps(find)
    def remembered(*asked: object) -> set[str]:
        if asked not in known:
            known[asked] = set()
            known[asked] = find(*asked)
        return known[asked]

    return remembered


# --- types --------------------------------------------------


def annotated(module: str, annotation: ast.expr | None) -> set[str]:
    """Our classes that an annotation names, wherever in it: `list[X] | None` is X."""
    keys = {resolve(module, node) for node in ast.walk(annotation)} if annotation else set()
    return {key for key in keys if isinstance(definition(key), ast.ClassDef)}


def types_of(node: ast.AST, scope: Scope) -> set[str]:
    """The classes, as module.Class, that an expression may be an instance of."""
    match node:
        case ast.Name(id=name):
            return variable_types(name, scope)
        case ast.Attribute(value=base, attr=name):
            return {found for key in types_of(base, scope) for found in member_types(key, name)}
        case ast.Call(func=function, args=arguments):
            return result_types(function, arguments, scope)
        case ast.AnnAssign(annotation=annotation):
            return annotated(scope.module, annotation)
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.NamedExpr(value=inner):
            return types_of(inner, scope)
    return {found for child in ast.iter_child_nodes(node) for found in types_of(child, scope)}


@settled
def variable_types(name: str, scope: Scope) -> set[str]:
    for depth in range(len(scope.functions), 0, -1):
        function = scope.functions[depth - 1]
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if name in ("self", "cls") and name in [argument.arg for argument in arguments]:
            return {scope.owner}
        given = [
            annotated(scope.module, argument.annotation) for argument in arguments if argument.arg == name
        ]
        inside = Scope(scope.module, scope.owner, scope.functions[:depth])
        given += [types_of(value, inside) for value in bindings(function).get(name, [])]
        if given:
            return set().union(*given)
    node = definition(resolve(scope.module, ast.Name(name)))
    return annotated(scope.module, node.annotation) if isinstance(node, ast.AnnAssign) else set()


@settled
def member_types(class_key: str, name: str) -> set[str]:
    """The type of instance.name: as the class body says, or as a method assigns it to self."""
    module = class_key.rpartition(".")[0]
    found: set[str] = set()
    for node in body_of(class_key):
        match node:
            case ast.AnnAssign(target=ast.Name(id=member), annotation=annotation) if member == name:
                found |= annotated(module, annotation)
            case ast.FunctionDef(name=member, returns=returns) if member == name:
                found |= annotated(module, returns)
            case ast.FunctionDef():
                inside = Scope(module, class_key, (node,))
                found |= {
                    key for value in bindings(node).get(f"self.{name}", []) for key in types_of(value, inside)
                }
    return found or {key for base in bases(class_key) for key in member_types(base, name)}


def result_types(function: ast.expr, arguments: list[ast.expr], scope: Scope) -> set[str]:
    key = resolve(scope.module, function)
    match definition(key):
        case ast.ClassDef():
            return {key}
        case ast.FunctionDef(returns=returns):
            return annotated(key.rpartition(".")[0], returns)
    if isinstance(function, ast.Name | ast.Attribute) and ast.unparse(function).split(".")[-1] in SAME_TYPE:
        return types_of(arguments[0], scope) if arguments else set()
    return types_of(function, scope)


def bases(class_key: str) -> list[str]:
    node = definition(class_key)
    module = class_key.rpartition(".")[0]
    return (
        [key for base in node.bases if (key := resolve(module, base))]
        if isinstance(node, ast.ClassDef)
        else []
    )


@cache
def bindings(function: Function) -> dict[str, list[ast.AST]]:
    """Variable, or self.variable -> the expressions that are assigned to it or looped over, or its annotated
    assignment."""
    found: dict[str, list[ast.AST]] = {}

    def bind(target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for i, part in enumerate(target.elts):
                bind(part, value.elts[i] if same and isinstance(value, ast.Tuple) else value)
        else:
            found.setdefault(ast.unparse(target), []).append(value)

    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    bind(target, value)
            case ast.AnnAssign(target=target):
                found.setdefault(ast.unparse(target), []).append(node)
            case ast.NamedExpr(target=target, value=value):
                bind(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                bind(target, value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                bind(target, value)
    return found


# --- reads --------------------------------------------------


@cache
def reads_below(root: str, ignoring: tuple[str, ...] = LOOKERS) -> set[tuple[str, str]]:
    """(class, attribute) of all reads in the definition `root` and in those that it gets to, but for the
    places whose names begin with `ignoring`; classes as module.Class."""
    found: set[tuple[str, str]] = set()
    reached, waiting = set[str](), [root]
    while waiting:
        key = waiting.pop()
        if key in reached or definition(key) is None:
            continue
        reached.add(key)
        if not key.startswith(ignoring):
            found |= reads_in(key)
        waiting += names_in(key)
    return found


@cache
def reads_in(key: str) -> set[tuple[str, str]]:
    """The reads in one definition."""
    found: set[tuple[str, str]] = set()
    node = definition(key)
    assert node is not None
    for attribute, scope in attributes(node, Scope(key.rpartition(".")[0])):
        found |= {(owner, attribute.attr) for owner in types_of(attribute.value, scope)}
    return found


def names_in(key: str) -> set[str]:
    """The definitions that one names, but for those in its annotations."""
    module, node = key.rpartition(".")[0], definition(key)
    assert node is not None
    found: set[str] = set()
    waiting: list[ast.AST] = [node]
    while waiting:
        part = waiting.pop()
        found.add(resolve(module, part))
        found |= chosen_in(module, part)
        waiting += [child for name, child in children(part) if name not in ("annotation", "returns")]
    return found - {""}


def chosen_in(module: str, node: ast.AST) -> set[str]:
    """What `TABLE[name].load()` or `.bound(...)` may give, of a table of `options.Implementation`."""
    match node:
        case ast.Attribute(attr="load" | "bound", value=ast.Subscript(value=table)):
            made = definition(resolve(module, table))
            texts = [part.value for part in ast.walk(made) if isinstance(part, ast.Constant)] if made else []
            places = [text.split(":") for text in texts if isinstance(text, str) and ":" in text]
            return {f"{place}.{name.partition('.')[0]}" for place, name in places}
    return set()


def children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def attributes(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.Attribute, Scope]]:
    """Every attribute that is read, with its scope."""
    if isinstance(node, ast.ClassDef):
        scope = Scope(scope.module, f"{scope.module}.{node.name}")
    elif isinstance(node, Function):
        scope = Scope(scope.module, scope.owner, (*scope.functions, node))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node, scope
    for child in ast.iter_child_nodes(node):
        yield from attributes(child, scope)
