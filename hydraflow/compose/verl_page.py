"""The text of `--help verl`: how each of verl's keys is handled, as Markdown.

In: the tables of `verl_table.py`, `verl_values.py` and `verl_data/`. Out: the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from hydraflow.compose.keys import is_below_open, known_keys
from hydraflow.compose.verl import classify, is_never_read, renamed
from hydraflow.compose.verl_defaults import VERSION, leaves
from hydraflow.compose.verl_table import (
    DTYPES,
    ENGINES,
    FILTER_METRICS,
    FOLLOWS,
    STRATEGIES,
    VERL_TRACKERS,
    Alias,
    Ignored,
    aliases,
    read,
    tables,
)
from hydraflow.compose.verl_values import our_value
from hydraflow.errors import shown
from hydraflow.schema import PPOConfig

INTRODUCTION = f"""# verl's keys here

A command line of `python -m verl.trainer.main_ppo` runs with `python -m hydraflow.main_ppo`, or one report
names every key that has no counterpart. `python -m hydraflow.plan` with the same arguments rejects none of
them: it counts the keys that are honoured, accepted without effect, and unsupported. The target is verl
{VERSION}; names of older and newer versions are marked.

In a pattern `{{a,b}}` matches either, `*` one name, `**` any number of names.
"""
KNOWN, ALIAS, NEVER, NOT_MISSED, REFUSED = "known", "alias", "ignored by verl", "not needed", "unsupported"
MEANING = {
    KNOWN: "the same name, meaning and unit",
    ALIAS: "renamed; a note gives the name here",
    NEVER: "accepted: verl ignores it, too",
    NOT_MISSED: "accepted: it does not change what is learned",
    REFUSED: "rejected, unless the value is verl's default or switches the feature off",
}


def kind(key: str) -> str:
    """The class of one of verl's keys."""
    keys = known_keys(PPOConfig)
    if key in keys or is_below_open(keys, key):
        return KNOWN
    row = classify(key)
    assert row is not None, f"{key} is in no table"
    if isinstance(row, Alias):
        return ALIAS
    if isinstance(row, Ignored):
        return NEVER if is_never_read(key) else NOT_MISSED
    return REFUSED


def page() -> str:
    """The whole page as Markdown."""
    parts = [
        INTRODUCTION,
        _counts(),
        _section(
            "Defaults that differ",
            "Values of keys that are not set.",
            ("key", f"verl {VERSION}", "here"),
            _differences(),
        ),
        _section("Another name here", "", ("verl", "here", "remark"), _renamed()),
        _section(
            "Sections that moved",
            "All their keys are looked up in the new section.",
            ("verl", "here"),
            tables().sections.items(),
        ),
        _accepted("Ignored by verl, too", tables().ignored),
        _accepted("Not needed here", tables().not_needed),
        _section(
            "Not supported yet",
            "Rejected, except for verl's default and the values in the third column, which switch it off.",
            ("key", "in verl it would", "also accepted", "instead"),
            (
                (key, row.would, ", ".join(map(shown, row.harmless)), row.instead)
                for key, row in tables().unsupported.items()
            ),
        ),
        _section("Values with another name here", "", ("key", "verl", "here"), _value_rows()),
        _section(
            "Keys that follow another",
            "If the first is not set, it has the value of the second.",
            ("key", "follows"),
            FOLLOWS.items(),
        ),
        _files(),
    ]
    return "\n".join(parts)


def _counts() -> str:
    counts = Counter(kind(key) for key in leaves())
    plain = len(leaves(megatron=False))
    rows = ((name, counts[name], MEANING[name]) for name in (KNOWN, ALIAS, NEVER, NOT_MISSED, REFUSED))
    text = (
        f"{plain} keys of verl's default configuration and {len(leaves()) - plain} more with"
        " `model_engine=megatron`, without `_target_`."
    )
    return _section("Counts", text, ("class", "keys", "meaning"), rows)


def _accepted(title: str, table: Mapping[str, Ignored]) -> str:
    rows = ((key, row.why) for key, row in table.items())
    return _section(title, "Accepted with a note.", ("key", "why"), rows)


def _section(title: str, text: str, heads: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [f"## {title}", "", *([text, ""] if text else []), f"| {' | '.join(heads)} |"]
    lines.append(f"|{'---|' * len(heads)}")
    for row in rows:
        cells = (_cell(head, cell) for head, cell in zip(heads, row, strict=True))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(head: str, cell: object) -> str:
    text = str(cell).replace("|", "\\|")
    is_code = head in ("key", "verl", "here", "follows", "also accepted", "instead", f"verl {VERSION}")
    return f"`{text}`" if text and is_code else text


def _differences() -> Iterator[tuple[str, str, str]]:
    for key, default in leaves().items():
        known = known_keys(PPOConfig).get(key)
        if known is None or default is ... or key in FOLLOWS or our_value(key, default)[0] == known.default:
            continue
        yield key, "(must be given)" if default == "???" else shown(default), shown(known.default)


def _renamed() -> Iterator[tuple[str, str, str]]:
    there = {"model_engine", *(renamed(key) for key in leaves())}
    for old, row in aliases(PPOConfig).items():
        ranks = "rows over all data ranks, divided by their number" if row.over_all_ranks else ""
        other = "" if old in there else "a name of other versions"
        yield old, row.new, "; ".join(filter(None, (row.why, ranks, other)))


def _value_rows() -> Iterator[tuple[str, str, str]]:
    yield from (("**.{dtype,model_dtype,reduce_dtype}", verls, ours) for verls, ours in DTYPES.items())
    yield from (("**.strategy", verls, ours) for verls, ours in STRATEGIES.items())
    yield from (("actor_rollout_ref.rollout.name", verls, ours) for verls, ours in ENGINES.items())
    yield from (("algorithm.filter_groups.metric", verls, ours) for verls, ours in FILTER_METRICS.items())
    yield "**.checkpoint.save_contents", "[hf_model]", "[model,hf_model]"
    yield "**.optim.lr_warmup_steps", "null", "-1"
    yield "trainer.test_freq", "0", "-1"
    yield "trainer.logger", ", ".join(VERL_TRACKERS), "left out, with file and tensorboard in their place"


def _files() -> str:
    names = ", ".join(f"`{name}`" for name in read("trees")["primary"])
    return f"""## Configuration files and groups

- A file that the command line names is read, whatever its name. If there is no such file, `--config-name` of
  verl's own files ({names}) is taken as `model_engine=dp` or
  `model_engine=megatron`.
- A defaults list may name verl's files (`ppo_trainer`, `actor@actor_rollout_ref.actor: dp_actor` and so on):
  they mean the defaults here, unless the folder has files of these names.
- In a file, keys of other versions of verl are accepted while they are off or at that version's default.
- `model_engine=megatron` sets `strategy=megatron` for actor and critic; so do
  `actor@actor_rollout_ref.actor=megatron_actor` and `critic@critic=megatron_critic`. The engines torchtitan
  and veomni do not exist here.
- Micro-batch sizes without `_per_gpu` count rows over all data ranks: they are divided by the number of
  ranks, which needs `trainer.n_gpus_per_node`, and rejected if that leaves a remainder.
"""
