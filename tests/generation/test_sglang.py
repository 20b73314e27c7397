"""The client of SGLang's server against plain forwards and the native engine, with a stand-in that keeps the
recorded contract and really samples."""

from __future__ import annotations

import copy
import http.client
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from generation.stand_in import Installed, installed
from generation.test_native import (
    CONFIGS,
    END,
    add_noise,
    expected_log_probs,
    in_buckets,
    largest_gap,
    make,
    make_request,
    rows,
    weights,
)
from generation.test_requests import drained, single
from generation.test_stopping import letters
from generation.test_vllm import (
    assert_ends_with_end_tokens,
    assert_native,
    assert_stops_at_strings,
    assert_trainers_log_probs,
    update,
    update_borrowed,
)
from transformers import PreTrainedModel

from hydraflow.errors import ConfigError, EnvironmentFault
from hydraflow.generation import sglang, sglang_weights
from hydraflow.generation.base import ABORT, EngineSpec, GenerationRequest, ReadableEngine, SamplingParams
from hydraflow.generation.config import EngineKwargs, RolloutConfig
from hydraflow.generation.requests import engine_context
from hydraflow.generation.sglang import SglangEngine

pytestmark = pytest.mark.slow

CONFIG = copy.deepcopy(CONFIGS["qwen3 tied"])
CONFIG.attention_chunk_size = 6  # which this type ignores
GREEDY = SamplingParams(max_tokens=16, temperature=0)
NEAR = 1e-5
LONGEST = 64
"""As many tokens as the model has positions."""


def build(*, start_seconds: float = 100.0, **rollout: Any) -> SglangEngine:
    config = RolloutConfig(name="sglang", **{"max_num_seqs": 8, **rollout})
    spec = EngineSpec(
        config,
        torch.device("cpu"),
        torch.float32,
        None,
        longest_row=LONGEST,
        tokenizer=letters(),
        start_seconds=start_seconds,
    )
    return sglang.build(CONFIG, spec)


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[None]:
    """A place of this module's own in memory for the files of weights, which it counts."""
    shared = sglang_weights.SHARED_MEMORY
    with tempfile.TemporaryDirectory(dir=shared) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_weights, "SHARED_MEMORY", Path(folder))
        patch.delenv("TMPDIR", raising=False)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with installed(tmp_path_factory.mktemp("sglang")) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def started(server: Installed) -> Iterator[SglangEngine]:
    """With draws that depend on a request's seed alone."""
    engine = build(engine_kwargs=EngineKwargs(sglang={"enable_deterministic_inference": True}))
    yield engine
    engine._server.end()


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Three whose weights differ in every matrix."""
    made = [make(CONFIG) for _ in range(3)]
    for seed, model in enumerate(made[1:]):
        add_noise(model, seed)
    return made


def load(engine: SglangEngine, model: PreTrainedModel, max_bytes: int = 10**6) -> None:
    update(engine, in_buckets(model, max_bytes))


@pytest.fixture
def engine(server: Installed, started: SglangEngine, models: list[PreTrainedModel]) -> SglangEngine:
    """With the first model's weights."""
    server.goes_wrong()
    load(started, models[0])
    return started


def eventually(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def folders() -> set[Path]:
    return set(sglang_weights.SHARED_MEMORY.glob("hydraflow-sglang-*"))


def test_greedy_is_native_token_for_token(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    """Also where the longest row is as long as the model's positions."""
    assert_native(engine.generate, models[0], make_request([1, 3, 9, 17, LONGEST - 16]), GREEDY)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9}])
def test_log_probs_are_the_trainers_whatever_is_filtered(
    engine: SglangEngine, models: list[PreTrainedModel], temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, **filters)
    assert_trainers_log_probs(engine.generate, models[0], make_request([3, 8], samples=4), params)


def test_end_tokens(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    assert_ends_with_end_tokens(engine.generate, models[0], make_request([5, 6, 7], samples=8))


def test_stop_strings_are_natives(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    free = assert_stops_at_strings(engine.generate, models[0], 16)
    assert any(END in row for row in free), "the server's tokenizer has no end token"


@pytest.mark.parametrize("max_bytes", [1000, 10_000, 10**6], ids=["parts", "some weights", "all"])
def test_three_updates_in_a_row(
    engine: SglangEngine, models: list[PreTrainedModel], max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "FILE_BYTES", 5000)
    request = make_request([3, 9], samples=2)
    for model in (models[1], models[2], models[0]):
        load(engine, model, max_bytes)
        output = engine.generate(request, SamplingParams(max_tokens=10))
        assert largest_gap(model, request, output, 1.0) < NEAR
    assert list(engine._files.folder.glob("*.safetensors")) == [], "the files are gone once they are loaded"


def test_a_borrowed_stream(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    update_borrowed(engine, weights(models[1]))
    request = make_request([3, 9])
    assert largest_gap(models[1], request, engine.generate(request, GREEDY), 1.0) < NEAR


def test_weights_that_do_not_fit_are_refused(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    first, *others = weights(models[0]).items()
    embedding = weights(models[0])["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="has no weight model.norms.weight; did you mean model.norm.weight?"):
        engine.update_weights([("model.norms.weight", torch.ones(32))])
    with pytest.raises(ValueError, match=rf"weight {first[0]} has shape \(2, 2\)"):
        engine.update_weights([(first[0], torch.ones(2, 2))])
    with pytest.raises(ValueError, match="are one tensor .* but were sent with different values"):
        engine.update_weights([first, *others, ("lm_head.weight", embedding + 1)])
    with pytest.raises(ValueError, match=f"1 of .* are missing: {first[0]}"):
        engine.update_weights(others)
    with pytest.raises(RuntimeError, match="failed half-way"):
        engine.generate(make_request([3]), GREEDY)
    engine.update_weights([first, *others], last=False)
    engine.update_weights([("lm_head.weight", embedding)], first=False)
    request = make_request([3])
    assert largest_gap(models[0], request, engine.generate(request, GREEDY), 1.0) < NEAR


def test_weights_that_are_not_numbers_are_noticed(
    engine: SglangEngine, models: list[PreTrainedModel]
) -> None:
    broken = copy.deepcopy(models[0])
    for parameter in broken.parameters():
        parameter.data.fill_(torch.nan)
    load(engine, broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(make_request([3, 9], samples=2), GREEDY)
    load(engine, models[0])
    request = make_request([3])
    assert largest_gap(models[0], request, engine.generate(request, GREEDY), 1.0) < NEAR


def test_requests_are_advanced_aborted_and_continued(
    server: Installed, engine: SglangEngine, models: list[PreTrainedModel]
) -> None:
    """More than the server gets at a time. What was aborted is continued to the unbroken response, because
    the server draws by seed and position."""
    params = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True)
    request = make_request([3, 8, 5, 6], samples=5)
    wanted = single(request, params)
    whole = dict(zip([one.name for one in wanted], rows(engine.generate(request, params))))
    server.goes_wrong(pace=0.03)
    engine.submit(wanted)
    with pytest.raises(RuntimeError, match="requests are in flight"):
        load(engine, models[1])
    found = {one.name: one for one in engine.advance()}
    halted = engine.abort([one.name for one in wanted[:4]] + ["of nobody"])
    assert {one.name for one in halted} | found.keys() >= {one.name for one in wanted[:4]}
    halted += engine.abort([one.name for one in wanted])
    assert engine.advance() == [] and {one.name for one in halted} | found.keys() == whole.keys()
    broken = [one for one in halted if one.finish_reason == ABORT]
    assert any(len(one.tokens) for one in broken) and any(not len(one.tokens) for one in broken)
    server.goes_wrong()
    sampled = {one.name: tuple(one.tokens.tolist()) for one in broken}
    rest = [replace(one, sampled=sampled[one.name]) for one in wanted if one.name in sampled]
    engine.submit(rest)
    continued = drained(engine)
    for one in rest:
        assert [*one.sampled, *continued[one.name].tokens.tolist()] == whole[one.name]
        expected = expected_log_probs(models[0], one.context, continued[one.name].tokens, 0.7)
        assert float((continued[one.name].log_probs - expected).abs().max()) < NEAR


def test_it_sleeps(engine: SglangEngine, models: list[PreTrainedModel]) -> None:
    request = make_request([3, 9])
    before = rows(engine.generate(request, GREEDY))
    engine.sleep()
    engine.sleep()  # a second one changes nothing
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        engine.generate(request, GREEDY)
    load(engine, models[0], max_bytes=10_000)
    assert rows(engine.generate(request, GREEDY)) == before
    assert not isinstance(engine, ReadableEngine)


def test_what_does_not_fit_is_refused(server: Installed, engine: SglangEngine) -> None:
    with pytest.raises(ValueError, match="prompt 1 has 60 tokens; .* is 76, more than .*max_model_len=64"):
        engine.generate(make_request([3, 60]), GREEDY)
    with pytest.raises(ValueError, match="prompt 0 holds token 23; the vocabulary has 23"):
        engine.generate(GenerationRequest([torch.tensor([23])], [1], [(0,)]), GREEDY)
    request, known = make_request([60]), engine._limits
    engine._limits = replace(known, context=engine_context(1000))
    with pytest.raises(
        RuntimeError, match=r"SGLang refused /generate \(400\): Requested token count exceeds"
    ):
        engine.generate(request, GREEDY)
    engine._limits = known
    server.goes_wrong(cuts=2)
    with pytest.raises(RuntimeError, match="SGLang ended a response at 2 of 16 tokens: its KV cache"):
        engine.generate(make_request([3]), SamplingParams(max_tokens=16, ignore_eos=True))


def test_a_full_memory_is_named(
    engine: SglangEngine, models: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = sglang_weights.shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(EnvironmentFault, match="has 0.00 GiB free, .* TMPDIR="):
        load(engine, models[0])


# --- servers that fail; without a model --------------------------------------------------------------------


@pytest.fixture
def hollow(tmp_path: Path) -> Iterator[Installed]:
    with installed(tmp_path) as stand_in:
        stand_in.goes_wrong(hollow=True)
        yield stand_in


def ready(engine: SglangEngine) -> SglangEngine:
    """As if it had weights."""
    engine._not_ready = ""
    return engine


def test_it_takes_a_while_to_become_healthy(hollow: Installed) -> None:
    before = folders()
    hollow.goes_wrong(hollow=True, slow=1.0)
    engine = ready(build())
    assert rows(engine.generate(make_request([3]), SamplingParams(max_tokens=2))) == [[5, 5]]
    assert len(hollow.processes()) == 2 and len(folders() - before) == 1
    engine._server.end()
    assert hollow.processes() == [] and folders() == before


def test_it_answers_nobody_without_its_key_which_no_command_line_has(hollow: Installed) -> None:
    before = folders()
    hollow.goes_wrong(hollow=True)
    engine = build()
    (folder,) = folders() - before
    key = yaml.safe_load((folder / "server.yaml").read_text())["api-key"]
    assert folder.stat().st_mode & 0o777 == 0o700 and len(key) == 64
    lines = [psutil.Process(pid).cmdline() for pid in [os.getpid(), *hollow.processes()]]
    assert not [words for words in lines if key in " ".join(words)]
    for given in ({}, {"Authorization": f"Bearer {key[:-1]}x"}):
        connection = http.client.HTTPConnection("127.0.0.1", engine._server._port, timeout=30)
        connection.request("POST", "/flush_cache", "{}", given)
        assert connection.getresponse().status == 401
        connection.close()
    engine._server.post("/flush_cache", {})
    engine._server.end()


def test_one_that_does_not_become_healthy_is_ended(hollow: Installed) -> None:
    before = folders()
    hollow.goes_wrong(hollow=True, slow=1000)
    healthy = (
        r"was not healthy within 4.5 seconds, .*trainer.start_timeout.* http://127.0.0.1:\d+/health was 503"
    )
    with pytest.raises(EnvironmentFault, match=rf"(?s){healthy}; it printed last:\n  Load weight begin"):
        build(start_seconds=5)
    assert hollow.processes() == [] and folders() == before


@pytest.mark.parametrize(
    ("faults", "given", "printed"),
    [
        ({"dies_at_start": True}, {}, "Load weight begin.*Not enough memory"),
        ({}, {"wrong_argument": 3}, "unrecognized arguments: --wrong-argument 3"),
    ],
)
def test_one_that_does_not_start_says_why(
    hollow: Installed, faults: dict[str, Any], given: dict[str, Any], printed: str
) -> None:
    before = folders()
    hollow.goes_wrong(hollow=True, **faults)
    ended = r"ended \(exit code \d\) before it was healthy; it printed last"
    with pytest.raises(EnvironmentFault, match=rf"(?s){ended}.*{printed}"):
        build(engine_kwargs=EngineKwargs(sglang=given))
    assert folders() == before


def test_one_that_dies_while_it_samples(hollow: Installed) -> None:
    engine = ready(build())
    hollow.goes_wrong(hollow=True, dies="/generate")
    with pytest.raises(
        EnvironmentFault, match=r"(?s)ended \(.*\) before it answered /generate.*out of memory"
    ):
        engine.generate(make_request([3, 4], samples=8), GREEDY)
    assert hollow.processes() == [] and engine.advance() == []


def test_one_that_hangs_is_ended(hollow: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(sglang, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(sglang, "CALL_SECONDS", 1.0)
    engine = ready(build())
    hollow.goes_wrong(hollow=True, hangs="/generate")
    with pytest.raises(EnvironmentFault, match="SGLang's server has answered nothing for [12] seconds"):
        engine.generate(make_request([3, 4], samples=8), GREEDY)
    assert hollow.processes() == []
    hollow.goes_wrong(hollow=True)
    engine = ready(build())
    hollow.goes_wrong(hollow=True, hangs="/flush_cache")
    with pytest.raises(EnvironmentFault, match="gave no answer to /flush_cache.* within 1 seconds"):
        engine.sleep()
    assert hollow.processes() == []


def test_a_slow_response_is_waited_for_while_the_server_is_healthy(
    hollow: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(sglang, "SILENCE_SECONDS", 0.3)
    engine = ready(build())
    hollow.goes_wrong(hollow=True, pace=0.1)
    assert rows(engine.generate(make_request([3]), SamplingParams(max_tokens=8))) == [[5] * 8]
    engine._server.end()


def test_an_older_version_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with installed(tmp_path, "0.5.22") as stand_in, pytest.raises(ConfigError) as refused:
        build()
    [problem] = refused.value.problems
    assert problem.field == "actor_rollout_ref.rollout.name" and problem.value == "sglang"
    assert problem.rule == "needs SGLang 0.5.23 or newer; 0.5.22 is installed"
    assert "rollout.name=native" in problem.remedy
    with pytest.raises(FileNotFoundError):
        stand_in.processes()


def test_a_killed_worker_leaves_no_server_and_no_files(hollow: Installed, tmp_path: Path) -> None:
    before = folders()
    worker = os.fork()
    if worker == 0:
        try:
            engine = ready(build())
            hollow.goes_wrong(hollow=True, hangs="/generate")
            threading.Thread(target=engine.generate, args=(make_request([3]), GREEDY), daemon=True).start()
            (tmp_path / "samples").touch()
            time.sleep(60)
        finally:
            os._exit(1)
    eventually((tmp_path / "samples").exists, "the worker's server starts", 30)
    started = hollow.processes()
    assert len(started) == 2 and folders() != before
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    eventually(lambda: not any(map(psutil.pid_exists, started)), "the server's end")
    eventually(lambda: folders() == before, "the removal of its folder")


def test_weights_are_in_memory_if_those_of_all_replicas_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(sglang_weights.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    monkeypatch.delenv("TMPDIR", raising=False)
    found = [sglang_weights.private_folder(40, replicas) for replicas in (1, 2, 3)]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    found.append(sglang_weights.private_folder(40, 1))
    for folder in found:
        folder.rmdir()
    assert [folder.parent == tmp_path for folder in found] == [True, True, False, False]
