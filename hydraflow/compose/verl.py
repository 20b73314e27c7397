"""Translates verl's keys: renamed ones, ones that verl ignores, ones that are not supported yet.

In: keys that are not ours with their values, and the known ones. Out: `Translation`; values of renamed keys
move to the known keys. Each command that corresponds to one of verl's has tables (`verl_table.py`,
`verl_data/`). Left out on purpose: the names of verl's files (`verl_trees.py`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from hydraflow.batch_plan.settings import COMMAND_LINE, DEFAULT, strength
from hydraflow.compose import verl_trees
from hydraflow.compose.keys import accepts, is_below_open, keys_for, known_above, known_keys, wrong_type
from hydraflow.compose.nearest import missing_words, nearest
from hydraflow.compose.patterns import fits
from hydraflow.compose.verl_table import (
    FOLLOWS,
    Alias,
    Ignored,
    Unsupported,
    accepted,
    aliases,
    defaults,
    tables,
)
from hydraflow.compose.verl_values import (
    adjust_dependent,
    frozen_routers,
    model_overrides,
    our_value,
    teachers,
    unbuilt_algorithms,
    unbuilt_engines,
)
from hydraflow.errors import Problem, shown
from hydraflow.redact import public
from hydraflow.schema import PPOConfig

Row = Alias | Ignored | Unsupported

_MISSPELT = 0.9
"""Similarity above which a name counts as a misspelling of another."""

_ROLES = re.compile(r"(?:actor_rollout_ref\.(?:actor|ref|rollout)|critic|reward\.reward_model)\.")


@dataclass
class Translation:
    """How keys that are not ours were handled."""

    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """All problems, those in `unsupported` included."""
    unsupported: list[Problem] = field(default_factory=list)
    ignored: list[Problem] = field(default_factory=list)
    """Accepted without effect."""
    untouched: Counter[str] = field(default_factory=Counter)
    """File -> how many of its verl keys are off or at verl's default; one note reports the number."""
    honoured: set[str] = field(default_factory=set)
    """Our keys that were set under another name."""
    names: dict[str, str] = field(default_factory=dict)
    """Our key -> the name under which the user set it; only if the value has the same unit."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Keys that verl does not have either, and their values."""

    def as_named(self, problem: Problem) -> Problem:
        """A problem with the user's names: a remedy under our name would set the key twice.

        >>> problem = Problem("critic.optim.clip_grad", 0, "must be above 0", "critic.optim.clip_grad=1.0")
        >>> print(Translation(names={"critic.optim.clip_grad": "critic.grad_clip"}).as_named(problem))
        critic.grad_clip=0: must be above 0
              -> critic.grad_clip=1.0
        """
        for ours, theirs in self.names.items():
            key = re.compile(rf"(?<![\w.]){re.escape(ours)}(?![\w.])")
            problem = replace(
                problem, field=key.sub(theirs, problem.field), remedy=key.sub(theirs, problem.remedy)
            )
        return problem


def classify(schema: type, key: str) -> Row | None:
    """The table row for a key that is not in the schema; None: no table has it.

    >>> classify(PPOConfig, "actor_rollout_ref.actor.ulysses_sequence_parallel_size").new
    'actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size'
    """
    moved = renamed(schema, key)
    known = known_keys(schema)
    if moved != key and (moved in known or is_below_open(known, moved)):
        return Alias(moved)
    other_names = aliases(schema)
    if alias := other_names.get(moved) or other_names.get(key):
        return alias
    for pattern, row in tables(schema).rows.items():
        if fits(pattern, moved) or fits(pattern, key):
            return row
    same = _same_of_ppo(schema, moved)
    like = classify(PPOConfig, same) if same else None
    if isinstance(like, Unsupported):
        for ours, theirs in tables(schema).like.items():
            like = replace(like, instead=like.instead.replace(theirs, ours))
    return None if isinstance(like, Alias) else like


def _same_of_ppo(schema: type, key: str) -> str | None:
    """The corresponding key of main_ppo, whose row also applies to this key."""
    sections = tables(schema).like.items()
    return next((there + key.removeprefix(here) for here, there in sections if key.startswith(here)), None)


def renamed(schema: type, key: str) -> str:
    """The key under its section's current name."""
    for old, new in tables(schema).sections.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


@dataclass(frozen=True)
class Translator:
    """Sorts foreign keys into `result`; values of renamed keys go to `leaves`, their origins to `origins`."""

    schema: type
    leaves: dict[str, Any]
    origins: dict[str, str]
    found_origins: Mapping[str, str]
    """Origins under the names that the user wrote."""
    interpolated: Container[str]
    """Keys whose values were written as interpolations."""
    result: Translation

    def translate(self, given: Mapping[str, Any]) -> None:
        """Sorts all of the given keys."""
        leaves, origins, result, foreign = self.leaves, self.origins, self.result, dict(given)
        result.problems += [*model_overrides(leaves, result.notes), *unbuilt_algorithms(self.schema, leaves)]
        result.unsupported += [
            *unbuilt_engines(leaves, origins, foreign),
            *frozen_routers(leaves),
            *_other_engine(self.schema, foreign),
        ]
        result.notes += teachers(leaves, origins, foreign, self.found_origins)
        # last, because they are divided by the number of ranks, which other keys determine
        waiting = {key: foreign[key] for key in foreign if counts_all_ranks(classify(self.schema, key))}
        for key in foreign:
            if key not in waiting:
                self._sort(key, foreign[key])
        self._follow()
        for key, value in waiting.items():
            self._sort(key, value)
        for origin, count in result.untouched.items():
            keys = "1 of verl's keys is" if count == 1 else f"{count} of verl's keys are"
            result.notes.append(f"{origin}: {keys} off or at verl's default, without effect here")
        result.problems += result.unsupported
        self._follow()
        result.notes += adjust_dependent(leaves, origins, frozenset(given))

    def _sort(self, key: str, value: Any) -> None:
        origin, row = self.found_origins.get(key, COMMAND_LINE), classify(self.schema, key)
        if value == {} and key not in self.found_origins and self.found_origins:
            return  # a verl group from a defaults list, which sets nothing
        follows = key in self.interpolated and defaults(self.schema).get(key) is ...
        idle = not isinstance(row, Alias) and (follows or _asks_for_nothing(self.schema, key, value, row))
        if in_file(origin) and idle:
            self.result.untouched[origin] += 1
        elif row is None:
            self.result.unknown[key] = value
        elif isinstance(row, Alias):
            for new, converted in self._renamed_values(key, value, row):
                self._take(key, new, converted, origin, row)
        else:
            self._report(key, value, row)

    def _report(self, key: str, value: Any, row: Ignored | Unsupported) -> None:
        """Reports a key without a counterpart as ignored or unsupported."""
        ignored, idle, remedy = self.result.ignored, "has no effect", f"leave out {key}"
        if isinstance(row, Ignored):
            effect = "has no effect in verl either" if row.in_verl_too else idle
            ignored.append(Problem(key, shown(value), f"{effect}: {row.why}", remedy))
        elif _is_harmless(self.schema, key, value, row) or (
            row.decided_by and _same(value, self.leaves.get(row.decided_by))
        ):
            ignored.append(Problem(key, shown(value), f"{idle}: it is off, or the default behaviour", remedy))
        else:
            rule = f"is not supported yet; in verl it would {row.would}"
            remedy += f" or {row.instead}" if row.instead else ""
            self.result.unsupported.append(Problem(key, shown(value), rule, remedy))

    def _renamed_values(self, old: str, value: Any, row: Alias) -> Iterator[tuple[str, Any]]:
        """(our key, value) for a renamed key; nothing for null, which leaves keys of older versions unset."""
        known = known_keys(self.schema).get(row.new)
        if value is None and known is not None and not accepts(known.hint, None):
            return
        if counts_all_ranks(row):
            yield from self._per_rank(old, row.new, value)
        elif old != "model_engine":
            yield row.new, our_value(row.new, value)[0]
        elif value == "megatron":
            yield from ((key, value) for key in verl_trees.STRATEGIES)
        elif value != "dp":
            remedy = "model_engine=dp or model_engine=megatron"
            self.result.problems.append(Problem(old, value, "there is no such engine here", remedy))

    def _per_rank(self, old: str, new: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Divides a size that counts rows over all data ranks by the number of ranks."""
        if value is None:
            return
        ranks = _data_ranks(new, self.leaves)
        if ranks is None:
            rule = "counts rows over all data ranks, whose number is not known here"
            remedy = f"{new}=... or trainer.n_gpus_per_node=..."
        elif not isinstance(value, int) or isinstance(value, bool) or value % ranks:
            rule = f"counts rows over all data ranks, so it must be divisible by their number, {ranks}"
            remedy = f"{new}={max(1, value // ranks) if isinstance(value, int) else 1}"
        else:
            yield new, value // ranks
            return
        self.result.problems.append(Problem(old, shown(value), rule, remedy))

    def _take(self, old: str, new: str, value: Any, origin: str, row: Alias) -> None:
        """Moves a renamed key's value to our key, unless that was set by a source of higher precedence."""
        known, leaves, result = known_keys(self.schema).get(new), self.leaves, self.result
        here, repeats = self.origins.get(new, DEFAULT), in_file(origin) and leaves.get(new) == value
        if new == row.new and not row.over_all_ranks and not repeats and strength(here) < strength(origin):
            result.names[new] = old
        if known is not None and not accepts(known.hint, value):
            result.problems.append(wrong_type(self.schema, known, value))
            return
        if strength(here) > strength(origin):
            ours = f"{new}={shown(leaves[new], new)}"
            result.notes.append(f"{old}={shown(value, old)}: {ours} takes precedence ({here})")
            return
        if strength(here) == strength(origin) and leaves.get(new) != value:
            rule = f"is another name for {new}, which is set to {shown(leaves.get(new), new)}"
            remedy = f"leave out {old} or {new}={shown(value, old)}"
            result.problems.append(Problem(old, shown(value), rule, remedy))
            return
        if repeats:
            return  # a default that the file repeats
        self._set(new, value)
        self.origins[new] = origin
        result.honoured.add(new)
        why = f" ({row.why})" if row.why else ""
        result.notes.append(f"{old}: taken as {new}={shown(public(value, old), new)}{why}")

    def _set(self, new: str, value: Any) -> None:
        """Sets a leaf, or a name inside an open one."""
        known, leaves = known_keys(self.schema), self.leaves
        if new in known:
            leaves[new] = value
            return
        above = known_above(known, new)
        assert above is not None
        leaves[above.path] = tree = dict(leaves.get(above.path) or {})
        *sections, last = new.removeprefix(f"{above.path}.").split(".")
        for section in sections:
            tree[section] = tree = dict(tree.get(section) or {})
        tree[last] = value

    def _follow(self) -> None:
        """Unset keys take the value of the key that they follow, if that is set."""
        known, leaves, origins = known_keys(self.schema), self.leaves, self.origins
        for key, leader in FOLLOWS.items():
            if key in known and leader in origins and key not in origins and leaves.get(leader) is not None:
                leaves[key], origins[key] = leaves[leader], f"follows {leader}"


def _other_engine(schema: type, foreign: dict[str, Any]) -> Iterator[Problem]:
    """The problem of a training engine that main_sft does not have; its remedy names every key that only this
    engine reads. Removes the keys from `foreign`."""
    key, engine = "engine.strategy", foreign.get("engine.strategy", "fsdp")
    row = classify(schema, key)
    if not isinstance(row, Unsupported) or _is_harmless(schema, key, engine, row):
        return
    del foreign[key]
    chosen = verl_trees.group_override(schema, "engine", None, engine) is not None
    remedy = "engine=fsdp optim=fsdp" if chosen else f"{key}=fsdp2"
    its_own = []
    for name in [name for name in foreign if name.startswith(("engine.", "optim."))]:
        row = classify(schema, name)
        is_harmless = isinstance(row, Unsupported) and _is_harmless(schema, name, foreign[name], row)
        if not is_harmless and not isinstance(row, Alias | Ignored):
            its_own.append(name)
            del foreign[name]
    remedy += f", and leave out {', '.join(its_own)}" if its_own else ""
    field = "engine" if chosen else key
    yield Problem(field, engine, "there is no such training engine for main_sft here", remedy)


def _asks_for_nothing(schema: type, key: str, value: Any, row: Row | None) -> bool:
    """Whether a file's key is off or only repeats a default of verl, of this version or another."""
    if row is None:
        return is_of_another_version(schema, key, value)
    if isinstance(row, Unsupported) and _is_harmless(schema, key, value, row):
        return True
    if _is_default(schema, key, value) or key.endswith("._target_"):
        return True
    return is_off(value) and defaults(schema).get(key, ...) is ...


def _is_harmless(schema: type, key: str, value: Any, row: Unsupported) -> bool:
    """Whether a value has no effect: verl's default, or one that the row lists."""
    return _is_default(schema, key, value) or any(_same(value, harmless) for harmless in row.harmless)


def _is_default(schema: type, key: str, value: Any) -> bool:
    """Whether a value is verl's default, of this version or another."""
    default = defaults(schema).get(key, _moved_defaults(schema).get(renamed(schema, key), ...))
    return (default is not ... and _same(value, default)) or is_other_default(schema, key, value)


@cache
def _moved_defaults(schema: type) -> dict[str, Any]:
    """verl's defaults under the current names of the sections."""
    return {renamed(schema, key): default for key, default in defaults(schema).items()}


def is_other_default(schema: type, key: str, value: Any) -> bool:
    """Whether a value is the default in another version of verl.

    >>> is_other_default(PPOConfig, "algorithm.filter_groups.metric", None)
    True
    """
    others = tables(schema).other_defaults.items()
    return any(_same(value, default) and fits(pattern, key) for pattern, default in others)


def in_file(origin: str) -> bool:
    """Whether a value was set in a YAML file, which may list defaults, rather than on the command line."""
    return origin not in (COMMAND_LINE, DEFAULT)


def is_off(value: Any) -> bool:
    """Whether a value means off for its key.

    >>> is_off(False), is_off(0), is_off("disabled"), is_off(1)
    (True, True, True, False)
    """
    nothing: tuple[object, ...] = (None, False, {}, [], 0, -1, "", "disabled")
    return any(_same(value, off) for off in nothing)


def is_of_another_version(schema: type, key: str, value: Any) -> bool:
    """Whether an unknown key of a file may be from another version of verl and has no effect: it is off, in a
    section that verl has, and not a misspelling of a key of that section."""
    section, _, name = key.rpartition(".")
    known = [*known_keys(schema), *defaults(schema)]
    beside = [one.removeprefix(f"{section}.") for one in known if one.startswith(f"{section}.")]
    names = {one.partition(".")[0] for one in beside}
    misspelt = difflib.get_close_matches(name, names, n=1, cutoff=_MISSPELT)
    return bool(section and names) and is_off(value) and not misspelt


def suggested(schema: type, problem: Problem, value: Any) -> Problem:
    """The problem of an unknown key, suggesting verl's nearest key first if none of ours is as near.

    >>> unknown = Problem("actor_rollout_ref.rollout.free_cache_engin", 1, "unknown key")
    >>> print(suggested(PPOConfig, unknown, True).remedy)
    actor_rollout_ref.rollout.free_cache_engine=true
    """
    ours = keys_for(schema, problem.field)
    verls = [key for key in [*defaults(schema), *aliases(schema), *accepted(schema)] if key not in ours]
    near = nearest(problem.field, [*ours, *verls], 1)
    if not near or near[0] in ours:
        return problem
    section, best = near[0].rpartition(".")[0], nearest(problem.field, ours, 1)
    is_beside = bool(best) and best[0].rpartition(".")[0] == section
    if is_beside and missing_words(problem.field, near[0]) is not None:
        return problem  # a shortened name means one of our keys, if its section has one
    first = f"{near[0]}={shown(public(public(value, problem.field), near[0]))}"
    rest = problem.remedy.split(" or ")[:2] if "=" in problem.remedy else []
    return replace(problem, remedy=" or ".join([first, *rest]))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(str(value).lower() == str(other).lower() if isinstance(value, str) else value == other)


def counts_all_ranks(row: Row | None) -> bool:
    """Whether a value must be divided by the number of data ranks, which depends on other keys."""
    return isinstance(row, Alias) and row.over_all_ranks


def _data_ranks(key: str, leaves: Mapping[str, Any]) -> int | None:
    """Number of data-parallel ranks of the role of `key`; None: not known, or a size is not a count."""
    found = _ROLES.match(key)
    role = found[0].replace(".rollout.", ".actor.") if found else ""
    engine = "critic.strategy" if role == "critic." else "actor_rollout_ref.actor.strategy"
    if leaves.get(engine) == "megatron":
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        sizes = [leaves.get(f"{role}megatron.{name}", 1) for name in names]
    else:
        sizes = [leaves.get(f"{role}fsdp_config.ulysses_sequence_parallel_size", 1)]
    devices = [leaves.get("trainer.n_gpus_per_node"), leaves.get("trainer.nnodes", 1)]
    if not all(isinstance(count, int) and count >= 1 for count in (*devices, *sizes)):
        return None
    return max(1, math.prod(devices) // math.prod(sizes))
