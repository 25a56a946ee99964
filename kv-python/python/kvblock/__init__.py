"""A paged KV cache for transformers: prefix reuse, forks, few bits, on the CPU and on CUDA.

    cache = kvblock.Cache(layers=1, kv_heads=1, head_dim=4, num_blocks=64)
    reused = cache.start(0, prompt)
    with cache.step([(0, prompt[reused:])]) as step:
        out = step.attend(0, q, k, v)

Tensors are those of torch, numpy, jax, and of everything that has ``__dlpack__``. They are used in
place where the values of all heads of a token lie together.
"""

from kvblock._errors import (
    CalibrationError,
    DeviceError,
    Error,
    Exhausted,
    ForkedError,
    PlanError,
    RequestError,
    SessionError,
    SpecError,
    StateError,
    TierError,
)
from kvblock._kvblock import VERSION as __version__
from kvblock._kvblock import Batch, Cache, Calibrator, Engine, States, Step
from kvblock._kvblock import device_names as devices
from kvblock._kvblock import feature_names as features

__all__ = [
    "Batch",
    "Cache",
    "CalibrationError",
    "Calibrator",
    "DeviceError",
    "Engine",
    "Error",
    "Exhausted",
    "ForkedError",
    "PlanError",
    "RequestError",
    "SessionError",
    "SpecError",
    "StateError",
    "States",
    "Step",
    "TierError",
    "__version__",
    "devices",
    "features",
]
