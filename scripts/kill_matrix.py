#!/usr/bin/env python
"""Kills runs with SIGKILL at random moments, restarts them, and compares them with uninterrupted runs.

In: a number of moments and a seed. Out: a table (or JSON) with one line per moment: which process was killed
and when, how the command ended, where it resumed, and whether weights and metrics are bit-identical to those
of an uninterrupted run. Exit code 1 if any are not, if a run ended badly (a stack trace, or an exit code
other than 0, 3 and 4), or if one of its processes outlived it.

    python scripts/kill_matrix.py                       20 moments, about a quarter of an hour on two cores
    python scripts/kill_matrix.py --random 20           any process of the run, Ray's included, at any time
    python scripts/kill_matrix.py --generation 6        a generation process: the run must continue
    python scripts/kill_matrix.py --moments 3 --json    the first three of the twenty

tests/jobs/test_resume.py runs the tenth of the twenty, then kills the controller, too.

`timing_s/*`, `perf/*` and the wall time of a record are not compared: they differ between any two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8
ENDS = 90.0
"""Seconds within which a run must end after one of its processes was killed."""
STARTS = 240.0
"""Seconds within which a run must reach the moment, or its end."""
LEFTOVERS = 10.0
"""Seconds within which all processes of an ended run must be gone."""
EXPECTED_CODES = (0, 3, 4)
"""Exit codes of a run that lost a process: one it does not need, one of Ray's, a worker."""
MARK = "HYDRAFLOW_KILL_MATRIX"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""
"""Fraction of correct digits: after so short a warm start, no whole answer is correct."""
COMMON = [
    "recipe.warm_start_steps=20",
    "recipe.warm_start_accuracy=1.0",
    "recipe.train_problems=600",
    "recipe.val_problems=32",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "trainer.logger=[file]",
    "trainer.n_gpus_per_node=2",
    "trainer.max_actor_ckpt_to_keep=2",
    "reward.num_workers=1",
]
METHODS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "trainer.max_critic_ckpt_to_keep=1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "actor_rollout_ref.actor.adaptive_entropy.enabled=true",
        "actor_rollout_ref.actor.adaptive_entropy.target_entropy=100",
    ],
    "megatron": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ],
}
"""Overrides of each method; two ranks, two optimizer steps per training step."""
TARGETS = ("controller", "actor rank", "rollout worker", "raylet", "middle of a save")
GENERATION = "generation process"
APART = [
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.actor.device_mapping=[0,1]",
    "actor_rollout_ref.rollout.device_mapping=[2,3]",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1",
    "actor_rollout_ref.rollout.verify_weights_every=1",
]
"""The generation engine on its own two devices, so that its processes can be replaced. When they are killed
they may be sampling, idle or receiving weights."""
REPLACED = re.compile(r"rollout rank \d on node \S+ is started again: ")


@dataclass(frozen=True)
class Moment:
    """Which process to kill, and when."""

    number: int
    target: str
    method: str
    steps: int
    """Lines of metrics.jsonl to wait for; the first is step 0, the validation before training. In the middle
    of a save: the number of the save."""
    delay: float
    """Seconds to wait after that."""
    rank: int
    """Rank of the training or generation process, if the target is one; -1, in the middle of a save: the
    controller."""

    def words(self) -> str:
        """Description for the table."""
        delay = f"{1000 * self.delay:.0f} ms"
        if self.target == "middle of a save":
            process = "controller" if self.rank < 0 else f"rank {self.rank}"
            return f"{process} in the middle of save {self.steps} + {delay}"
        has_rank = self.target in ("actor rank", "rollout worker", GENERATION)
        process = f"{self.target} {self.rank}" if has_rank else self.target
        return f"{process} after step {self.steps - 1} + {delay}"


@dataclass(frozen=True)
class Chance:
    """A kill of any process at any time."""

    number: int
    method: str
    at: float
    """Fraction of the duration of the uninterrupted run, from its launch."""
    kind: float
    """Which kind of process: a fraction of the kinds that exist then, sorted by name."""
    which: float
    """Which process of that kind, likewise."""


@dataclass
class Outcome:
    """The result of one kill."""

    number: int
    moment: str
    method: str
    exit_code: int
    """Of the killed run; -9: the controller itself was killed."""
    ended_after: float
    """Seconds from the signal to the end of the command."""
    went_on_from: int
    """Step of the checkpoint that it resumed from; 0: there was none yet."""
    same: bool
    """Whether metrics and weights are those of the uninterrupted run."""
    differences: str = ""
    fault: str = ""
    """What is wrong with how the run ended, if anything."""
    said: str = ""
    """Last line of its output."""

    @property
    def passed(self) -> bool:
        """Bit-identical, and ended as it should."""
        return self.same and not self.fault


def draw_moments(count: int, seed: int) -> list[Moment]:
    """`count` moments; targets and methods take turns."""
    chance = random.Random(seed)
    moments = []
    for number in range(count):
        target = TARGETS[number % len(TARGETS)]
        method = list(METHODS)[number // len(TARGETS) % len(METHODS)]
        steps, rank = chance.randint(1, STEPS - 1), chance.randint(0, 1)
        # both roles are in the same processes: the delay decides whether these sample or train when killed
        delay = {"rollout worker": chance.uniform(0.0, 0.03), "actor rank": chance.uniform(0.08, 0.2)}.get(
            target, chance.uniform(0.0, 0.25)
        )
        if target == "middle of a save":
            steps, delay, rank = chance.randint(1, 3), chance.uniform(0.0, 0.12), chance.choice((-1, 0, 1))
        moments.append(Moment(number + 1, target, method, steps, delay, rank))
    return moments


def draw_chances(count: int, seed: int) -> list[Chance]:
    """`count` moments; the methods take turns. Only one in four is in the first half of the run, when usually
    the controller is the only process."""
    chance = random.Random(seed)
    drawn = [(chance.random(), chance.random(), chance.random()) for _ in range(count)]
    return [
        Chance(
            number + 1,
            list(METHODS)[number % len(METHODS)],
            at / 2 if number % 4 == 0 else (1 + at) / 2,
            kind,
            which,
        )
        for number, (at, kind, which) in enumerate(drawn)
    ]


def draw_generation(count: int, seed: int) -> list[Moment]:
    """`count` moments at which a generation process is killed."""
    chance = random.Random(seed)
    drawn = [
        (chance.randint(1, STEPS - 1), chance.uniform(0.0, 0.5), chance.randint(0, 1)) for _ in range(count)
    ]
    return [Moment(number + 1, GENERATION, "apart", *one) for number, one in enumerate(drawn)]


class Run:
    """One main_ppo command in its own session. The environment variable MARK identifies its processes."""

    def __init__(self, home: Path, method: str, cache: Path):
        self.home = home
        self.folder = home / "out"
        self.log = home / "log"
        home.mkdir(parents=True, exist_ok=True)
        (home / "reward.py").write_text(REWARD)
        given = [*COMMON, *(APART if method == "apart" else METHODS[method]), f"recipe.cache_dir={cache}"]
        given += [f"trainer.default_local_dir={self.folder}"]
        self.process = self.launch([*given, f"reward.custom_reward_function.path={home}/reward.py"])

    def launch(self, given: list[str]) -> Any:
        """Starts main_ppo; returns its process."""
        words = [sys.executable, "-m", "hydraflow.main_ppo", *given]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: str(self.home)}
        with self.log.open("a") as log:
            return subprocess.Popen(
                words, cwd=self.home, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self) -> int:
        """Lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def family(self) -> list[psutil.Process]:
        """All living processes of the run, including the command itself."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK) == str(self.home)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def trainers(self) -> list[psutil.Process]:
        """The training processes: Ray workers without children. (The worker that scores has the reward
        processes as children.)"""
        workers = [process for process in self.family() if _title(process).startswith("ray::WorkerHost")]
        return sorted(
            (process for process in workers if not process.children()), key=lambda process: process.pid
        )

    def generator(self, rank: int) -> psutil.Process:
        """The generation process of a rank, recognized by the log file that it has open."""
        log = str(self.folder / "logs" / f"rollout-{rank}.log")
        workers = [process for process in self.family() if _title(process).startswith("ray::WorkerHost")]
        [found] = [one for one in workers if log in [file.path for file in one.open_files()]]
        return found

    def kinds(self) -> dict[str, list[psutil.Process]]:
        """Its processes by kind: controller, gcs_server, raylet, ray::WorkerHost and so on; reward processes
        are "python -c"."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.family():
            kind = "controller" if process.pid == self.process.pid else _kind(process)
            if kind:
                found.setdefault(kind, []).append(process)
        return dict(sorted(found.items()))

    def finish(self, seconds: float) -> int:
        """Waits until the command and all its processes have ended; returns the exit code."""
        code = self.process.wait(timeout=seconds)
        wait_until(lambda: not self.family(), LEFTOVERS, f"the processes of {self.home} to end")
        return code

    def ending(self, seconds: float) -> tuple[int, str]:
        """Exit code, and what is wrong with how it ended; processes that it left behind are killed."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
            return code, f"had not ended after {seconds:g} s"
        try:
            wait_until(lambda: not self.family(), LEFTOVERS, "its processes to end")
        except TimeoutError:
            left = self.kinds()
            for process in self.family():
                process.kill()
            return code, f"left behind: {', '.join(left)}"
        return code, "a stack trace" if "Traceback (most recent call last)" in self.log.read_text() else ""

    def said(self) -> str:
        """The last 3000 characters of its output."""
        return self.log.read_text()[-3000:]

    def last_line(self) -> str:
        """Last line of its output."""
        return next(reversed(self.log.read_text().split("\n")[:-1]), "")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _kind(process: psutil.Process) -> str:
    """The program's name; for Python with the script, the module or -c. Empty if the process is gone."""
    title = _title(process)
    if title.startswith("ray::"):
        return title.split()[0].partition(".")[0].partition("(")[0]
    words = title.split()[1:]
    if not process.name().startswith("python") or not words:
        return process.name()
    script = next((word for word in words if word == "-c" or not word.startswith("-")), "")
    return f"python {Path(script).name}"


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Polls a condition every 2 ms; TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.002)


def strike(run: Run, moment: Moment) -> None:
    """Waits for the moment, then kills the process."""

    def await_or_end(condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: run.process.poll() is not None or condition(), STARTS, what)

    # processes are looked up before the delay: finding them takes time
    trainers, raylets = [], []
    if moment.target in ("actor rank", "rollout worker", "middle of a save", GENERATION):
        await_or_end(lambda: run.lines() >= 1, "the validation before training")
        of_generation = moment.target == GENERATION
        trainers = [run.generator(rank) for rank in (0, 1)] if of_generation else run.trainers()
    if moment.target == "middle of a save":
        saving = f"global_step_{2 * moment.steps}.*.unfinished"
        await_or_end(lambda: any(run.folder.glob(saving)), "a save")
    else:
        await_or_end(lambda: run.lines() >= moment.steps, f"{moment.steps} lines")
    if moment.target == "raylet":
        raylets = [process for process in run.family() if process.name() == "raylet"]
    time.sleep(moment.delay)
    if moment.target == "raylet":
        raylets[0].kill()
    elif moment.target == "controller" or moment.rank < 0:
        os.kill(run.process.pid, signal.SIGKILL)
    else:
        trainers[moment.rank].kill()


def strike_anywhere(run: Run, chance: Chance, whole: float) -> str:
    """Waits for the moment, then kills a process; returns which and when. `whole`: duration of the
    uninterrupted run in seconds."""
    seconds = chance.at * whole
    try:
        run.process.wait(timeout=seconds)
        return f"none after {seconds:.1f} s: the run was over"
    except subprocess.TimeoutExpired:
        kinds = run.kinds()
    kind = list(kinds)[int(chance.kind * len(kinds))]
    victim = kinds[kind][int(chance.which * len(kinds[kind]))]
    steps = run.lines()
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return f"{kind} after {seconds:.1f} s: already gone"
    return f"{kind} after {seconds:.1f} s, {f'step {steps - 1}' if steps else 'while starting'}"


def carry_out(moment: Moment | Chance, home: Path, cache: Path, wanted: Result) -> Outcome:
    """Kills a process of a run, and restarts the run unless it survived."""
    run = Run(home, moment.method, cache)
    if isinstance(moment, Moment):
        words = moment.words()
        strike(run, moment)
    else:
        words = strike_anywhere(run, moment, wanted.seconds)
    struck = time.monotonic()
    must_end = isinstance(moment, Moment) and moment.target != GENERATION
    code, fault = run.ending(ENDS if must_end else STARTS)
    outcome = Outcome(
        moment.number,
        words,
        moment.method,
        exit_code=code,
        ended_after=time.monotonic() - struck,
        went_on_from=0,
        same=False,
        fault=fault,
        said=run.last_line(),
    )
    survived = REPLACED.search(run.log.read_text()) is not None
    if isinstance(moment, Moment) and code == 0 and not survived:
        raise RuntimeError(f"moment {moment.number} came too late: {run.said()}")
    if isinstance(moment, Moment) and moment.target == GENERATION and code != 0:
        outcome.fault = "the run did not survive"
    if code not in EXPECTED_CODES and not (code == -signal.SIGKILL and words.startswith("controller")):
        outcome.fault = outcome.fault or f"ended with {code}"
    if code != 0:
        again = Run(home, moment.method, cache)
        code, fault = again.ending(STARTS)
        if code != 0:
            outcome.differences = f"the restart failed: {again.said()}"
            return outcome
        outcome.fault = outcome.fault or (fault and f"the restart: {fault}")
        resumed = re.findall(r"continues after step (\d+)|all (\d+) steps are done", again.log.read_text())
        outcome.went_on_from = int("".join(resumed[-1])) if resumed else 0
    outcome.differences = "; ".join(differences(read_result(run.folder), wanted))
    outcome.same = not outcome.differences
    return outcome


# --- results --------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The results of a run, which must not depend on kills."""

    metrics: list[tuple[int, dict[str, Any]]]
    """(step, values) of each line, in the order of the file."""
    weights: dict[str, Any]
    """Tensors of the trained models, actor and critic."""
    seconds: float = 0.0
    """From launch to end; 0: not measured."""


def read_result(folder: Path) -> Result:
    """Metrics and weights of a finished run."""
    from safetensors.torch import load_file

    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        values = {
            name: value
            for name, value in record.items()
            if not name.startswith(("timing_s/", "perf/")) and name != "seconds"
        }
        metrics.append((record["step"], values))
    weights: dict[str, Any] = {}
    for path in sorted((folder / "final_model").rglob("*.safetensors")):
        weights |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return Result(metrics, weights)


def differences(found: Result, wanted: Result) -> Iterator[str]:
    """Differences between two results, in words."""
    import torch

    if [step for step, _ in found.metrics] != [step for step, _ in wanted.metrics]:
        yield f"steps {[step for step, _ in found.metrics]}"
        return
    for (step, mine), (_, theirs) in zip(found.metrics, wanted.metrics, strict=True):
        if names := sorted(
            name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
        ):
            yield f"step {step}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    if not wanted.weights or found.weights.keys() != wanted.weights.keys():
        yield "other weights"
    elif changed := [
        name for name in wanted.weights if not torch.equal(found.weights[name], wanted.weights[name])
    ]:
        yield f"{len(changed)} of {len(wanted.weights)} tensors, the first {changed[0]}"


def table(outcomes: list[Outcome]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| # | method | killed | command ended with | after | resumed from | bit-identical |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        end = "SIGKILL" if one.exit_code == -signal.SIGKILL else str(one.exit_code)
        result = "yes" if one.same else f"NO: {one.differences}"
        result += f"; FAULT: {one.fault}; {one.said}" if one.fault else ""
        start = (
            "it did not stop"
            if one.exit_code == 0
            else f"step {one.went_on_from}"
            if one.went_on_from
            else "the start"
        )
        lines.append(
            f"| {one.number} | {one.method} | {one.moment} | {end} | {one.ended_after:.1f} s | {start} |"
            f" {result} |"
        )
    return "\n".join(lines)


def run_matrix(moments: Sequence[Moment | Chance], home: Path, cache: Path) -> list[Outcome]:
    """Carries out the moments one after the other; progress goes to stderr."""
    wanted = {}
    for method in sorted({moment.method for moment in moments}):
        # the run that makes the recipe's model takes longer than later ones, and would distort `seconds`
        if not any(cache.glob("*/model")):
            Run(home / f"first-{method}", method, cache).finish(STARTS)
        start = time.monotonic()
        whole = Run(home / f"whole-{method}", method, cache)
        if whole.finish(STARTS) != 0:
            raise RuntimeError(f"the uninterrupted run failed: {whole.said()}")
        wanted[method] = replace(read_result(whole.folder), seconds=time.monotonic() - start)
        print(
            f"{method}: {len(wanted[method].metrics)} records, {len(wanted[method].weights)} tensors to"
            " compare",
            file=sys.stderr,
        )
    outcomes = []
    for moment in moments:
        outcomes.append(carry_out(moment, home / f"moment-{moment.number}", cache, wanted[moment.method]))
        print(table(outcomes[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return outcomes


def main() -> int:
    """Runs the matrix; 0 if all results are bit-identical and all runs ended as they should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="number of moments")
    parser.add_argument(
        "--random", type=int, metavar="COUNT", help="instead, kill COUNT random processes at random times"
    )
    parser.add_argument(
        "--generation", type=int, metavar="COUNT", help="instead, kill a generation process COUNT times"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments")
    parser.add_argument("--only", type=int, nargs="*", help="run only the moments with these numbers")
    parser.add_argument("--folder", type=Path, help="folder to keep the runs in; default: a temporary one")
    parser.add_argument("--cache", type=Path, help="the recipe's cache; default: in the folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    home = options.folder or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    drawn: Sequence[Moment | Chance]
    if options.generation is not None:
        drawn = draw_generation(options.generation, options.seed)
    elif options.random is not None:
        drawn = draw_chances(options.random, options.seed)
    else:
        drawn = draw_moments(options.moments, options.seed)
    moments = [moment for moment in drawn if not options.only or moment.number in options.only]
    outcomes = run_matrix(moments, home.resolve(), (options.cache or home / "cache").resolve())
    print(json.dumps([asdict(one) for one in outcomes], indent=1) if options.json else table(outcomes))
    if options.folder is None:
        shutil.rmtree(home)
    return 0 if all(one.passed for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
