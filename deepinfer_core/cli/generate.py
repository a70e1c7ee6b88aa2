"""``deepinfer generate``: continue a text, answer a question, or work through a file of prompts."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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

if TYPE_CHECKING:
    from deepinfer_core.cli.session import Session
    from deepinfer_core.engine.token_stream import TokenStream
    from deepinfer_core.requests import RequestOutput

DEFAULTS = {"max_tokens": 256, "temperature": 0.0}
"""What `generate` does where nothing else is said: greedy, so that the answer comes again."""

MAX_COMPLAINTS = 10
"""Bad lines named on stderr; the results name all."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Answer PROMPT as a message instead of continuing it.")
@click.option("--system", metavar="TEXT", help="System message (with --chat).")
@click.option(
    "--input",
    "input_path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Prompts, one JSON value on each line; - is standard input.",
)
@click.option(
    "--output",
    "output_path",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    help="Results of --input; a run that was stopped goes on where it was. Default: stdout.",
)
@click.option("--overwrite", is_flag=True, help="Forget what --output holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--stats", is_flag=True, help="Print times on stderr.")
@sampling_options
@more_sampling_options
@engine_options
def generate(
    *,
    prompt: str | None,
    chat: bool,
    system: str | None,
    input_path: Path | None,
    output_path: Path | None,
    overwrite: bool,
    as_json: bool,
    stats: bool,
    sampling_args: SamplingArgs,
    more_sampling: MoreSampling,
    engine_args: EngineArgs,
) -> int:
    """Continue PROMPT, which is read from standard input if it is missing or "-".

    One newline at the end of standard input is not part of the prompt. With --input every line of
    a file is a prompt, and every result is a line of --output.
    """
    from deepinfer_core.cli.session import open_session

    values = sampling_values(sampling_args, more_sampling, DEFAULTS)
    _check_usage(
        prompt=prompt,
        chat=chat,
        system=system,
        input_path=input_path,
        output_path=output_path,
        overwrite=overwrite,
    )
    _check_params(values)
    if input_path is not None:
        with open_session(engine_args) as session:
            return run_file(
                session,
                values,
                input_path,
                output_path,
                overwrite=overwrite,
                chat=chat,
                system=system,
            )
    text = _read_prompt(prompt)
    with open_session(engine_args) as session:
        return run_one(
            session, values, text, chat=chat, system=system, as_json=as_json, stats=stats
        )


def run_one(
    session: Session,
    values: dict[str, Any],
    prompt: str,
    *,
    chat: bool = False,
    system: str | None = None,
    as_json: bool = False,
    stats: bool = False,
) -> int:
    """Run one prompt and return the exit status."""
    from deepinfer_core.cli.batch import as_messages
    from deepinfer_core.cli.session import error_of, record, show
    from deepinfer_core.requests import SamplingParams

    seed = draw_seed() if values.get("seed") is None else values["seed"]
    params = SamplingParams(**{**values, "seed": seed})
    if chat:
        stream = session.llm.stream_chat(as_messages(prompt, system), params)
    else:
        stream = session.llm.stream(prompt, params)
    with stream:
        result = _finish(stream, visible=not as_json and params.n == 1)
    if as_json:
        shown = record(result, model=session.model, seed=seed)
        click.echo(json.dumps(shown, ensure_ascii=False))
    elif params.n > 1:
        for output in result.outputs:
            show(f"[{output.index + 1}] {output.text}\n")
    if stats:
        click.echo(statistics(result), err=True)
    error = error_of(result)
    if error is not None:
        click.echo(f"error: {error}", err=True)
    return 0 if error is None else 1


def run_file(
    session: Session,
    values: dict[str, Any],
    input_path: Path,
    output_path: Path | None,
    *,
    overwrite: bool = False,
    chat: bool = False,
    system: str | None = None,
) -> int:
    """Run a file of prompts and return the exit status: 1 if any line failed."""
    from deepinfer_core.cli.batch import Batch, Template
    from deepinfer_core.cli.prompt_lines import read_lines
    from deepinfer_core.cli.result_file import ResultFile
    from deepinfer_core.engine.progress import ProgressBar

    template = Template(values=values, chat=chat, system=system, draw_seed=draw_seed)
    target = None if output_path is None or str(output_path) == "-" else output_path
    with (
        click.open_file(str(input_path), "rb") as source,
        ResultFile(target, overwrite=overwrite, model=session.model) as results,
        ProgressBar(_count(input_path), True, len(results.done)) as advance,
    ):
        batch = Batch(
            llm=session.llm,
            model=session.model,
            template=template,
            results=results,
            advance=advance,
            complain=_Complaints(),
        )
        try:
            batch.run(read_lines(source))
        except KeyboardInterrupt:
            click.echo("interrupted; the same command goes on from here", err=True)
            raise
        finally:
            _summarize(batch)
    return 1 if batch.failed else 0


def draw_seed() -> int:
    """Return a seed short enough to be typed again."""
    return secrets.randbits(31)


def statistics(result: RequestOutput) -> str:
    """Return the times of a result in one line."""
    from deepinfer_core.cli.session import decode_speed

    count = sum(len(output.token_ids) for output in result.outputs)
    parts = [f"{len(result.prompt_token_ids)} tokens in", f"{count} out"]
    if result.cached_tokens:
        parts.append(f"{result.cached_tokens} from cache")
    if result.drafted:
        parts.append(f"{result.accepted} of {result.drafted} drafts accepted")
    if result.ttft_s is not None:
        parts.append(f"first after {result.ttft_s:.2f} s")
    speed = decode_speed(result)
    if speed is not None:
        parts.append(f"then {speed:.1f} tokens/s")
    return ", ".join(parts)


class _Complaints:
    """Names the first bad lines on stderr."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, message: str) -> None:
        from tqdm import tqdm

        self._count += 1
        if self._count <= MAX_COMPLAINTS:
            tqdm.write(message, file=sys.stderr)  # above the bar, if there is one
        elif self._count == MAX_COMPLAINTS + 1:
            tqdm.write("more bad lines follow; the results name each", file=sys.stderr)


def _finish(stream: TokenStream, *, visible: bool) -> RequestOutput:
    """Read a stream to its end, showing it if wanted, and return its result."""
    from deepinfer_core.cli.session import show
    from deepinfer_core.errors import EngineError

    last = "\n"
    for delta in stream:
        if visible and delta.text:
            show(delta.text)
            last = delta.text
    if visible and not last.endswith("\n"):
        click.echo()
    if stream.result is None:
        raise EngineError("the engine ended the request without a result")
    return stream.result


def _summarize(batch: Any) -> None:
    parts = [f"{batch.succeeded} done"]
    if batch.skipped:
        parts.append(f"{batch.skipped} done before")
    if batch.failed:
        parts.append(f"{batch.failed} failed")
    click.echo(", ".join(parts), err=True)


def _count(path: Path) -> int | None:
    """Return the number of lines of a regular file, for the progress bar."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def _check_usage(
    *,
    prompt: str | None,
    chat: bool,
    system: str | None,
    input_path: Path | None,
    output_path: Path | None,
    overwrite: bool,
) -> None:
    if prompt is not None and input_path is not None:
        raise click.UsageError("give either PROMPT or --input")
    if input_path is None and (output_path is not None or overwrite):
        raise click.UsageError("--output and --overwrite go with --input")
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    if prompt is None and input_path is None and sys.stdin.isatty():
        raise click.UsageError('there is no prompt; for example: deepinfer generate "Once upon"')
    if input_path is None or str(input_path) == "-":
        return
    if not input_path.exists():
        raise click.UsageError(f"there is no file {input_path}")
    if output_path is not None and not output_path.parent.is_dir():
        raise click.UsageError(f"there is no folder {output_path.parent} for --output")
    if output_path is not None and output_path.is_dir():
        raise click.UsageError(f"--output {output_path} is a folder; name a file in it")
    if output_path is not None and output_path.exists() and output_path.samefile(input_path):
        raise click.UsageError("--input and --output are the same file")


def _check_params(values: dict[str, Any]) -> None:
    """Refuse impossible parameters before the model is read."""
    from deepinfer_core.requests import SamplingParams

    SamplingParams(**values)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error.reason}") from error
    return text.removesuffix("\n").removesuffix("\r")
