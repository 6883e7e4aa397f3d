"""Commands and options. What they do is in the modules of the same names, imported when a command starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .._version import __version__
from .console import UserError
from .streams import complain, silence_stdout

app = typer.Typer(
    name="flash-kda",
    help="Exact context-parallel Kimi Delta Attention prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Impl(str, Enum):
    auto = "auto"
    reference = "reference"
    sm90 = "sm90"


class Gates(str, Enum):
    random = "random"
    slow_eighth = "slow_eighth"
    log_uniform = "log_uniform"
    none = "none"
    real = "real"


class Peers(str, Enum):
    none = "none"
    installed = "installed"


File = Annotated[
    Path | None,
    typer.Argument(
        help="safetensors file with q, k, v, g [B,T,H,128] and beta [B,T,H] (bf16; g and beta also fp32), A_log [H] and "
        "dt_bias [H,128] (fp32); optional: initial_state [N,H,V,K] and cu_seqlens [N+1]. The packaged activations if absent.",
        show_default=False,
    ),
]
LOWER_BOUND = "Log decay of one token is in [lower_bound, 0]; lower_bound itself in [-5, 0]."
Offsets = Annotated[
    str | None,
    typer.Option("--cu-seqlens", help='Offsets of packed sequences, e.g. "0,100,300"; instead of a tensor of the file.'),
]


@app.callback(invoke_without_command=True)
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def doctor() -> None:
    """What is installed and what will run here, and why. Always exits with 0."""
    from . import doctor as command

    raise typer.Exit(command.main([]))


@app.command()
def run(
    file: File = None,
    lower_bound: Annotated[float, typer.Option(help=LOWER_BOUND)] = -5.0,
    scale: Annotated[float | None, typer.Option(help="Factor of the outputs.", show_default="K^-0.5")] = None,
    cu_seqlens: Offsets = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Repeat the activations in time to this many tokens.",
            show_default="16384 for the packaged activations, else as many as the file has",
        ),
    ] = None,
    segment_len: Annotated[
        int | None, typer.Option(help="Tokens per segment, a multiple of 16.", show_default="chosen by the planner")
    ] = None,
    eps: Annotated[
        float | None, typer.Option(help="The scan of a segment stops once ||M||_F <= eps.", show_default="2^-20")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    impl: Annotated[Impl | None, typer.Option(help="Who computes.", show_default="FLASH_KDA_IMPL, else auto")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Time each of the two this many times; the median is printed.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(help="Write out and final_state to this safetensors file if the check passes.", show_default=False),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Spread the tokens over the processes of torchrun, or over --ranks of its own."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes to start with --distributed.", show_default="2, or one for each GPU with --device cuda"
        ),
    ] = None,
) -> None:
    """Prefill serially and in parallel segments, compare times, and check both against the fp64 recurrence.

    With --distributed the segments are on several processes: torchrun --nproc-per-node 2 -m flash_kda run --distributed, or
    without torchrun, which is then called. Exits with 0 if the check passes, 1 if it fails, 2 if the input is bad.
    """
    with _loading("run"):
        from . import ranks as over_ranks
        from . import run as command

    options = command.Options(
        file=file,
        lower_bound=lower_bound,
        scale=scale,
        cu_seqlens=cu_seqlens,
        tokens=tokens,
        segment_len=segment_len,
        eps=eps,
        device=device.value,
        impl=None if impl is None else impl.value,
        repeat=repeat,
        output=output,
        ranks=ranks,
    )
    if ranks is not None and not distributed:
        raise UserError(f"ranks must be given with --distributed only, got {ranks} without it")
    raise typer.Exit(over_ranks.main(options) if distributed else command.main(options))


@app.command()
def inspect(
    file: File = None,
    gates: Annotated[
        Gates | None,
        typer.Option(help="Synthetic gates instead of a file; 'real' is the packaged activations.", show_default=False),
    ] = None,
    lower_bound: Annotated[float | None, typer.Option(help=LOWER_BOUND, show_default="-5.0")] = None,
    cu_seqlens: Offsets = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the synthetic input.", show_default="4")] = None,
    chunks: Annotated[
        int, typer.Option(min=1, help="Walk back at most this many chunks of 16 tokens from the end of the longest sequence.")
    ] = 256,
    table: Annotated[bool, typer.Option("--table", help="Compare six kinds of gates at eps 2^-16 instead.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw ||M||_F of every head against tokens walked back (PNG).", show_default=False)
    ] = None,
) -> None:
    """How long each head remembers: time constants, decay of the transition matrix, chunks that a segment must replay."""
    with _loading("inspect"):
        from . import inspect as command

    options = command.Options(
        file=file,
        gates=None if gates is None else gates.value,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        heads=heads,
        chunks=chunks,
        plot=plot,
    )
    raise typer.Exit(command.compare(options) if table else command.main(options))


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]...",
            help="forward, cp, recipe, warmup, sweep, scaling, host, accuracy.",
            show_default="all of them",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only cases whose name holds this, e.g. 'cp/real*/h16'; may be given more than once.", show_default=False
        ),
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one")] = None,
    impl: Annotated[
        Impl | None, typer.Option(help="Who computes fwd and fwd_cp.", show_default="sm90 on a GPU, or nothing runs")
    ] = None,
    peers: Annotated[Peers, typer.Option(help="Other packages to run where a suite compares.")] = Peers.installed,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time to spend on one measurement, about.")] = 0.4,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes: does it run, also without a GPU?")] = False,
    commit: Annotated[str | None, typer.Option(help="Of the code that runs.", show_default="asked of git")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Append a JSON object a line to this file as each case is done.", show_default=False)
    ] = None,
) -> None:
    """Measure: results are checked, then timed beside other packages, and written as rows.

    Exits with 0, 1 if a result of this package was wrong or missing, 2 if the input is bad.
    """
    with _loading("bench"):
        from . import bench as command

    options = command.Options(
        suites=suites or (),
        only=only or (),
        device=None if device is None else device.value,
        impl=None if impl is None else impl.value,
        peers=peers is Peers.installed,
        seconds=seconds,
        smoke=smoke,
        commit=commit,
        output=output,
    )
    raise typer.Exit(command.main(options))


@app.command()
def plot(
    rows: Annotated[list[Path], typer.Argument(help="JSON lines that bench wrote.")],
    output: Annotated[Path, typer.Option(help="SVG or PNG to write.")],
    heads: Annotated[int | None, typer.Option(min=1, help="Rows of so many heads.", show_default="what most rows have")] = None,
    gpu: Annotated[str | None, typer.Option(help="Rows of this machine.", show_default="the only one there is")] = None,
) -> None:
    """Draw times against length, their ratio to the memory floor, and speed-ups, by gates, from rows of bench."""
    with _loading("plot"):
        from . import plot as command

    raise typer.Exit(command.main(command.Options(rows=rows, output=output, heads=heads, gpu=gpu)))


def run_app() -> int:
    """The exit status of the command of ``sys.argv``; errors of the user in one line on stderr."""
    if sys.stdout is None:
        # Before the work, and before a file that is opened gets the descriptor that libraries print to.
        complain("error: standard output must be open, got none; send it to a file, or to the null device if nobody reads it")
        return 2
    try:
        try:
            app(prog_name="flash-kda")
        finally:
            sys.stdout.flush()
    except UserError as error:
        complain(f"error: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        complain(f"error: the work must fit into memory, got: {(str(error).splitlines() or [''])[0]}; ask for fewer tokens")
        return 2
    except BrokenPipeError:
        silence_stdout()
        return 1
    except OSError as error:
        # Help and version texts are not written by console.py. Errors about named files are handled where they arise.
        if error.filename is not None:
            raise
        silence_stdout()
        complain(f"error: standard output must be writable, got: {error.strerror or error}")
        return 2
    return 0


@contextmanager
def _loading(command: str) -> Iterator[None]:
    """A bad installation of PyTorch can raise anything on import; what is wrong with it is for doctor to say."""
    try:
        yield
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{command} must be able to import PyTorch, numpy and safetensors, got {type(error).__name__}: {said}; "
            "'flash-kda doctor' says what is wrong"
        ) from None


def _out_of_memory(error: Exception) -> bool:
    """PyTorch has a class for it on GPUs and only a message on CPUs."""
    return isinstance(error, MemoryError) or any(x in str(error) for x in ("out of memory", "can't allocate memory"))
