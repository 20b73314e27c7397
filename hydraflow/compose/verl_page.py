"""The text of `--help verl`: how each of verl's keys is handled, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hydraflow.compose.keys import is_below_open, known_keys
from hydraflow.compose.patterns import fits
from hydraflow.compose.verl import classify, renamed
from hydraflow.compose.verl_table import (
    FOLLOWS,
    VERSION,
    Alias,
    Ignored,
    Unsupported,
    aliases,
    defaults,
    tables,
    value_tables,
)
from hydraflow.compose.verl_trees import primary_names
from hydraflow.compose.verl_values import our_value
from hydraflow.errors import shown
from hydraflow.schema import GenerateConfig, PPOConfig, SFTConfig

KNOWN, ALIAS, NEVER, NOT_MISSED, REFUSED = "known", "alias", "ignored by verl", "not needed", "unsupported"
MEANING = {
    KNOWN: "the same name, meaning and unit",
    ALIAS: "renamed; a note gives the name here",
    NEVER: "accepted: verl ignores it, too",
    NOT_MISSED: "accepted: it does not change what is learned",
    REFUSED: "rejected, unless the value is verl's default or switches the feature off",
}


def kind(schema: type, key: str) -> str:
    """How one of verl's keys is handled: a key of MEANING."""
    keys = known_keys(schema)
    if key in keys or is_below_open(keys, key):
        return KNOWN
    row = classify(schema, key)
    assert row is not None, f"{key} is in no table"
    if isinstance(row, Alias):
        return ALIAS
    if isinstance(row, Ignored):
        return NEVER if row.in_verl_too else NOT_MISSED
    return REFUSED


def page(schema: type) -> str:
    """The page for the command with this configuration, as Markdown."""
    rows = tables(schema)
    parts = [
        _introduction(schema),
        _counts(schema),
        _section(
            "Defaults that differ",
            "Values of keys that are not set.",
            ("key", f"verl {VERSION}", "here"),
            _differences(schema),
        ),
        _section("Another name here", "", ("verl", "here", "remark"), _renamed(schema)),
        _section(
            "Sections that moved",
            "All their keys are looked up in the new section.",
            ("verl", "here"),
            rows.sections.items(),
        ),
        _accepted(schema, "Ignored by verl, too", in_verl_too=True),
        _accepted(schema, "Not needed here", in_verl_too=False),
        _section(
            "Not supported yet",
            "Rejected, except for verl's default and the values in the third column, which turn it off.",
            ("key", "in verl it would", "also accepted", "instead"),
            (
                (key, row.would, ", ".join(map(shown, row.harmless)), row.instead)
                for key, row in rows.rows.items()
                if isinstance(row, Unsupported)
            ),
        ),
        _section(
            "Sections like those of main_ppo",
            "Rows of `python -m hydraflow.main_ppo --help verl` for the second also apply to the first.",
            ("section", "like"),
            rows.like.items(),
        ),
        _section("Values with another name here", "", ("key", "verl", "here"), _value_rows(schema)),
        _section(
            "Keys that follow another",
            "If the first is not set, it has the value of the second.",
            ("key", "follows"),
            ((key, leader) for key, leader in FOLLOWS.items() if key in known_keys(schema)),
        ),
        _files(schema),
    ]
    return "\n".join(filter(None, parts))


def _introduction(schema: type) -> str:
    ours, command = str(schema.__doc__), tables(schema).command
    if not command:
        return f"verl has no command for what `{ours}` does: every key is one of `--help`.\n"
    jobs = {PPOConfig: "", SFTConfig: " --job sft", GenerateConfig: " --job generate"}
    plan = (
        f"""`python -m hydraflow.plan{jobs[schema]}` with the same arguments rejects none of them:
it counts the keys that are honoured, accepted without effect, and unsupported. """
        if schema in jobs
        else ""
    )
    return f"""# verl's keys here

The arguments of `{command}` run with
`{ours}`, or one report names every key that has no counterpart.
{plan}The target is verl {VERSION}; names of
older and newer versions are marked.

In a pattern `{{a,b}}` matches either, `*` one name, `**` any number of names.
"""


def _counts(schema: type) -> str:
    counts = Counter(kind(schema, key) for key in defaults(schema))
    plain = len(defaults(schema, megatron=False))
    if not plain:
        return ""
    rows = ((name, counts[name], MEANING[name]) for name in (KNOWN, ALIAS, NEVER, NOT_MISSED, REFUSED))
    text = f"{plain} keys of verl's default configuration"
    if more := len(defaults(schema)) - plain:
        text += f" and {more} more with `model_engine=megatron`"
    return _section("Counts", f"{text}, without `_target_`.", ("class", "keys", "meaning"), rows)


def _accepted(schema: type, title: str, *, in_verl_too: bool) -> str:
    rows = (
        (key, row.why)
        for key, row in tables(schema).rows.items()
        if isinstance(row, Ignored) and row.in_verl_too == in_verl_too
    )
    return _section(title, "Accepted with a note.", ("key", "why"), rows)


def _section(title: str, text: str, heads: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A heading with a table; empty if there are no rows."""
    lines = [f"## {title}", "", *([text, ""] if text else []), f"| {' | '.join(heads)} |"]
    lines.append(f"|{'---|' * len(heads)}")
    empty = len(lines)
    for row in rows:
        cells = (_cell(head, cell) for head, cell in zip(heads, row, strict=True))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) if len(lines) > empty else ""


def _cell(head: str, cell: object) -> str:
    text = str(cell).replace("|", "\\|")
    is_code = head not in ("remark", "why", "in verl it would", "class", "keys", "meaning")
    return f"`{text}`" if text and is_code else text


def _differences(schema: type) -> Iterator[tuple[str, str, str]]:
    for key, default in defaults(schema).items():
        known = known_keys(schema).get(renamed(schema, key))
        if known is None or default is ... or key in FOLLOWS or our_value(key, default)[0] == known.default:
            continue
        yield key, "(must be given)" if default == "???" else shown(default), shown(known.default)


def _renamed(schema: type) -> Iterator[tuple[str, str, str]]:
    there = {"model_engine", *(renamed(schema, key) for key in defaults(schema))}
    for old, row in aliases(schema).items():
        ranks = "rows over all data ranks, divided by their number" if row.over_all_ranks else ""
        other = "" if old in there else "a name of other versions"
        yield old, row.new, "; ".join(filter(None, (row.why, ranks, other)))


def _value_rows(schema: type) -> Iterator[tuple[str, str, str]]:
    values = value_tables()
    rows = [
        *(
            (pattern, verls, ours)
            for pattern, names in values.renamed.items()
            for verls, ours in names.items()
        ),
        ("**.checkpoint.save_contents", "[hf_model]", "[model,hf_model]"),
        ("**.optim.lr_warmup_steps", "null", "-1"),
        ("trainer.test_freq", "0", "-1"),
        ("trainer.logger", "tracking", "wandb"),
        ("trainer.logger", ", ".join(values.trackers), "left out, with file and tensorboard in their place"),
    ]
    for pattern, verls, ours in rows:
        fitting = [key for key in known_keys(schema) if fits(pattern, key) or fits(pattern, f"x.{key}")]
        if fitting:
            yield fitting[0] if len(fitting) == 1 else pattern, verls, ours


def _files(schema: type) -> str:
    names = ", ".join(f"`{name}`" for name in primary_names(schema))
    if not names:
        return ""
    return f"""## Configuration files and groups

- A file that the command line names is read, whatever its name. If there is no such file, `--config-name` of
  verl's own files ({names}) is taken as {_OWN_FILES[schema]}
- In a file, keys of other versions of verl are accepted while they are off or at that version's default.
{_GROUPS[schema]}
- Micro-batch sizes without `_per_gpu` count rows over all data ranks: they are divided by the number of
  ranks, which needs `trainer.n_gpus_per_node`, and rejected if that leaves a remainder.
"""


_OWN_FILES = {
    PPOConfig: """`model_engine=dp` or
  `model_engine=megatron`.
- A defaults list may name verl's files (`ppo_trainer`, `actor@actor_rollout_ref.actor: dp_actor` and so on):
  they mean the defaults here, unless the folder has files of these names.""",
    SFTConfig: """the defaults here.
- A defaults list may name verl's files (`sft_trainer_engine`, `engine@engine: fsdp` and so on): they mean the
  defaults here, unless the folder has files of these names.""",
}
_GROUPS = {
    PPOConfig: """- `model_engine=megatron` sets `strategy=megatron` for actor and critic; so do
  `actor@actor_rollout_ref.actor=megatron_actor` and `critic@critic=megatron_critic`. The engines torchtitan
  and veomni do not exist here.""",
    SFTConfig: """- `engine=fsdp`, `optim=fsdp` and `model=hf_model` mean the defaults here. There is
  no engine megatron, automodel, torchtitan or veomni for main_sft: one problem names all the
  keys that only it reads.
- A command line with `model.partial_pretrain` is one of `fsdp_sft_trainer`. Its micro-batches have
  `data.micro_batch_size_per_gpu` rows, so `data.use_dynamic_bsz` is false unless it is set.""",
}
