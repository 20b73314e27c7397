"""Groups rows into waves, which run together, up to a maximum number of rows.

In: prompt lengths, samples per prompt, the limit. Out: waves: prompts, each with a padded width, and their
rows. Left out on purpose: refilling a running wave with new prompts. It would make a row's padding, and with
it the last bits of its numbers, depend on its neighbours.

Left padding is a function of a prompt's own length alone, so a row computes the same whatever else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hydraflow.models.decoding_sizes import padded_width


@dataclass
class Wave:
    """Rows that are decoded in lockstep. Q prompts, B rows, sample-minor."""

    prompts: list[int] = field(default_factory=list)
    """Numbers of the request's prompts, (Q,)."""
    widths: list[int] = field(default_factory=list)
    """Tokens of each prompt after left padding, ascending, (Q,)."""
    owner: list[int] = field(default_factory=list)
    """For each row its place in `prompts`, (B,)."""
    samples: list[int] = field(default_factory=list)
    """For each row its sample number, (B,)."""

    def add(self, prompt: int, width: int, samples: range) -> None:
        """Appends rows of one prompt."""
        self.owner += [len(self.prompts)] * len(samples)
        self.samples += samples
        self.prompts.append(prompt)
        self.widths.append(width)


def waves(
    lengths: Sequence[int], samples: Sequence[int], max_rows: int, *, pad: bool, mixed: bool
) -> Iterator[Wave]:
    """Groups all samples of all prompts, shortest prompts first. mixed: prompts of different widths may share
    a wave. Without `pad` prompts keep their lengths."""
    width = [padded_width(n) if pad else n for n in lengths]
    wave = Wave()
    for i in sorted(range(len(lengths)), key=width.__getitem__):
        start = 0
        while start < samples[i]:
            alone = not mixed and wave.widths[-1:] != [width[i]]
            room, whole = max_rows - len(wave.owner), samples[i] - start
            # a prompt split over two waves would be prefilled twice, so it moves to the next if it fits there
            if alone or not room or room < whole <= max_rows:
                if wave.owner:
                    yield wave
                wave, room = Wave(), max_rows
            stop = start + min(room, whole)
            wave.add(i, width[i], range(start, stop))
            start = stop
    if wave.owner:
        yield wave


def request_order(all_waves: Sequence[Wave], samples: Sequence[int]) -> np.ndarray:
    """For each row of the request, prompt-major, its position in the concatenated rows of all waves, (B,)."""
    first = np.concatenate([[0], np.cumsum(samples)[:-1]]).astype(np.int64)
    rows = [first[np.array(w.prompts)[w.owner]] + np.array(w.samples) for w in all_waves]
    return np.argsort(np.concatenate(rows))
