"""A call that would be wrong, told before it is made."""

from __future__ import annotations

from deepinfer_core.errors import ExecutionError


class CallError(ExecutionError):
    """Arguments that an op of the device does not take.

    torch_npu's own checks miss many of these; on a device they are wrong numbers or a lost device.
    """


def require(condition: bool, op: str, what: str) -> None:
    """Raise unless a precondition holds.

    Raises:
        CallError: it does not; names op and argument.
    """
    if not condition:
        raise CallError(f"{op}: {what}")
