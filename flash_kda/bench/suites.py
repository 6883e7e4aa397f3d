"""The cases of every named suite. What they are for and where their numbers go: benchmarks/README.md. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from . import rows
from .rows import Row

FWD = "flash_kda.fwd"
FWD_CP = "flash_kda.fwd_cp"
STATE_ONLY = "flash_kda.state_only"
WARMUP_CHUNKS = "flash_kda.get_warmup_chunks"

DENSE = "dense"
PACKED = "packed"
KNOWN = "packed, lengths on the host"
"""``[B, T, ...]`` without offsets; offsets on the device; offsets on the device and ``cu_seqlens_cpu``."""

ALLOWED_SHARE = 0.03
ALLOWED_MS = {PACKED: 8e-3, KNOWN: 1e-3}
"""``fwd_cp`` may take longer than ``fwd`` by the larger of this share and time, which depends on who knows the lengths."""

K = 1024


@dataclass(frozen=True)
class Case:
    """One input and who runs on it.

    Attributes:
        suite: the suite's name, and thereby what is measured.
        heads: H.
        lengths: of the sequences; of one length if ``layouts`` is dense.
        gates, lower_bound: of ``flash_kda.samples``.
        layouts: how the sequences are handed over; ``fwd`` and peers run on the first only.
        impls: of this package.
        peers: whether other packages run too.
        segments: into how many pieces the one sequence is cut beforehand (suite ``warmup``).
        checked: tokens that are compared with fp64.
    """

    suite: str
    heads: int
    lengths: tuple[int, ...]
    gates: str = "random"
    lower_bound: float = -5.0
    layouts: tuple[str, ...] = (DENSE,)
    impls: tuple[str, ...] = (FWD, FWD_CP)
    peers: bool = False
    segments: int = 1
    checked: int = 2048

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def name(self) -> str:
        """``cp/random-0.5/h16/65536``: what ``--only`` matches."""
        lengths = rows.seq_lens({"seq_lens": rows.written(self.lengths)}).replace(",", "").replace(" ", "")
        return f"{self.suite}/{self.gates}{self.lower_bound:g}/h{self.heads}/{lengths}"


def forward(smoke: bool) -> list[Case]:
    """The kernel behind ``fwd``, case by case."""
    cases = [
        (16, [8192] * 8),
        (96, [8192]),
        (96, [1024] * 8),
        (96, [1300, 547, 2048, 963, 271, 3063]),
        (32, [1024] * 8),
        (16, [65536]),
        (12, [33] * 4096),
    ]
    if smoke:
        cases = [(2, [64] * 3), (1, [100, 7]), (2, [17] * 20)]
    return [Case("forward", heads, tuple(lengths), layouts=(PACKED,), impls=(FWD,), peers=True) for heads, lengths in cases]


def cp(smoke: bool) -> list[Case]:
    """One sequence, cut or not, by gates and length; few heads at the longest.

    The longest first: a package that tunes itself at its first call with a number of heads does so there.
    """
    gates = [("random", -5.0), ("random", -0.5), ("real", -5.0), ("none", -5.0)]
    tokens, heads, fewer = ((320, 64), 2, (1,)) if smoke else ((64 * K, 16 * K, 4 * K), 16, (4, 8))
    cases = [Case("cp", heads, (t,), name, bound, peers=True) for name, bound in gates for t in tokens]
    return cases + [Case("cp", h, tokens[:1], "real", peers=True) for h in fewer]


def recipe(smoke: bool) -> list[Case]:
    """The published tables: by lower_bound and length, by batch, and the scan of the gates."""
    lengths, heads = ((64, 320), 2) if smoke else ((4 * K, 8 * K, 16 * K, 32 * K, 64 * K), 16)
    batches = (1, 3) if smoke else (1, 8, 16, 32)
    longer = () if smoke else (256 * K, 512 * K)
    bounds = (-5.0, -0.5) if smoke else (-5.0, -1.0, -0.5)
    one = (FWD, FWD_CP, STATE_ONLY)
    cases = [Case("recipe", heads, (t,), lower_bound=bound, impls=one) for bound in bounds for t in lengths]
    cases += [Case("recipe", heads, (t,), impls=one) for t in longer]
    by_batch = [t for t in lengths if t not in (4 * K, 32 * K)]
    cases += [Case("recipe", heads, (t,) * batch) for t in by_batch for batch in batches if batch > 1]
    return cases + warmup(smoke)


def warmup(smoke: bool) -> list[Case]:
    """``get_warmup_chunks``: the published scan's cases."""
    cases = [(2, 320, 4, -0.5)] if smoke else [(16, 8 * K, 16, -1.0), (16, 64 * K, 64, -0.5), (32, 64 * K, 64, -0.5)]
    return [
        Case("warmup", heads, (tokens,), lower_bound=bound, layouts=(PACKED,), impls=(WARMUP_CHUNKS,), segments=n)
        for heads, tokens, n, bound in cases
    ]


def sweep(smoke: bool) -> list[Case]:
    """Every shape on which ``fwd_cp`` must not be slower than ``fwd``: gates that forget at once, and gates that never do."""
    heads = (2,) if smoke else (1, 4, 8, 12, 16, 32, 64, 96)
    tokens = [64, 320] if smoke else [2**n for n in range(9, 21)]
    pair, long, short = ((63, 65), 256, 16) if smoke else ((1023, 1025), 64 * K, 1 * K)
    shapes: list[tuple[int, ...]] = [(t,) for t in tokens]
    shapes += [(long, *[short] * 5), (long + 1,)]
    shapes += [pair * (t // sum(pair)) for t in tokens if t >= sum(pair)]
    return [
        Case("sweep", h, lengths, gates, layouts=(PACKED, KNOWN), checked=512)
        for gates in ("random", "none")
        for h in heads
        for lengths in shapes
        if sum(lengths) * h <= 2**25
    ]


def scaling(smoke: bool) -> list[Case]:
    """One sequence, longer and longer."""
    tokens, heads = ((256, 512), 2) if smoke else ([2**n for n in range(16, 21)], 16)
    return [Case("scaling", heads, (t,), gates, impls=(FWD_CP,)) for gates in ("random", "real") for t in tokens]


def host(smoke: bool) -> list[Case]:
    """Host time of one ordinary call."""
    return [Case("host", 2, (64,))] if smoke else [Case("host", 12, (2048,))]


def accuracy(smoke: bool) -> list[Case]:
    """Errors head by head against the token recurrence in fp64, on every named input. Nothing is timed."""
    bounds = [("random", bound) for bound in (-5.0, -1.0, -0.5, -0.01, -1e-6)]
    named = ("slow_eighth", "log_uniform", "none", "real", "full", "collinear", "rotating", "saturated")
    cases = [*bounds, *((name, -5.0) for name in named)]
    tokens, heads, lengths = (320, 2, (320,)) if smoke else (K, 4, (1 * K, 4 * K, 16 * K, 64 * K))
    made = [Case("accuracy", heads, (tokens,), name, bound, peers=True) for name, bound in cases]
    return made + [Case("accuracy", heads, (t,), "slow_9999", peers=True) for t in lengths]


SUITES: dict[str, Callable[[bool], list[Case]]] = {
    "forward": forward,
    "cp": cp,
    "recipe": recipe,
    "warmup": warmup,
    "sweep": sweep,
    "scaling": scaling,
    "host": host,
    "accuracy": accuracy,
}


def cases(names: Iterable[str], *, smoke: bool = False) -> list[Case]:
    """The cases of these suites in order, each once.

    Args:
        names: of :data:`SUITES`.
        smoke: tiny shapes that a CPU gets through in seconds; nothing can be concluded from their times.
    """
    found = [case for name in names for case in SUITES[name](smoke)]
    return list(dict.fromkeys(replace(case, checked=min(case.checked, case.tokens)) for case in found))


def allowed_ms(serial_ms: float, layout: str) -> float:
    """What ``fwd_cp`` may take where ``fwd`` takes ``serial_ms``."""
    return serial_ms + max(ALLOWED_SHARE * serial_ms, ALLOWED_MS[layout])


def slower(row: Row, serial: Row) -> bool:
    """Whether a row of ``fwd_cp`` exceeds what is allowed beside that of ``fwd``."""
    return rows.milliseconds(row) > allowed_ms(rows.milliseconds(serial), row["layout"])
