"""``deepinfer chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from attrs import define, field

from deepinfer_core.cli.generate import draw_seed
from deepinfer_core.cli.options import (
    EngineArgs,
    SamplingArgs,
    engine_options,
    sampling_options,
)
from deepinfer_core.cli.sampling_flags import (
    MoreSampling,
    more_sampling_options,
    sampling_values,
)
from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_core.engine.llm import LLM

DEFAULTS = {"max_tokens": 1024, "temperature": 0.2, "top_p": 0.9}
"""What `chat` does where nothing else is said: a little variety, few surprises."""

HELP = """\
/reset          forget the conversation
/system TEXT    begin again with this system message
/help           show this
/exit           leave; so does Ctrl-D
Ctrl-C          stop the answer; at the prompt: forget the line"""


@click.command()
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
@more_sampling_options
@engine_options
def chat(
    *,
    system: str | None,
    sampling_args: SamplingArgs,
    more_sampling: MoreSampling,
    engine_args: EngineArgs,
) -> None:
    """Talk with a model. With piped input every line is a message."""
    from deepinfer_core.cli.session import open_session
    from deepinfer_core.requests import SamplingParams

    values = sampling_values(sampling_args, more_sampling, DEFAULTS)
    if SamplingParams(**values).n > 1:
        raise click.UsageError("a conversation has one answer at a time; leave --n out")
    interactive = sys.stdin.isatty()
    with open_session(engine_args) as session:
        if interactive:
            click.echo(f"{session.model}; /help for help, Ctrl-D leaves.", err=True)
        talk = Conversation(llm=session.llm, values=values, system=system)
        talk.run(Keyboard() if interactive else sys.stdin, interactive=interactive)


class Keyboard:
    """Lines typed at a terminal, with history where the platform has it."""

    def __init__(self) -> None:
        try:
            import readline  # noqa: F401 -- importing it is what gives `input` its history
        except ImportError:
            pass

    def __iter__(self) -> Iterator[str]:
        """Return itself."""
        return self

    def __next__(self) -> str:
        """Return the next line; a line that was interrupted is forgotten."""
        while True:
            try:
                return input("> ")
            except EOFError:
                click.echo()
                raise StopIteration from None
            except KeyboardInterrupt:
                click.echo("  (Ctrl-D leaves)")


@define
class Conversation:
    """A conversation and the commands that steer it.

    Attributes:
        llm: the model.
        values: arguments of `SamplingParams`; without a seed each answer draws its own.
        system: system message, or None.
        messages: what was said, without the system message.
    """

    llm: LLM
    values: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(factory=list)

    def run(self, lines: Iterator[str] | Any, *, interactive: bool) -> None:
        """Answer lines until they end.

        Args:
            lines: what the person says.
            interactive: an interrupted answer does not end the conversation.
        """
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                try:
                    self.answer(text)
                except RequestError as error:
                    click.echo(f"error: {error}; /reset begins again", err=True)
                except KeyboardInterrupt:
                    click.echo("  (stopped)" if interactive else "")
                    if not interactive:
                        raise

    def answer(self, text: str) -> None:
        """Show the answer to a message; both become part of the conversation.

        Of an answer that is interrupted the part that was shown stays. A message that is refused is
        forgotten.

        Raises:
            RequestError: the conversation is refused, usually since it has become too long.
        """
        from deepinfer_core.cli.session import show
        from deepinfer_core.requests import SamplingParams

        seed = self.values.get("seed")
        params = SamplingParams(**{**self.values, "seed": draw_seed() if seed is None else seed})
        begin = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = {"role": "user", "content": text}
        stream = self.llm.stream_chat([*begin, *self.messages, said], params)
        parts: list[str] = []
        try:
            with stream:
                for delta in stream:
                    parts.append(delta.text)
                    show(delta.text)
                    if delta.error is not None:
                        click.echo(f"\nerror: {delta.error}", err=True)
        finally:
            self.messages += [said, {"role": "assistant", "content": "".join(parts)}]
        click.echo()

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self.messages.clear()
            click.echo("(a new conversation)", err=True)
        elif name == "/system":
            self.system = rest.strip() or None
            self.messages.clear()
            click.echo("(a new conversation)", err=True)
        elif name == "/help":
            click.echo(HELP, err=True)
        else:
            click.echo(f"there is no command {name}\n{HELP}", err=True)
