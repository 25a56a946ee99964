"""What is computed, and what computes it: the part that every peer knows."""
import os
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Protocol

import numpy

# A contender whose table of scores would take more is not run.
SCORES_MAX = 1 << 30


@dataclass(frozen=True)
class Case:
    """One layer: `q` is [batch, q_heads, q_len, head_dim], `k` and `v` are [batch, kv_heads,
    context, head_dim]. Query i sees the keys up to context - q_len + i."""

    dir: str
    batch: int
    context: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    format: str

    def dims(self, name: str) -> tuple[int, int, int, int]:
        heads, tokens = (
            (self.q_heads, self.q_len) if name == "q" else (self.kv_heads, self.context)
        )
        return self.batch, heads, tokens, self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def is_causal(self) -> bool:
        return self.q_len > 1

    def scores_fit(self, value_bytes: int) -> bool:
        scores = self.batch * self.q_heads * self.q_len * self.context
        return scores * value_bytes <= SCORES_MAX


class Contender(Protocol):
    """One way to compute a case."""

    def run(self) -> None: ...

    def output(self) -> Any:
        """What the last run gave: f32, [tokens, q_heads, head_dim]."""


Prepared = Iterator[tuple[str, Callable[[], Contender]]]


def aligned(size: int) -> Any:
    """So many bytes, at an address that no load of a vector register has to split."""
    room = numpy.empty(size + 64, dtype=numpy.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def read(case: Case, name: str) -> Any:
    """The bytes of a file."""
    path = os.path.join(case.dir, name)
    data = aligned(os.path.getsize(path))
    with open(path, "rb") as file:
        if file.readinto(data) != data.size:
            raise OSError(f"{path} is cut short")
    return data
