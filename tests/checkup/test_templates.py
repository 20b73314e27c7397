"""Chat templates and end tokens, with tokenizers that disagree in the usual ways."""

from __future__ import annotations

import json
from pathlib import Path

from checkup.given import configured, findings, parquet, row, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import Finding, State
from hydraflow.checkup.templates import judge_chats, judge_ends, turn_end
from hydraflow.models.tiny import make_tokenizer

USUAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def look(name: str, model: Path, data: Path, **keys: object) -> list[Finding]:
    return findings(CheckContext(configured(model, data, **keys)), name)


def test_three_prompts_are_shown(model: Path, data: Path) -> None:
    rendered, added = look("chat template", model, data)
    assert rendered.state is State.OK and "3 prompts rendered, the first: '0+1='" in rendered.evidence
    assert added.state is State.NOTE and "no generation prompt" in added.evidence


def test_a_missing_template(model: Path, data: Path) -> None:
    (model / "chat_template.jinja").unlink()
    [found] = look("chat template", model, data)
    assert found.state is State.PROBLEM and "has no chat template" in found.evidence


def test_a_doubled_template(model: Path, tmp_path: Path) -> None:
    applied = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    [found] = look(
        "chat template",
        model,
        parquet(tmp_path / "d.parquet", [row(applied)] * 3),
        actor_rollout_ref__model__custom_chat_template=USUAL,
    )
    assert found.state is State.WARNING
    assert "<|im_start|>" in found.evidence and "twice" in found.evidence


def test_the_tokenizer_s_own_markers_count(model: Path, tmp_path: Path) -> None:
    found = look("chat template", model, parquet(tmp_path / "d.parquet", [row("1+1=<|end|>")] * 3))
    assert found[0].state is State.WARNING and "<|end|>" in found[0].evidence


def test_a_template_that_refuses_the_prompts(model: Path, data: Path) -> None:
    refusing = "{{ raise_exception('no system role') }}"
    [found] = look("chat template", model, data, actor_rollout_ref__model__custom_chat_template=refusing)
    assert found.state is State.PROBLEM and "no system role" in found.evidence


def test_what_templates_lose_or_double() -> None:
    tokenizer = make_tokenizer()
    user = [{"role": "user", "content": "1+1="}]

    def said(template: str, chat: list[dict[str, str]]) -> str:
        tokenizer.chat_template = template
        first = next(judge_chats(tokenizer, [chat], options={}))
        assert first.state is State.WARNING, first
        return first.evidence

    assert "drops the content" in said("hello", user)
    assert "ends with an assistant" in said(USUAL, [*user, {"role": "assistant", "content": "002"}])
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    assert "<|begin|> twice" in said("<|begin|><|begin|>" + USUAL, user)


def test_agreement(model: Path, data: Path) -> None:
    [found] = look("end of sequence", model, data)
    assert found.state is State.OK and "1 <|end|>" in found.evidence


def test_generation_that_stops_elsewhere_than_the_template_ends(model: Path, data: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((model / name).read_text())
        settings["eos_token_id"] = 0
        (model / name).write_text(json.dumps(settings))
    [found] = look("end of sequence", model, data)
    assert found.state is State.WARNING
    assert (
        found.evidence
        == "generation stops at 0 <|pad|>, but the chat template's end of an answer and the tokenizer's end"
        " token is 1 <|end|>"
    )
    assert found.remedy.startswith("actor_rollout_ref.rollout.stop_token_ids=[1]")
    [repaired] = look("end of sequence", model, data, actor_rollout_ref__rollout__stop_token_ids=[1])
    assert repaired.state is State.OK


def test_a_base_model_s_end_token_under_a_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = USUAL
    closing = turn_end(tokenizer)
    assert closing == tokenizer.convert_tokens_to_ids("<|im_end|>") == 17
    [found] = judge_ends(tokenizer, [1], vocabulary=18)
    assert (
        found.state is State.WARNING
        and "the chat template's end of an answer is 17 <|im_end|>" in found.evidence
    )
    assert states(list(judge_ends(tokenizer, [1, 17], vocabulary=18))) == [State.OK]


def test_end_tokens_outside_the_vocabulary_and_none_at_all() -> None:
    tokenizer = make_tokenizer()
    assert states(list(judge_ends(tokenizer, [1, 99], vocabulary=17))) == [State.PROBLEM]
    tokenizer.chat_template, tokenizer.eos_token = None, None
    [found] = judge_ends(tokenizer, [], vocabulary=17)
    assert found.state is State.WARNING and "every response runs to" in found.evidence


def test_ignoring_end_tokens_is_said(model: Path, data: Path) -> None:
    [found] = look("end of sequence", model, data, actor_rollout_ref__rollout__ignore_eos=True)
    assert found.state is State.NOTE
