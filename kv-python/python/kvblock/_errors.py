"""Exceptions of the cache, by what a caller does about them."""


class Error(Exception):
    """Any error of the library."""


class SpecError(Error, ValueError):
    """The settings of a cache contradict each other, or are impossible."""


class PlanError(Error, ValueError):
    """The arguments of a call do not fit the cache: an unknown sequence, a wrong shape."""


class CalibrationError(Error, ValueError):
    """The constants of a stored format do not fit the cache."""


class StateError(Error, RuntimeError):
    """The call is not possible now: a step is open, or has ended."""


class Exhausted(Error, MemoryError):
    """Too few free blocks. Nothing was allocated: release a sequence and call again."""

    #: The group of layers with too few blocks.
    group: int
    #: Blocks that the call needs, blocks that it could take, and those among them whose content is
    #: evicted then.
    needed: int
    free: int
    evictable: int


class RequestError(Error, ValueError):
    """A request can never run on this engine, even alone."""

    #: The group of layers with too few blocks, the blocks that the request needs there and those
    #: that the cache has; ``None`` where something else is wrong with the request.
    group: int | None = None
    needed: int | None = None
    available: int | None = None


class DeviceError(Error, RuntimeError):
    """The device failed, or there is none of that name."""

    #: What went wrong, such as ``"OutOfMemory"``.
    kind: str = "Unknown"


class TierError(Error, RuntimeError):
    """Host memory, disk or a store cannot be used below this cache."""


class SessionError(Error, RuntimeError):
    """A session file cannot be written, or is none of this cache."""


class ForkedError(Error, RuntimeError):
    """The cache was made by the parent of this process."""

    #: The parent's process id.
    parent: int
