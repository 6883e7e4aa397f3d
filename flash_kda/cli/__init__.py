"""The command ``flash-kda``.

doctor   what is installed and what will run here; needs the standard library only
run      prefill a file of activations, or the packaged ones, serially and in segments, and check both
inspect  how long each head remembers
bench    times and errors of named suites, as rows
plot     a picture of such rows

``main`` is the entry point. It sends ``doctor`` on its way before anything else is imported, because doctor is for the
machine on which the imports fail. Each command imports PyTorch when it starts, so that ``--help`` does not wait for it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command of ``sys.argv``; always leaves by SystemExit: 0 done, 1 a check failed, 2 bad input."""
    if sys.argv[1:2] == ["doctor"]:
        from . import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    try:
        from .app import run_app
    except ImportError as error:
        from .streams import complain

        complain(
            f"error: flash-kda needs typer and rich, got {type(error).__name__}: {error}; pip install typer rich "
            "('flash-kda doctor' works without them and says what else is missing)"
        )
        sys.exit(2)
    sys.exit(run_app())
