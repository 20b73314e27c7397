#!/usr/bin/env python
"""Runs the benchmarks one after the other and writes docs/performance.md.

    python scripts/bench/all.py                    # those without figures; then writes the page
    python scripts/bench/all.py --again head plan  # reruns these
    python scripts/bench/all.py --page docs/performance_amx.md   # of another kind of machine
    python scripts/bench/all.py --list

In: nothing. Figures are stored in .bench/results, one file per benchmark, so an interrupted run can be
resumed. Out: the page, and exit code 1 if a benchmark failed. Each takes at most a quarter of an hour on two
idle cores; the page says how busy the machine was. Left out on purpose: whether choices learn (learn.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PAGE = ROOT / ".bench" / "results", ROOT / "docs" / "performance.md"
UNITS = {"AMX": "amx_bf16", "AVX-512 for bf16": "avx512_bf16", "AVX-512": "avx512f"}
"""The best unit that multiplies matrices -> its flag in /proc/cpuinfo, best first."""
NUMBERS = {"family": "cpu family", "model": "model"}
"""What identifies a processor -> its key in /proc/cpuinfo."""
LIMIT_SECONDS = 900
"""Time limit of one benchmark."""
GRACE_SECONDS = 10.0
"""Seconds that a benchmark's processes then get to end by themselves."""
QUIET = 0.5
"""The machine counts as quiet if at most this many cores are busy before a benchmark."""
LOOK_SECONDS = 3.0
"""Seconds over which busy cores are counted before a benchmark."""

Found = Sequence[Mapping[str, Any]]
"""The JSON objects that a benchmark prints."""


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None
    """Factor by which ours beats the peer."""
    limit: str = ""
    """The best that the machine allows."""


def of_trl(found: Found) -> Iterator[Row]:
    """A GRPO step."""
    for one in found:
        ours, theirs = (
            one["trajectories_per_step"] / one[f"{who}_trajectories_per_s"] for who in ("hydraflow", "trl")
        )
        tokens = f"up to {one['tokens']}" if one["ragged"] else one["tokens"]
        rows = f"{one['trajectories_per_step']} x {tokens} tokens"
        least = one["least_seconds_per_step"]
        limit = "" if least is None else f"{least:.3g} s"
        what = f"GRPO step, {one['model']}, {one['dtype']}, {rows}"
        yield Row(what, f"{ours:.3g} s", f"TRL {theirs:.3g} s", one["ratio"], limit)
        update, least = one["hydraflow_phases_s"]["timing_s/update_actor"], one["least_seconds_per_update"]
        if least is not None:
            share = f"{least:.3g} s, {least / update:.0%} of it"
            yield Row("the update of that step", f"{update:.3g} s", limit=share)


def of_compiled(found: Found) -> Iterator[Row]:
    """Updates with kernels of torch.compile."""
    for one in found:
        what = f"update of 128 x 32 tokens, {one['model']}, {one['dtype']}, use_torch_compile"
        ours, plain = one["compiled_s"], one["plain_s"]
        yield Row(what, f"{ours:.3g} s", f"without {plain:.3g} s", plain / ours)


def of_generation(found: Found) -> Iterator[Row]:
    """Sampling."""
    names = ("sequences", "model", "dtype", "lengths", "engine")
    speeds = {tuple(one[name] for name in names): one["tokens_per_second"] for one in found}
    for (*case, engine), ours in speeds.items():
        if engine == "native":
            theirs = speeds[*case, "transformers"]
            sequences, model, dtype, lengths = case
            what = f"sampling {sequences} at once, {model}, {dtype}, {lengths} lengths, one thread"
            yield Row(what, f"{ours:,} tokens/s", f"`generate` {theirs:,}", ours / theirs)


def of_profile(found: Found) -> Iterator[Row]:
    """Where an update's time goes."""
    for one in found:
        what = f"update of {one['rows']} x {one['tokens']} tokens, {one['model']}, {one['dtype']}, one thread"
        shares = "; ".join(f"{kind} {share:.0%}" for kind, share in one["shares"].items() if share >= 0.01)
        yield Row(what, f"{one['cpu_s']:.3g} CPU s: {shares}")


def of_head(found: Found) -> Iterator[Row]:
    """Log-probabilities and entropies."""
    ways = {one["way"]: one for one in found}
    ours, theirs = ways["fused"], ways.get("module")
    sizes = f"{ours['tokens']:,} tokens x {ours['vocabulary']:,}, hidden size {ours['hidden']:,}"
    what = f"head, {sizes}, forward and backward"
    seconds = f"{ours['cpu_s']:.3g} CPU s"
    memory = f"{ours['peak_mib']:,.0f} MiB, {ours['gradients_mib']:,.0f} of them gradients"
    if theirs is None:
        logits = f"{4 * ours['tokens'] * ours['vocabulary'] / 2**20:,.0f} MiB"
        yield from (Row(what, seconds), Row(f"{what}: memory", memory, f"all logits once {logits}"))
        return
    yield Row(what, seconds, f"by module {theirs['cpu_s']:.3g} CPU s", theirs["cpu_s"] / ours["cpu_s"])
    more = f"by module {theirs['peak_mib']:,.0f} MiB"
    yield Row(f"{what}: memory", memory, more, theirs["peak_mib"] / ours["peak_mib"])


def of_weights(found: Found) -> Iterator[Row]:
    """From the actor to the rollout."""
    links = {
        "same_process": "in a process",
        "shared_memory": "to another process",
        "broadcast": "to another node",
    }
    for one in found:
        for link, where in links.items():
            rates = one[link]
            limit = f"{rates['median_copy'] / 1e9:.3g} GB/s (copy rate)"
            yield Row(
                f"weights, {one['bytes'] / 2**20:,.0f} MiB, {where}",
                f"{rates['median'] / 1e9:.3g} GB/s",
                limit=limit,
            )


def of_memory(found: Found) -> Iterator[Row]:
    """Estimates of memory."""
    for one in found:
        for phase, figures in one["phases"].items():
            ours, measured = (f"{figures[name] / 2**20:,.0f} MiB" for name in ("estimate", "measured"))
            what = f"memory estimate, {one['case']}, {phase}"
            yield Row(what, ours, f"measured {measured}")


def of_merger(found: Found) -> Iterator[Row]:
    """Merging checkpoints."""
    for one in found[0]["merges"]:
        theirs = f"verl 0.9.1 {one['verl']['cpu_seconds']:.3g} CPU s, on another machine"
        what = f"merge of a checkpoint, {one['size']}"
        yield Row(what, f"{one['cpu_seconds']:.3g} CPU s", theirs, one["ratio_cpu"])


def of_data_plane(found: Found) -> Iterator[Row]:
    """Rows to the ranks and their log-probabilities back."""
    for one in found:
        what = f"{one['rows']:,} rows to {one['ranks']} ranks and log-probs back, {one['form']}"
        limit = f"{one['copy_ms']:.3g} ms (one copy)"
        yield Row(f"{what}, {one['megabytes']:,.0f} MB", f"{one['median_ms']:.3g} ms", limit=limit)
    yield Row(f"start of a group of {found[0]['ranks']} ranks", f"{found[0]['group_start_s']:.3g} s")


def of_step(found: Found) -> Iterator[Row]:
    """The default recipe."""
    (one,) = found
    yield Row("default recipe, a step", f"{one['median']:.3g} s")
    yield Row("default recipe, from launch to the first step's end", f"{one['first_step_after']:.3g} s")
    yield Row("default recipe, share of a step without a running worker", f"{one['ray_share']:.1%}")


def of_growth(found: Found) -> Iterator[Row]:
    """Memory of a long run."""
    for one in found:
        for kind, growth in one["growth"].items():
            before, after = (f"{one[f'{when}_mib'][kind]:,.0f}" for when in ("before", "after"))
            what = f"default recipe, memory over {one['steps']} steps after {one['start']}, {kind}"
            yield Row(what, f"{before} -> {after} MiB, {growth:+.1%}")


def of_advantages(found: Found) -> Iterator[Row]:
    """Advantages."""
    for one in found:
        tokens = (
            "all tokens trained" if one["holes"] == 0 else f"{one['holes']:.0%} of the tokens not trained"
        )
        what = f"GAE, {one['rows']:,} x {one['tokens']:,}, {tokens}, one thread"
        yield Row(
            what,
            f"{one['ms']:.3g} ms",
            f"a loop over time {one['loop_ms']:.3g} ms, the same within {one['off']:.1g}",
            one["loop_ms"] / one["ms"],
        )


def of_plan(found: Found) -> Iterator[Row]:
    """Batch plans."""
    for one in found:
        taken = one["milliseconds"]["configuration"]
        yield Row(f"batch plan for {one['devices']:,} devices", f"{taken:.3g} ms")


@dataclass(frozen=True)
class Bench:
    """A script, its arguments, and the function that turns its output into rows."""

    script: str
    arguments: tuple[str, ...]
    rows: Callable[[Found], Iterable[Row]]


def against_trl(model: str, dtype: str, steps: int, *more: str) -> Bench:
    return Bench("vs_trl.py", ("--model", model, "--dtype", dtype, "--steps", str(steps), *more), of_trl)


def sampling(sequences: int, *more: str) -> Bench:
    how = ("--engines", "native,transformers", "--sequences", str(sequences), *more)
    return Bench("generation.py", how, of_generation)


LONG_HEAD = (
    "--tokens",
    "32768",
    "--vocabulary",
    "151936",
    "--hidden",
    "896",
    "--entropy",
    "--fused-only",
    "--repeats",
    "1",
)
BENCHES: dict[str, Bench] = {
    "plan": Bench("plan_scale.py", (), of_plan),
    "step": Bench("grpo_step.py", ("--steps", "20"), of_step),
    "trl-recipe": against_trl("recipe", "fp32", 20),
    "trl-0.85M-fp32": against_trl("0.85M", "fp32", 10),
    "trl-0.85M-bf16": against_trl("0.85M", "bf16", 10),
    "trl-0.85M-fp32-short-ragged": against_trl("0.85M", "fp32", 10, "--ragged"),
    "trl-0.85M-bf16-short-ragged": against_trl("0.85M", "bf16", 10, "--ragged"),
    **{
        f"trl-{model}-{dtype}": against_trl(model, dtype, 10)
        for model in ("gpt2", "llama", "gemma3_text", "qwen3_moe")
        for dtype in ("fp32", "bf16")
    },
    "trl-0.85M-fp32-long": against_trl("0.85M", "fp32", 4, "--tokens", "256"),
    "trl-0.85M-bf16-long": against_trl("0.85M", "bf16", 4, "--tokens", "256"),
    "trl-0.85M-fp32-ragged": against_trl("0.85M", "fp32", 4, "--tokens", "256", "--ragged"),
    "trl-0.85M-bf16-ragged": against_trl("0.85M", "bf16", 4, "--tokens", "256", "--ragged"),
    "trl-31.7M-fp32": against_trl("31.7M", "fp32", 3),
    "trl-31.7M-bf16": against_trl("31.7M", "bf16", 3),
    "trl-31.7M-fp32-short-ragged": against_trl("31.7M", "fp32", 3, "--ragged"),
    "trl-31.7M-bf16-short-ragged": against_trl("31.7M", "bf16", 3, "--ragged"),
    "trl-31.7M-fp32-long": against_trl("31.7M", "fp32", 2, "--tokens", "256", "--prompts", "4"),
    "trl-31.7M-bf16-long": against_trl("31.7M", "bf16", 2, "--tokens", "256", "--prompts", "4"),
    "trl-31.7M-fp32-ragged": against_trl("31.7M", "fp32", 2, "--tokens", "256", "--prompts", "4", "--ragged"),
    "trl-31.7M-bf16-ragged": against_trl("31.7M", "bf16", 2, "--tokens", "256", "--prompts", "4", "--ragged"),
    "compiled-fp32": Bench("compiled.py", ("--dtype", "fp32"), of_compiled),
    "compiled-bf16": Bench("compiled.py", ("--dtype", "bf16"), of_compiled),
    "profile-0.85M-fp32": Bench("update_profile.py", ("--model", "0.85M"), of_profile),
    "profile-0.85M-bf16": Bench("update_profile.py", ("--model", "0.85M", "--dtype", "bf16"), of_profile),
    "profile-31.7M-fp32": Bench("update_profile.py", (), of_profile),
    "profile-31.7M-bf16": Bench("update_profile.py", ("--dtype", "bf16"), of_profile),
    "generation": sampling(128),
    "generation-bf16": sampling(128, "--dtype", "bf16", "--lengths", "equal,ragged"),
    "generation-512": sampling(512, "--lengths", "equal"),
    "generation-512-ragged": sampling(512, "--lengths", "ragged", "--models", "1M"),
    "head": Bench("head.py", ("--entropy",), of_head),
    "head-long": Bench("head.py", LONG_HEAD, of_head),
    "advantages": Bench("advantages.py", (), of_advantages),
    "growth": Bench("growth.py", (), of_growth),
    "data-plane": Bench("data_plane.py", (), of_data_plane),
    "weights": Bench("weight_sync.py", ("--models", "small"), of_weights),
    "memory": Bench("memory.py", ("--cases", "tied"), of_memory),
    "merger": Bench("merger.py", ("--layouts", "hydraflow", "--repeats", "1"), of_merger),
}
"""By name, in the order of the page."""


def measure(name: str, bench: Bench, results: Path) -> str | None:
    """Runs a benchmark and stores its figures; returns the error message if it failed, else None."""
    # not the load average, which still includes the previous benchmark
    load = psutil.cpu_percent(LOOK_SECONDS) / 100 * psutil.cpu_count()
    since = time.perf_counter()
    command = [sys.executable, str(HERE / bench.script), *bench.arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = run(command, os.environ | {"PYTHONPATH": path})
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no error message"])[-1]
    facts = {"load": load, "seconds": time.perf_counter() - since, "commit": commit()}
    results.mkdir(parents=True, exist_ok=True)
    kept = results / f"{name}.json"
    kept.write_text(json.dumps({**facts, "found": list(objects(done.stdout))}, indent=1))
    return None


def run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command and captures its output. On Ctrl-C or after `LIMIT_SECONDS` (subprocess.TimeoutExpired)
    ends it with all processes below it, such as training and its Ray."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output = process.communicate(timeout=LIMIT_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            with suppress(psutil.NoSuchProcess):
                top = psutil.Process(process.pid)
                end([top, *top.children(recursive=True)])
            raise
    return subprocess.CompletedProcess(command, process.returncode, *output)


def end(processes: Sequence[psutil.Process]) -> None:
    """Ends processes, by force those that are left after `GRACE_SECONDS`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, GRACE_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text that consists of them.

    >>> list(objects('{"a": 1}\\n{"b": 2}\\n'))
    [{'a': 1}, {'b': 2}]
    """
    decoder, at = json.JSONDecoder(), 0
    while at < len(text := text.rstrip()):
        found, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
        yield found


def commit() -> str:
    """The commit that is checked out."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


HEAD = """# Performance

Written by `python scripts/bench/all.py`. {machine}. {versions}. Commits: {commits}. {load}

"ratio" is by what factor hydraflow beats the peer in the same run; "limit" is what the machine allows:
a step whose matrix products run on all cores at their measured peak and in which nothing else takes time, or
the rate at which one thread copies memory. TRL is measured with one thread and with two, and its better
figure counts. A prompt counts for each of its rows in the limit, although an update computes it once. Models
other than the recipe's have random weights.

Before updates and sampling were made faster (commit 9fdd637, another machine, measured by hand), a step of
16 prompts x 8 samples x 32 tokens, and where the update's time went:

| model | hydraflow | TRL | ratio | products | attention | elementwise | copies |
|---|---|---|---|---|---|---|---|
| 0.85M, fp32 | 0.514 s | 0.500 s | 0.97 | | | | |
| 0.85M, bf16 | 0.631 s | 0.676 s | 1.07 | | | | |
| 31.7M, fp32 | 6.94 s | 8.17 s | 1.18 | 67% | 3.4% | 22% | 5% |
| 31.7M, bf16 | 4.51 s | 4.67 s | 1.04 | 28% | 31% | 26% | 9% |

Now:

| what | hydraflow | peer | ratio | limit |
|---|---|---|---|---|
"""


def page(results: Path) -> str:
    """The Markdown page of all stored figures."""
    kept = {
        name: json.loads(file.read_text()) for name in BENCHES if (file := results / f"{name}.json").exists()
    }
    head = HEAD.format(
        machine=machine(),
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ray")),
        commits=", ".join(sorted({facts["commit"] for facts in kept.values()})) or "unknown",
        load=load_of(max((facts["load"] for facts in kept.values()), default=0.0)),
    )
    lines = [line(row) for name, facts in kept.items() for row in BENCHES[name].rows(facts["found"])]
    missing = [name for name in BENCHES if name not in kept]
    foot = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    return head + "".join(f"{one}\n" for one in lines) + foot


def load_of(most: float) -> str:
    """Whether the machine was quiet, as a sentence."""
    if most <= QUIET:
        return "The machine was quiet."
    return f"**The machine was not quiet**: up to {most:.1f} of its cores were busy before a bench."


def line(row: Row) -> str:
    """One line of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.what} | {row.ours} | {row.peer} | {ratio} | {row.limit} |"


def machine() -> str:
    """Number of cores, processor and Python version. Virtual machines often give the name of a series only,
    so family and model follow."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (one.partition(":") for one in lines)}
    flags = facts.get("flags", "").split()
    units = next((unit for unit, flag in UNITS.items() if flag in flags), "neither AMX nor AVX-512")
    number = "".join(f", {name} {facts[key]}" for name, key in NUMBERS.items() if key in facts)
    cores = f"{len(os.sched_getaffinity(0))} cores of {facts.get('model name', 'a CPU')}{number}"
    return f"{cores} with {units}, Python {platform.python_version()}"


def main(arguments: Sequence[str], results: Path = RESULTS, target: Path = PAGE) -> int:
    """Returns 1 if a benchmark failed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    parser.add_argument("--again", action="store_true", help="rerun benchmarks that have figures")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--page", type=Path, default=target, help="file to write, by default %(default)s")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in BENCHES]:
        parser.error(f"unknown: {', '.join(unknown)}; must be among {', '.join(BENCHES)}")
    if not args.page.parent.is_dir():
        parser.error(f"--page {args.page}: there is no folder {args.page.parent}")
    if args.list:
        print("\n".join(BENCHES))
        return 0
    failed = 0
    for name in args.names or BENCHES:
        if (results / f"{name}.json").exists() and not args.again:
            print(f"{name}: has figures already", flush=True)
            continue
        print(f"{name}: running", flush=True)
        if why := measure(name, BENCHES[name], results):
            failed = 1
            print(f"{name}: failed: {why}", flush=True)
    args.page.write_text(page(results))
    print(f"written: {args.page}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
