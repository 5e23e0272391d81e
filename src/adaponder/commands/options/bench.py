"""Options of the commands that measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import Device, Json, OpenedModel
from adaponder.errors import InputError

if TYPE_CHECKING:
    from adaponder.bench.ops import Size

DECODE_SHAPES = ("70m", "410m", "ouro-1.4b", "tiny")
SHARES = "Share of tokens read at each iteration; random tokens halt."


def read_size(flag: str, text: str) -> "Size":
    """``65536,512,50304`` as tokens, d and vocabulary."""
    from adaponder.bench.ops import Size

    parts = values.numbers()(flag, text)
    if len(parts) != 3:
        raise InputError(f"{flag} {text}: tokens, d and vocabulary are needed, as in 65536,512,50304")
    return Size(*parts)


def read_shape(flag: str, text: str) -> str:
    """The name of a shape that decoding is measured with."""
    if text not in DECODE_SHAPES:
        raise InputError(f"{flag} {text}: one of {', '.join(DECODE_SHAPES)} is needed")
    return text


def read_stand_in(flag: str, text: str) -> tuple[int, float]:
    """``64,8`` as lanes and milliseconds of a tick."""
    lanes, _, tick = text.partition(",")
    try:
        found = int(lanes), float(tick)
    except ValueError:
        raise InputError(f"{flag} {text}: lanes and milliseconds of a tick are needed, as in 64,8") from None
    if not (1 <= found[0] <= 4096 and 0.05 <= found[1] <= 10_000):
        raise InputError(f"{flag} {text}: 1 to 4096 lanes and 0.05 to 10000 milliseconds are needed")
    return found


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Device, Json):
    """What every measurement can be told; ``json`` is written whenever a figure comes, so that none is lost."""

    repeats: Annotated[int, Option(metavar="N", min=1, max=100_000, help="Timed repetitions; their median counts.")] = (
        10
    )
    warmup: Annotated[
        int,
        Option(metavar="N", min=0, max=100_000, help="Repetitions before, not timed: compilation and caches."),
    ] = 3
    only: Annotated[
        Sequence[str],
        Option(
            several=True,
            metavar="WORD",
            help="Measure only plain and variants whose name contains WORD (for example: compiled; ops: ours); may be "
            "repeated. Keeps no record.",
        ),
    ] = ()
    trust: Annotated[
        bool, Option(flags=("--trust",), help="Do not run the operations' tests first; the record says so.")
    ] = False
    commit: Annotated[
        str | None,
        Option(metavar="NAME", help="Which commit is measured; default: what git says. Needed where there is no git."),
    ] = None
    record: Annotated[
        bool, Option(flags=("--record/--no-record",), help="Keep a record under benchmarks/records/.")
    ] = True
    seed: Annotated[
        int | None, Option(metavar="N", min=0, help="Of weights and tokens; default: the recipe's; 0 for ops.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class _Compiles:
    compiles: Annotated[
        bool,
        Option(
            flags=("--compile/--no-compile",), help="Measure compiled variants too (needs a C++ compiler on a CPU)."
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class _Largest:
    largest: Annotated[
        bool,
        Option(flags=("--largest",), help="Search the largest batch too, in multiples of --batch (GPU only)."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class _Model:
    """Which model is measured, and on how much at once."""

    recipe: Annotated[
        str | None,
        Option(metavar="RECIPE", help="Whose model; default paper/adaponder-70m on a GPU, cpu/demo on a CPU."),
    ] = None
    overrides: Annotated[
        Sequence[str],
        Option(
            flags=("--set",), several=True, metavar="a.b=c", help="Change one field of the recipe; may be repeated."
        ),
    ] = ()
    batch: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Sequences at once; default: the recipe's micro_batch, else its global_batch."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _TrainKeep:
    keep: Annotated[
        Sequence[float],
        Option(
            metavar="1,.5,…",
            help=f"{SHARES} Compares training that skips halted tokens with dense training.",
            read=values.decimals(most=1),
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class _PrefillKeep:
    keep: Annotated[
        Sequence[float],
        Option(
            metavar="1,.5,…",
            help=f"{SHARES} Default: all once, half of them to the end.",
            read=values.decimals(most=1),
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class TrainBenchOptions(_Model, _TrainKeep, _Compiles, _Largest, BenchOptions):
    """``adaponder bench train``."""


@dataclass(frozen=True, kw_only=True)
class PrefillBenchOptions(_Model, _PrefillKeep, _Compiles, BenchOptions):
    """``adaponder bench prefill``."""


@dataclass(frozen=True, kw_only=True)
class OpsBenchOptions(BenchOptions):
    """``adaponder bench ops``."""

    size: Annotated[
        Sequence["Size"],
        Option(
            several=True,
            metavar="TOKENS,D,VOCABULARY",
            help="May be repeated; default 65536,512,50304 and 16384,1024,50304 on a GPU, 1024,128,4096 on a CPU.",
            read=read_size,
        ),
    ] = ()
    dtype: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="bfloat16 (autocast) or float32; default: the first on a GPU, else the second.",
            check=values.one_of("bfloat16", "float32"),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions(BenchOptions):
    """``adaponder bench decode``."""

    shape: Annotated[
        Sequence[str],
        Option(
            several=True,
            metavar="NAME",
            help="70m, 410m, ouro-1.4b or tiny, with random weights; may be repeated. Default: 70m and 410m on a GPU, "
            "tiny on a CPU.",
            read=read_shape,
        ),
    ] = ()
    checkpoint: Annotated[
        str | None, Option(metavar="CKPT", help="A checkpoint, whose gates decide depth; needs --data.")
    ] = None
    data: Annotated[
        str | None, Option(metavar="SRC", help="With --checkpoint: the text that prompts are cut from.")
    ] = None
    lanes: Annotated[
        Sequence[int], Option(metavar="1,64", help="Sequences at a time.", read=values.numbers(most=4096))
    ] = ()
    contexts: Annotated[
        Sequence[int], Option(metavar="128,…", help="Tokens of a prompt.", read=values.numbers(most=2**20))
    ] = ()
    depths: Annotated[
        Sequence[float],
        Option(metavar="4,2", help="Forced mean depths, 1 to 4.", read=values.decimals(least=1, most=4)),
    ] = ()
    tokens: Annotated[int, Option(metavar="N", min=1, help="New tokens of each lane in a timed repetition.")] = 16
    subset: Annotated[bool, Option(flags=("--subset",), help="Only the rows that aims are stated for.")] = False
    scenario: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="ouro: 1,024 tokens in, 128 out, 1, 32 and 128 at a time, Ouro-1.4B's shape, end to end.",
            check=values.one_of("ouro"),
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="bfloat16, float16 or float32; default: the first on a GPU, the last on a CPU.",
            check=values.one_of("bfloat16", "float16", "float32"),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeBenchOptions(OpenedModel):
    """``adaponder bench serve``."""

    checkpoint: Annotated[
        str | None,
        Option(argument=True, metavar="CKPT", help="Start a server for it, and measure its engine alone, too."),
    ] = None
    url: Annotated[
        str | None,
        Option(metavar="URL", help="A server that runs already; its key is read from ADAPONDER_API_KEY."),
    ] = None
    stand_in: Annotated[
        Sequence[tuple[int, float]],
        Option(
            several=True,
            metavar="LANES,MS",
            help="A server whose engine sleeps: LANES tokens every MS milliseconds, such as 64,8; may be repeated.",
            read=read_stand_in,
        ),
    ] = ()
    rates: Annotated[
        Sequence[float],
        Option(
            metavar="1,2,…",
            help="Requests per second, rising; default: 0.1 to 1.25 of what all streams at once reach.",
            read=values.decimals(least=0.001, most=100_000),
        ),
    ] = ()
    seconds: Annotated[float, Option(metavar="S", min=0.1, max=3600, help="How long requests arrive at each rate.")] = (
        10.0
    )
    context: Annotated[int, Option(metavar="N", min=1, max=2**20, help="Tokens of a prompt, drawn at random.")] = 32
    new: Annotated[int, Option(metavar="N", min=2, max=2**20, help="Tokens that each request generates.")] = 64
    streams: Annotated[
        int, Option(metavar="N", min=1, max=4096, help="Requests at once where the most is measured; lanes of CKPT.")
    ] = 64
    repeats: Annotated[int, Option(metavar="N", min=1, max=1000, help="Times that all streams run at once.")] = 3
    timeout: Annotated[
        float, Option(metavar="S", min=0.1, max=3600, help="A request that takes longer has failed.")
    ] = 120.0
    policy: Annotated[
        str | None, Option(metavar="RULE", help="Who decides depth, such as fixed:2; default: the server's.")
    ] = None
    commit: Annotated[str | None, Option(metavar="NAME", help="Which commit is measured; default: what git says.")] = (
        None
    )
    record: Annotated[
        bool, Option(flags=("--record/--no-record",), help="Keep a record under benchmarks/records/.")
    ] = True
