#!/usr/bin/env python
"""Kills runs with SIGKILL at random moments, starts them again, and compares them with runs that nothing
stopped.

In: nothing but a number of moments and a seed. Out: a table (or JSON) with one line per moment: whom the
signal hit and when, how the command ended, where it resumed, and whether weights and metrics are those of the
run without a stop, bit by bit. Exit code 1 when one is not, when a run ended without a word (a stack trace,
another exit code than 0, 3 or 4), or when a process of it outlived it.

    python scripts/kill_matrix.py                       20 moments, about a quarter of an hour on two cores
    python scripts/kill_matrix.py --random 20           any process of the run, Ray's included, at any time
    python scripts/kill_matrix.py --generation 6        a process of the generation engine: the run must go on
    python scripts/kill_matrix.py --moments 3 --json    the first three of the twenty

tests/jobs/test_resume.py carries out the tenth of the twenty, and kills the controller after that.

`timing_s/*`, `perf/*` and the wall time of a record are left out of the comparison: they are never the same
twice.
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
"""Seconds that a run may take to end once a process of it was killed."""
STARTS = 240.0
"""Seconds that a run may take until the moment has come, or until it is done."""
LEFTOVERS = 10.0
"""Seconds in which every process of an ended run must be gone."""
TOLD = (0, 3, 4)
"""Exit codes of a run that lost a process: it did not matter, something of Ray's, a worker."""
MARK = "HYDRAFLOW_KILL_MATRIX"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(said == right for said, right in zip(solution_str, ground_truth)) / len(ground_truth)
"""
"""Share of right digits: a model that has hardly been warmed up is never right as a whole."""
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
"""What is trained, on two ranks: each training step makes two optimizer steps."""
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
"""The generation engine on two devices of its own, so that its processes hold nothing that cannot be made
again. They are sampling, idle or receiving weights, whatever the moment hits."""
REPLACED = re.compile(r"rollout rank \d on node \S+ is started again: ")


@dataclass(frozen=True)
class Moment:
    """Whom to kill, and when."""

    number: int
    target: str
    method: str
    steps: int
    """Lines of metrics.jsonl to wait for; step 0, the validation before training, is the first. In the middle
    of a save: the save."""
    delay: float
    """Seconds to wait after that."""
    rank: int
    """Which of the two training processes, where one is meant; -1: in the middle of a save, the
    controller."""

    def words(self) -> str:
        """The moment in words, for the table."""
        whom = (
            f"{self.target} {self.rank}"
            if self.target in ("actor rank", "rollout worker", GENERATION)
            else self.target
        )
        if self.target == "middle of a save":
            whom = (
                f"{'controller' if self.rank < 0 else f'rank {self.rank}'} in the middle of save {self.steps}"
            )
            return f"{whom} + {1000 * self.delay:.0f} ms"
        return f"{whom} after step {self.steps - 1} + {1000 * self.delay:.0f} ms"


@dataclass(frozen=True)
class Chance:
    """Any process, at any time."""

    number: int
    method: str
    at: float
    """Share of the time that the run without a stop took, from its launch."""
    kind: float
    """Which kind of process, as a share of those that there are then in the order of their names."""
    which: float
    """Which process of that kind, likewise."""


@dataclass
class Outcome:
    """What came of a moment."""

    number: int
    moment: str
    method: str
    exit_code: int
    """Of the run that was hit; -9: the controller itself."""
    ended_after: float
    """Seconds from the signal to the end of the command."""
    went_on_from: int
    """Step of the checkpoint; 0: there was none yet."""
    same: bool
    """Whether metrics and weights are those of the run without a stop."""
    differences: str = ""
    fault: str = ""
    """What is wrong with how the run ended; empty: nothing."""
    said: str = ""
    """The last line of its output."""

    @property
    def passed(self) -> bool:
        """Bit-identical, and ended as it should."""
        return self.same and not self.fault


def draw_moments(count: int, seed: int) -> list[Moment]:
    """That many moments, the targets in turn."""
    chance = random.Random(seed)
    moments = []
    for number in range(count):
        target = TARGETS[number % len(TARGETS)]
        method = list(METHODS)[number // len(TARGETS) % len(METHODS)]
        steps, rank = chance.randint(1, STEPS - 1), chance.randint(0, 1)
        delay = {"rollout worker": chance.uniform(0.0, 0.03), "actor rank": chance.uniform(0.08, 0.2)}.get(
            target, chance.uniform(0.0, 0.25)
        )
        if target == "middle of a save":
            steps, delay, rank = chance.randint(1, 3), chance.uniform(0.0, 0.12), chance.choice((-1, 0, 1))
        moments.append(Moment(number + 1, target, method, steps, delay, rank))
    return moments


def draw_chances(count: int, seed: int) -> list[Chance]:
    """That many moments; the methods in turn. One in four hits the first half of the run's time, in which
    most often the controller is alone."""
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
    """That many moments at which a generation process is killed."""
    chance = random.Random(seed)
    drawn = [
        (chance.randint(1, STEPS - 1), chance.uniform(0.0, 0.5), chance.randint(0, 1)) for _ in range(count)
    ]
    return [Moment(number + 1, GENERATION, "apart", *one) for number, one in enumerate(drawn)]


class Run:
    """One command, in a session of its own."""

    def __init__(self, home: Path, method: str, cache: Path):
        self.home = home
        self.folder = home / "out"
        self.log = home / "log"
        self.mark = f"{MARK}={home}"
        home.mkdir(parents=True, exist_ok=True)
        (home / "reward.py").write_text(REWARD)
        given = [*COMMON, *(APART if method == "apart" else METHODS[method]), f"recipe.cache_dir={cache}"]
        given += [f"trainer.default_local_dir={self.folder}"]
        self.process = self.launch([*given, f"reward.custom_reward_function.path={home}/reward.py"])

    def launch(self, given: list[str]) -> Any:
        """Starts main_ppo, and returns its process."""
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
        """All processes of the run that live, this command included."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == self.mark.partition("=")[2]
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def trainers(self) -> list[psutil.Process]:
        """The training processes: workers of Ray without a child, that which scores having the reward
        processes as children."""
        workers = [process for process in self.family() if _title(process).startswith("ray::WorkerHost")]
        return sorted(
            (process for process in workers if not process.children()), key=lambda process: process.pid
        )

    def generator(self, rank: int) -> psutil.Process:
        """The generation process of a rank: it has the role's log file open."""
        log = str(self.folder / "logs" / f"rollout-{rank}.log")
        workers = [process for process in self.family() if _title(process).startswith("ray::WorkerHost")]
        [found] = [one for one in workers if log in [file.path for file in one.open_files()]]
        return found

    def kinds(self) -> dict[str, list[psutil.Process]]:
        """Its processes by what they are: controller, gcs_server, raylet, ray::WorkerHost and so on, reward
        processes as python -c."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.family():
            kind = "controller" if process.pid == self.process.pid else _kind(process)
            if kind:
                found.setdefault(kind, []).append(process)
        return dict(sorted(found.items()))

    def finish(self, seconds: float) -> int:
        """Exit code, once the command and all its processes have ended."""
        code = self.process.wait(timeout=seconds)
        wait_until(lambda: not self.family(), LEFTOVERS, f"the processes of {self.mark} to end")
        return code

    def ending(self, seconds: float) -> tuple[int, str]:
        """Exit code, and what is wrong with how it ended; what it left behind is killed."""
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
        """The end of what it printed."""
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
    """The program's name; for Python the script, the module or -c; empty: it is gone."""
    title = _title(process)
    if title.startswith("ray::"):
        return title.split()[0].partition(".")[0].partition("(")[0]
    words = title.split()[1:]
    if not process.name().startswith("python") or not words:
        return process.name()
    script = next((word for word in words if word == "-c" or not word.startswith("-")), "")
    return f"python {Path(script).name}"


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Polls a condition every 2 ms until a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.002)


def strike(run: Run, moment: Moment) -> None:
    """Waits for the moment and kills."""
    trainers = []
    if moment.target in ("actor rank", "rollout worker", "middle of a save", GENERATION):
        wait_until(
            lambda: run.process.poll() is not None or run.lines() >= 1,
            STARTS,
            "the validation before training",
        )
        of_generation = moment.target == GENERATION
        trainers = [run.generator(rank) for rank in (0, 1)] if of_generation else run.trainers()
    if moment.target == "middle of a save":
        step = 2 * moment.steps
        saving = f"global_step_{step}.*.unfinished"
        wait_until(lambda: run.process.poll() is not None or any(run.folder.glob(saving)), STARTS, "a save")
    else:
        wait_until(
            lambda: run.process.poll() is not None or run.lines() >= moment.steps,
            STARTS,
            f"{moment.steps} lines",
        )
    raylets = (
        [process for process in run.family() if process.name() == "raylet"]
        if moment.target == "raylet"
        else []
    )
    time.sleep(moment.delay)
    if moment.target == "raylet":
        raylets[0].kill()
    elif moment.target == "controller" or moment.rank < 0:
        os.kill(run.process.pid, signal.SIGKILL)
    else:
        trainers[moment.rank].kill()


def strike_anywhere(run: Run, chance: Chance, whole: float) -> str:
    """Waits for the moment and kills; returns whom and when. `whole`: seconds that the run without a stop
    took."""
    seconds = chance.at * whole
    try:
        run.process.wait(timeout=seconds)
        return f"none after {seconds:.1f} s: it was over"
    except subprocess.TimeoutExpired:
        kinds = run.kinds()
    kind = list(kinds)[int(chance.kind * len(kinds))]
    victim = kinds[kind][int(chance.which * len(kinds[kind]))]
    steps = run.lines()
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return f"{kind} after {seconds:.1f} s: it was gone"
    return f"{kind} after {seconds:.1f} s, {f'step {steps - 1}' if steps else 'while starting'}"


def carry_out(moment: Moment | Chance, home: Path, cache: Path, wanted: Result) -> Outcome:
    """Kills a process of a run, and starts the run again where it did not come to its end."""
    run = Run(home, moment.method, cache)
    if isinstance(moment, Moment):
        words = moment.words()
        strike(run, moment)
    else:
        words = strike_anywhere(run, moment, wanted.seconds)
    struck = time.monotonic()
    ends = isinstance(moment, Moment) and moment.target != GENERATION
    code, fault = run.ending(ENDS if ends else STARTS)
    outcome = Outcome(
        moment.number,
        words,
        moment.method,
        code,
        time.monotonic() - struck,
        0,
        False,
        fault=fault,
        said=run.last_line(),
    )
    survived = REPLACED.search(run.log.read_text()) is not None
    if isinstance(moment, Moment) and code == 0 and not survived:
        raise RuntimeError(f"moment {moment.number} came too late: {run.said()}")
    if isinstance(moment, Moment) and moment.target == GENERATION and code != 0:
        outcome.fault = "it did not go on"
    if code not in TOLD and not (code == -signal.SIGKILL and whom_is_controller(words)):
        outcome.fault = outcome.fault or f"ended with {code}"
    if code != 0:
        again = Run(home, moment.method, cache)
        code, fault = again.ending(STARTS)
        if code != 0:
            outcome.differences = f"the second start failed: {again.said()}"
            return outcome
        outcome.fault = outcome.fault or (fault and f"the second start: {fault}")
        resumed = re.findall(r"continues after step (\d+)|all (\d+) steps are done", again.log.read_text())
        outcome.went_on_from = int("".join(resumed[-1])) if resumed else 0
    outcome.differences = "; ".join(differences(read_result(run.folder), wanted))
    outcome.same = not outcome.differences
    return outcome


def whom_is_controller(words: str) -> bool:
    """Whether the signal hit the command itself."""
    return words.startswith("controller")


# --- results --------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a run leaves that must be the same."""

    metrics: list[tuple[int, dict[str, Any]]]
    """Every line: step and values, in the order of the file."""
    weights: dict[str, Any]
    """Every trained tensor, actor's and critic's."""
    seconds: float = 0.0
    """From the launch to the end, where it was measured."""


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
        verdict = "yes" if one.same else f"NO: {one.differences}"
        verdict += f"; FAULT: {one.fault}; {one.said}" if one.fault else ""
        start = (
            "it did not stop"
            if one.exit_code == 0
            else f"step {one.went_on_from}"
            if one.went_on_from
            else "the start"
        )
        lines.append(
            f"| {one.number} | {one.method} | {one.moment} | {end} | {one.ended_after:.1f} s | {start} |"
            f" {verdict} |"
        )
    return "\n".join(lines)


def run_matrix(moments: Sequence[Moment | Chance], home: Path, cache: Path) -> list[Outcome]:
    """Carries out the moments, one after the other, telling on stderr how it goes."""
    wanted = {}
    for method in sorted({moment.method for moment in moments}):
        if not any(
            cache.glob("*/model")
        ):  # a run that makes the recipe's model takes longer than those that find it
            Run(home / f"first-{method}", method, cache).finish(STARTS)
        start = time.monotonic()
        whole = Run(home / f"whole-{method}", method, cache)
        if whole.finish(STARTS) != 0:
            raise RuntimeError(f"the run without a stop failed: {whole.said()}")
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
    """Runs the matrix; 0 when all are bit-identical and ended as they should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=20, help="how many")
    parser.add_argument(
        "--random", type=int, metavar="COUNT", help="instead, COUNT moments at which any process may be hit"
    )
    parser.add_argument(
        "--generation", type=int, metavar="COUNT", help="instead, COUNT kills of a generation process"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the moments to carry out")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: a temporary folder")
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
