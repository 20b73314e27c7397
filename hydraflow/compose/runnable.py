"""What the planner accepts but a run cannot use: unimplemented features, libraries that are not installed.

In: a configuration. Out: one problem per key, which says what the key would do or needs. This is declared
beside the key's field (`options.py`), and removed when the feature is implemented. Left out on purpose:
whether the batch sizes fit together (`batch_plan/`), and which values are legal (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hydraflow.compose.effects import without_effect
from hydraflow.compose.keys import known_keys
from hydraflow.errors import Problem, shown
from hydraflow.options import Leaf, walk
from hydraflow.schema import JobConfig


def problems(config: JobConfig) -> list[Problem]:
    """One problem for each key that has an effect and asks for an unimplemented feature or a missing library.

    >>> from hydraflow.schema import PPOConfig
    >>> config = PPOConfig()
    >>> config.algorithm.filter_groups.enable = True
    >>> print(*problems(config))
    algorithm.filter_groups.enable=true: is not implemented yet, only planned: it would replace prompts \
whose responses all have the same acc
          -> algorithm.filter_groups.enable=false
    """
    schema: type = type(config)
    found = []
    for leaf in walk(config):
        default = f"{leaf.key}={shown(known_keys(schema)[leaf.key].default)}"
        for what in _asked(leaf):
            if without_effect(config, leaf.key) is None:
                rule = f"is not implemented yet, only planned: it would {what}"
                found.append(Problem(leaf.key, shown(leaf.value), rule, default))
        library = leaf.option.needs.get(str(leaf.value))
        if library and not library.is_installed and without_effect(config, leaf.key) is None:
            rule = f"needs {library.name}, which is not installed"
            found.append(Problem(leaf.key, leaf.value, rule, f"{library.install}; or {default}"))
    return found


def _asked(leaf: Leaf) -> Iterator[str]:
    """What each unimplemented feature would do that the key's value asks for."""
    if leaf.value is None:
        return
    for planned in leaf.option.planned:
        if planned.values(leaf.value) and planned.beside(leaf.section):
            others = {name: shown(value) for name, value in vars(leaf.section).items()}
            yield planned.what.format(**others, value=leaf.value)
