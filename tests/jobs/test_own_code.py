"""A loss and an estimator of one's own, and modules to import: what is refused before a run, and a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs.command import LOCAL, SMALL_RECIPE, assert_refused, completed, hydraflow, read_steps

from hydraflow.algorithms.config import ESTIMATORS, POLICY_LOSSES
from hydraflow.batch_plan.roles import own_reference
from hydraflow.compose.own_functions import ESTIMATOR, LOSS, own_files
from hydraflow.errors import ConfigError
from hydraflow.jobs import own_code
from hydraflow.models.config import ModelConfig
from hydraflow.schema import PPOConfig
from hydraflow.tracking.run_folder import RunFolder
from hydraflow.trainer.phases import step_phases

GOOD = """
import torch
from hydraflow.algorithms.token_terms import TokenTerms

def loss(tokens, *, clip_ratio_high, strength=2.0):
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    objective = strength * tokens.advantages * ratio.clamp(max=1 + clip_ratio_high)
    return TokenTerms(-objective, {"actor/mine": ratio})

def anchored(tokens, *, rollout_log_probs, ref_log_prob, strength=0.1):
    drift = tokens.log_probs - ref_log_prob
    gap = (tokens.old_log_probs - rollout_log_probs).abs()
    objective = tokens.advantages * tokens.log_probs - strength * drift**2
    return TokenTerms(-objective, {"actor/drift": drift.detach().abs(), "actor/gap": gap})

def centred(scores, *, group_ids, gamma):
    means = torch.zeros(int(group_ids.max()) + 1).index_add(0, group_ids, scores) / torch.bincount(group_ids)
    return gamma * (scores - means[group_ids])

def per_token(rewards, mask, lengths, *, values):
    return (rewards - values) * mask, rewards * mask
"""

Choose = Callable[..., PPOConfig]


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    def chosen(text: str = GOOD, **names: str) -> PPOConfig:
        (tmp_path / "mine.py").write_text(text)
        config = PPOConfig()
        if "estimator" in names:
            config.algorithm.adv_estimator = f"{tmp_path}/mine.py:{names['estimator']}"
        if "loss" in names:
            config.actor_rollout_ref.actor.policy_loss.loss_mode = f"{tmp_path}/mine.py:{names['loss']}"
        return config

    return chosen


def refused(config: PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        own_code.check_functions(config)
    [problem] = error.value.problems
    return str(problem)


@pytest.mark.parametrize("loss", ["loss", "anchored"])
def test_functions_that_fit(loss: str, choose: Choose) -> None:
    own_code.check_functions(choose(estimator="centred", loss=loss))


def test_a_loss_takes_columns_by_name(choose: Choose) -> None:
    config = choose(estimator="centred", loss="anchored")
    phases = {phase.name: phase for phase in step_phases(config)}
    assert {"rollout_log_probs", "ref_log_prob"} <= {*phases["actor"].reads}
    assert "ref_log_prob" in phases["reference"].adds and own_reference(config)
    plain = {phase.name: phase for phase in step_phases(choose(estimator="centred", loss="loss"))}
    assert "reference" not in plain and "rollout_log_probs" not in plain["actor"].reads


def test_the_facts_are_those_of_the_signature(choose: Choose) -> None:
    config = choose(estimator="per_token", loss="loss")
    per_token = ESTIMATORS[config.algorithm.adv_estimator]
    assert (per_token.critic, per_token.groups, per_token.per_trajectory) == (True, False, False)
    centred = ESTIMATORS[choose(estimator="centred").algorithm.adv_estimator]
    assert (centred.critic, centred.groups, centred.per_trajectory) == (False, True, True)
    actor = config.actor_rollout_ref.actor
    assert POLICY_LOSSES[actor.policy_loss.loss_mode].bound(actor).keywords == {"clip_ratio_high": 0.2}
    assert "mine" not in POLICY_LOSSES and POLICY_LOSSES.get("mine") is None
    with pytest.raises(KeyError):
        ESTIMATORS["mine"]


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        (GOOD, {"loss": "nothing"}, "no such function; it has loss, anchored, centred, per_token"),
        (GOOD, {"loss": "centred"}, "its parameter group_ids is not a key of actor or actor.policy_loss"),
        (GOOD, {"estimator": "loss"}, "must take scores, or rewards, mask and lengths"),
        ("def f(): pass\n", {"loss": "f"}, "must take the tokens"),
        ("def f(scores, values): pass\n", {"estimator": "f"}, "it cannot take values"),
        ("def f(scores, *, lamda): pass\n", {"estimator": "f"}, "parameter lamda is not a key of algorithm"),
        ("def f(tokens, *, optim): pass\n", {"loss": "f"}, "parameter optim is not a key of actor"),
        (
            "def f(scores, *, kl_ctrl): pass\n",
            {"estimator": "f"},
            "parameter kl_ctrl is not a key of algorithm",
        ),
    ],
)
def test_parameters_that_do_not_fit(choose: Choose, text: str, names: dict[str, str], words: str) -> None:
    reported = refused(choose(text, **names))
    assert words in reported and "mine.py:" in reported and "->" in reported


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("import not_there\ndef f(tokens): pass\n", {"loss": "f"}, "No module named 'not_there' (line 1"),
        (
            "import os\nos._exit(0)\ndef f(tokens): pass\n",
            {"loss": "f"},
            "it ended its process (exit code 0)",
        ),
        ("def f(tokens):\n    return {}[tokens]\n", {"loss": "f"}, "(line 2: return {}[tokens])"),
        ("def f(tokens):\n    return tokens.log_probs\n", {"loss": "f"}, "returned a Tensor, not TokenTerms"),
        (
            "from hydraflow.algorithms.token_terms import TokenTerms\ndef f(tokens):\n"
            "    weight = 1 / (1 - tokens.old_log_probs.exp())\n"  # infinite in padding alone
            "    return TokenTerms(-weight * tokens.log_probs.sum(1, keepdim=True).exp())\n",
            {"loss": "f"},
            "its gradient is not finite; where the mask is 0,",
        ),
        ("def f(scores):\n    return scores / 0\n", {"estimator": "f"}, "advantages are not finite"),
    ],
)
def test_functions_that_fail_when_they_are_tried(
    choose: Choose, text: str, names: dict[str, str], words: str
) -> None:
    assert words in refused(choose(text, **names))


def test_a_file_whose_import_hangs(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "SECONDS", 1.0)
    started = time.monotonic()
    assert "its import did not finish within 1 seconds" in refused(
        choose("import time\ntime.sleep(60)\ndef f(tokens): pass\n", loss="f")
    )
    assert time.monotonic() - started < 30


def test_a_module_that_starts_a_process_or_fails_at_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that it leaves behind holds the pipe open; a long message does not fit into it."""
    monkeypatch.setattr(own_code, "SECONDS", 60.0)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "that_forks.py").write_text("import os, time\nif os.fork() == 0:\n    time.sleep(300)\n")
    (tmp_path / "at_length.py").write_text("raise RuntimeError('x' * 300_000)\n")
    began = time.monotonic()
    own_code.check_modules(ModelConfig(external_lib="that_forks"), "model")
    with pytest.raises(ConfigError, match="RuntimeError: xxx"):
        own_code.check_modules(ModelConfig(external_lib="at_length"), "model")
    assert time.monotonic() - began < 50


def test_modules_are_imported_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends_the_process.py").write_text("raise SystemExit(3)\n")
    own_code.check_modules(ModelConfig(external_lib="json"), "model")
    with pytest.raises(ConfigError, match=r"model.external_lib=.*ends_the_process.*SystemExit: 3"):
        own_code.check_modules(ModelConfig(external_lib=["json", "ends_the_process"]), "model")


def test_what_is_kept_of_a_file(tmp_path: Path, choose: Choose, caplog: pytest.LogCaptureFixture) -> None:
    config = choose(estimator="centred", loss="loss")
    config.reward.custom_reward_function.path = f"{tmp_path}/mine.py"
    folder = RunFolder.make(str(tmp_path / "run"), "run")
    kept = folder.keep_code(own_files(config))
    assert set(kept) == {ESTIMATOR, LOSS, "reward.custom_reward_function.path"}
    assert (folder.path / kept[LOSS]["copy"]).read_text() == GOOD
    config.reward.functions = [{"name": "length"}, {"path": f"{tmp_path}/mine.py"}]
    assert own_files(config)["reward.functions[1].path"] == tmp_path / "mine.py"
    config.reward.functions = []
    folder.note_start({"code": kept})
    assert folder.keep_code(own_files(config)) == kept and caplog.text == ""
    again = folder.keep_code(own_files(choose(GOOD + "# another\n", loss="loss")))
    assert f"{LOSS}: {tmp_path}/mine.py has changed since this run last started" in caplog.text
    assert (folder.path / kept[LOSS]["copy"]).read_text() == GOOD
    assert again[LOSS]["copy"] != kept[LOSS]["copy"]


def test_a_command_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(hydraflow("main_ppo", f"{ESTIMATOR}=mine.py:f", cwd=tmp_path), ESTIMATOR, "no such file")
    done = hydraflow("main_ppo", f"{LOSS}=mine", cwd=tmp_path)
    assert_refused(done, LOSS, "kl_cov, or your own function as path.py:name")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").symlink_to("/proc/self/mem")  # for root, too
    done = hydraflow("main_ppo", f"{LOSS}=mine.py:f", cwd=tmp_path)
    assert_refused(done, LOSS, "cannot be read: Input/output error\n", f"-> make {tmp_path}/mine.py readable")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["loss", "anchored"])
def test_a_run_with_functions_and_modules_of_ones_own(
    loss: str, tmp_path: Path, recipe_cache: Path, choose: Choose
) -> None:
    choose()
    (tmp_path / "library_of_mine.py").write_text("open('imported', 'a').write('x')\n")
    given = [*SMALL_RECIPE, *LOCAL, f"recipe.cache_dir={recipe_cache}"]
    given += ["trainer.total_training_steps=1", "trainer.default_local_dir=run"]
    given += [f"{ESTIMATOR}=mine.py:per_token", f"{LOSS}=mine.py:{loss}"]
    given += ["actor_rollout_ref.model.external_lib=library_of_mine"]
    completed("main_ppo", *given, cwd=tmp_path, fresh=True)
    [step] = [row for row in read_steps(tmp_path / "run") if row["step"] == 1]
    assert "critic/vf_loss" in step
    if loss == "loss":
        assert step["actor/mine"] == pytest.approx(1.0, abs=0.5)
    else:  # these weights are the reference's
        assert step["actor/drift"] == pytest.approx(0, abs=1e-5) == step["actor/gap"]
    [start] = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert (tmp_path / "run" / start["code"][LOSS]["copy"]).read_text() == GOOD
    assert len((tmp_path / "imported").read_text()) >= 2, "in the process that tries it, and in the run's"
