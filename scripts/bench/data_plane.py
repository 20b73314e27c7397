"""Times the round trip of rows from the controller to the ranks of a group, and of log-probabilities back.

    python scripts/bench/data_plane.py [--ranks 8] [--rows 8192] [--tokens 1024] [--repeats 7]

The batch has two forms: as a step sends it, with prompts, responses and masks as ragged columns, responses of
up to `--tokens` tokens and half as many on average; and verl's layout of six dense int64 columns. The ranks
are processes on this machine that compute nothing: they return float32 numbers in the shape of
log-probabilities, which the controller reads. Prints one JSON object per form: megabytes sent, milliseconds
of the median and the fastest round trip, those of copying as many bytes once, and the seconds that Ray and
the group take to start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Timeouts
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec, Worker
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto


class Scorer(Worker):
    """Returns without computing anything."""

    @register(Dispatch.DP_COMPUTE_PROTO, read_only=True)
    def log_probs(self, batch: DataProto) -> DataProto:
        """float32, dense (B, R) or ragged, in the shape of the mask."""
        mask = batch.get("response_mask")
        if not ragged.is_ragged(mask):
            return DataProto.from_dict({"log_probs": mask.float()})
        tokens, lengths = ragged.parts(mask)
        return DataProto.from_dict({"log_probs": ragged.from_parts(tokens.float(), lengths)})


def as_sent(rows: int, tokens: int) -> DataProto:
    """A batch as a step sends it, without padding."""
    lengths = torch.randint(1, tokens + 1, (rows,))
    columns = {
        name: ragged.from_parts(torch.ones(int(sizes.sum()), dtype=torch.int64), sizes)
        for name, sizes in (
            ("prompts", torch.full((rows,), tokens)),
            ("responses", lengths),
            ("response_mask", lengths),
        )
    }
    return DataProto.from_dict(columns)


def as_in_verl(rows: int, tokens: int) -> DataProto:
    """verl's dense columns: padded prompts and responses, concatenated and separate."""
    whole = ("input_ids", "attention_mask", "position_ids")
    widths = dict.fromkeys(whole, 2 * tokens) | dict.fromkeys(
        ("prompts", "responses", "response_mask"), tokens
    )
    return DataProto.from_dict(
        {name: torch.ones(rows, width, dtype=torch.int64) for name, width in widths.items()}
    )


def milliseconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call, ascending; a warm-up call is not counted."""
    taken = []
    for _ in range(repeats + 1):
        since = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - since))
    return sorted(taken[1:])


def copies_of(size: int, repeats: int) -> list[float]:
    """Milliseconds of copies of `size` bytes, ascending."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    return milliseconds(lambda: target.copy_(source), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    since = time.perf_counter()
    with Runtime(RayInitConfig(), Timeouts()) as runtime:
        runtime.start([ResourcePool("ranks", [args.ranks])])
        ray_seconds = time.perf_counter() - since
        group = runtime.group("ranks", {"scorer": RoleSpec(Scorer)})
        runtime.await_ready()
        group_seconds = time.perf_counter() - since - ray_seconds
        scorer = group.role("scorer")
        for form, make in (("ragged", as_sent), ("dense", as_in_verl)):
            batch = make(args.rows, args.tokens)

            def round_trip(batch: DataProto = batch) -> None:
                answer = scorer.fetch(scorer.call(Scorer.log_probs, batch), ["log_probs"])
                assert len(answer) == args.rows

            sent = runtime.traffic().sent
            taken = milliseconds(round_trip, args.repeats)
            sent = (runtime.traffic().sent - sent) // (args.repeats + 1)
            copies = copies_of(sent, args.repeats)
            found = {
                "form": form,
                "ranks": args.ranks,
                "rows": args.rows,
                "megabytes": round(sent / 1e6, 1),
                "median_ms": round(statistics.median(taken), 1),
                "fastest_ms": round(taken[0], 1),
                "copy_ms": round(statistics.median(copies), 1),
                "ray_start_s": round(ray_seconds, 2),
                "group_start_s": round(group_seconds, 2),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
