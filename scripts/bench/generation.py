"""Measures tokens per second of the rollout engines, plain vLLM and transformers' `generate`.

    python scripts/bench/generation.py [--engines native,vllm,raw_vllm,transformers] [--models 1M,30M]
                                       [--lengths equal,ragged,mixed] [--sequences 512] [--dtype fp32]

Each case runs in its own process, with one thread, random weights, 8 samples per prompt of 16 tokens,
and a smaller warm-up call. Responses have 64 tokens (equal), or end at random, after 256 tokens at most
(ragged), or have 64 tokens after prompts of 16 to 512 (mixed). native and vllm are the engines of a rollout
process, with log-probabilities and seeds. raw_vllm is `vllm.LLM` with the same arguments and
log-probabilities; transformers returns none. Prints one JSON object per case: tokens, seconds, tokens per
second, and CPU seconds per 1000 tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROMPT_TOKENS, LONGEST_PROMPT, SAMPLES = 16, 512, 8
SIZES: Mapping[str, Mapping[str, int]] = {
    "1M": dict(vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "30M": dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64),
}
LONGEST = {"equal": 64, "ragged": 256, "mixed": 64}
MEAN_LENGTH = 85
"""Mean length of ragged responses, had they no limit."""
REPEAT_SECONDS = 10.0
"""A case is called up to three times, until its calls together took this long; the fastest counts."""
Sample = Callable[[int], int]
"""Samples the given number of sequences; returns the number of tokens."""


@dataclass(frozen=True)
class Case:
    """What an engine samples."""

    model: str
    lengths: str
    sequences: int
    dtype: str

    @property
    def torch_dtype(self) -> Any:
        from hydraflow.device import resolve_dtype

        return resolve_dtype(self.dtype, "cpu")


def config_of(case: Case) -> Any:
    from transformers import AutoConfig

    sizes = SIZES[case.model]
    return AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=True, dtype=case.torch_dtype)


def model_of(case: Case) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(case), dtype=case.torch_dtype).eval()


def prompts_of(case: Case, count: int) -> list[Any]:
    import torch

    draw = torch.Generator().manual_seed(1)
    last = LONGEST_PROMPT if case.lengths == "mixed" else PROMPT_TOKENS
    tokens = torch.linspace(PROMPT_TOKENS, last, count).long().tolist()
    vocabulary = SIZES[case.model]["vocab_size"]
    return [torch.randint(2, vocabulary, (number,), generator=draw) for number in tokens]


def stops_of(case: Case) -> list[int]:
    """Stop tokens of ragged responses: as many as give MEAN_LENGTH, all tokens being about equally
    probable."""
    return list(range(SIZES[case.model]["vocab_size"] // MEAN_LENGTH)) if case.lengths == "ragged" else []


def ours(name: str, case: Case) -> Sample:
    """A rollout engine, built as in a rollout process."""
    import torch

    from hydraflow.generation.base import EngineSpec, GenerationRequest, SamplingParams
    from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig
    from hydraflow.protocol import ragged

    longest = LONGEST_PROMPT + LONGEST[case.lengths]
    rollout = RolloutConfig(name=name, max_num_seqs=case.sequences)
    spec = EngineSpec(rollout, torch.device("cpu"), case.torch_dtype, None, longest_row=longest)
    engine = GENERATION_ENGINES[name].load()(config_of(case), spec)
    engine.update_weights(model_of(case).named_parameters())
    stops = tuple(stops_of(case))
    params = SamplingParams(max_tokens=LONGEST[case.lengths], ignore_eos=True, stop_token_ids=stops)

    def sample(count: int) -> int:
        prompts = prompts_of(case, count // SAMPLES)
        keys = [(0, 0, str(i)) for i in range(len(prompts))]
        output = engine.generate(GenerationRequest(prompts, [SAMPLES] * len(prompts), keys), params)
        return int(ragged.lengths(output.responses).sum())

    return sample


def raw_vllm(case: Case) -> Sample:
    """vLLM's own class, with the arguments that our engine passes."""
    import torch

    from hydraflow.generation.base import EngineSpec
    from hydraflow.generation.config import RolloutConfig
    from hydraflow.generation.vllm import arguments, set_environment

    set_environment(compiles=False)  # as our engine does on a CPU
    from vllm import LLM, SamplingParams

    longest = LONGEST_PROMPT + LONGEST[case.lengths]
    rollout = RolloutConfig(name="vllm", max_num_seqs=case.sequences)
    spec = EngineSpec(rollout, torch.device("cpu"), case.torch_dtype, None, longest_row=longest)
    folder = tempfile.mkdtemp()
    model_of(case).save_pretrained(folder)
    given = arguments(folder, spec) | {"load_format": "auto", "kv_cache_memory_bytes": 2**31}
    llm = LLM(**given)
    params = SamplingParams(
        n=SAMPLES,
        max_tokens=LONGEST[case.lengths],
        ignore_eos=True,
        stop_token_ids=stops_of(case),
        logprobs=0,
        detokenize=False,
    )

    def sample(count: int) -> int:
        rows = prompts_of(case, count // SAMPLES)
        prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
        found = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(one.token_ids) for output in found for one in output.outputs)

    return sample


def transformers(case: Case) -> Sample:
    """`generate` on all sequences at once, with left-padded prompts."""
    import torch

    model, stops = model_of(case), stops_of(case)
    padding = SIZES[case.model]["vocab_size"] - 1
    how: dict[str, Any] = dict(do_sample=True, top_k=0, max_new_tokens=LONGEST[case.lengths])
    how |= dict(pad_token_id=padding, eos_token_id=stops or None)

    @torch.inference_mode()
    def sample(count: int) -> int:
        prompts = prompts_of(case, count // SAMPLES)
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        rows = [torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts]
        mask = (torch.arange(longest) >= pads[:, None]).long().repeat_interleave(SAMPLES, 0)
        ids = torch.stack(rows).repeat_interleave(SAMPLES, 0)
        new = model.generate(ids, attention_mask=mask, **how)[:, longest:]
        ends = torch.isin(new, torch.tensor(stops, dtype=new.dtype))
        return int(torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).sum())

    return sample


def measure(engine: str, case: Case, results: Any) -> None:
    """Measures one case, in this process."""
    import torch

    torch.set_num_threads(1)
    others = {"raw_vllm": raw_vllm, "transformers": transformers}
    start = time.perf_counter()
    sample = others[engine](case) if engine in others else ours(engine, case)
    sample(4 * SAMPLES)
    since = time.perf_counter()
    calls = [timed(sample, case.sequences)]
    while len(calls) < 3 and time.perf_counter() - since < REPEAT_SECONDS:
        calls.append(timed(sample, case.sequences))
    seconds, spent, tokens = min(calls)
    results.put(
        {
            "engine": engine,
            **asdict(case),
            "tokens": tokens,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(tokens / seconds),
            "cpu_seconds_per_1000": round(1000 * spent / tokens, 4),
            "start_seconds": round(since - start, 1),
        }
    )


def timed(sample: Sample, sequences: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds and tokens of one call."""
    since, spent = time.perf_counter(), time.process_time()
    tokens = sample(sequences)
    return time.perf_counter() - since, time.process_time() - spent, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", default="native,vllm,raw_vllm,transformers")
    parser.add_argument("--models", default="1M,30M")
    parser.add_argument("--lengths", default="equal,ragged,mixed")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")  # safe: none of the cases' libraries are imported yet
    results = context.Queue()
    for size in given.models.split(","):
        for lengths in given.lengths.split(","):
            for engine in given.engines.split(","):
                case = Case(size, lengths, given.sequences, given.dtype)
                process = context.Process(target=measure, args=(engine, case, results))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{engine}, {case} failed: see above")
                print(json.dumps(results.get(timeout=60)), flush=True)


if __name__ == "__main__":
    main()
