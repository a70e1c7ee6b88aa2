"""Every error that this package raises on purpose.

* DeepInferError
  x ConfigError             a configuration that cannot be read (one line per problem)
  x PluginError
    + PluginLoadError       an installed plugin that cannot be imported or registered
    + PluginApiError        a plugin made for another version of the hooks
    + ComponentConflict     two plugins that claim the same component
  x CompositionError        no component fits a slot (one line per candidate)
    + LockMismatch          two processes composed different engines
  x CheckpointError         weights, config or tokenizer files that cannot be used
    + TokenizerError        a tokenizer that cannot be read
  x PullError               a model that cannot be found or fetched
    + UnknownModelError     there is no model of this name or path
  x RequestError            a request that is refused; nobody else's is affected
    + AdmissionError        a request that can never fit, or a full queue
    + ProtocolError         a body that a wire format refuses, with the status to answer
  x ExecutionError          a step that failed for one request
  x EngineError             the engine as a whole
    + DeviceLostError       the device is gone: the engine has failed, every stream ends
    + EngineClosedError     used after close
  x ConformanceError        a component that breaks its contract
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 25
"""Problems of one error that its message lists; ``problems`` has them all."""


def reason(error: BaseException) -> str:
    """Return what an error says, without the number and the path of an ``OSError``."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class DeepInferError(Exception):
    """Base of every error raised on purpose."""


class ListedError(DeepInferError):
    """An error that carries one line per problem.

    Args:
        summary: what was attempted.
        problems: one line each; kept as ``.problems``.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        shown = [f"  - {problem}" for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            shown.append(f"  ... and {len(problems) - MAX_SHOWN} more")
        super().__init__("\n".join([summary, *shown]))
        self.summary = summary
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[ListedError], tuple[str, tuple[str, ...]]]:
        """Pickle by summary and problems, so that worker processes can pass the error on."""
        return type(self), (self.summary, self.problems)


class ConfigError(ListedError):
    """A configuration that cannot be read."""


class PluginError(DeepInferError):
    """Something is wrong with a plugin."""


class PluginLoadError(PluginError):
    """An installed plugin cannot be imported or registered."""


class PluginApiError(PluginError):
    """A plugin is made for another version of the hooks."""


class ComponentConflict(PluginError):
    """Two plugins claim the same component name in one slot."""


class CompositionError(ListedError):
    """No component fits a slot."""


class LockMismatch(CompositionError):
    """Two processes composed different engines."""


class CheckpointError(ListedError):
    """Weights, configuration or tokenizer files that cannot be used."""


class TokenizerError(CheckpointError):
    """A tokenizer that cannot be read."""


class PullError(DeepInferError):
    """A model that cannot be found or fetched."""


class UnknownModelError(PullError):
    """There is no model of this name or path."""


class RequestError(DeepInferError):
    """A request is refused; no other request is affected."""


class AdmissionError(RequestError):
    """A request can never fit into this engine, or its queue is full.

    Args:
        message: what and what to do.
        busy: whether it may fit later; kept as ``.busy``.
    """

    def __init__(self, message: str = "", *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class ProtocolError(RequestError):
    """A wire format refuses a body.

    Args:
        message: what, where and what to do.
        param: the field that is to blame, such as ``messages[2].role``; kept as ``.param``.
        status: HTTP status to answer; kept as ``.status``.
        code: a word for programs, such as ``previous_response_not_found``; kept as ``.code``.
    """

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class ExecutionError(DeepInferError):
    """A step failed for one request."""


class EngineError(DeepInferError):
    """The engine as a whole cannot go on."""


class DeviceLostError(EngineError):
    """The device is gone; the engine has failed and every stream ends."""


class EngineClosedError(EngineError):
    """The engine was used after it was closed."""


class ConformanceError(ListedError):
    """A component breaks its contract."""
