"""Options that several commands share, in groups to inherit from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.devices import DTYPES, WEIGHTS

if TYPE_CHECKING:
    from adaponder.policies import Policy

POLICIES = (
    "gate:0.01  gate:0.1,0.2,0.3  fixed:2  entropy:2.5  kl:0.01  change:0.1  confidence:0.9  similarity:0.95  "
    "random:0.5  exit:0.9  sampled-exit  router  ranked-uniform:0.8  ranked-geometric:0.8"
)
CHECKPOINT = Option(
    argument=True,
    metavar="CKPT",
    help="A model folder, a run folder, a step folder or a hub name. Its checksums are compared first, a second "
    "or two for each gigabyte; ADAPONDER_VERIFY=0 leaves that out.",
)
DATA = "A folder made by prepare, text or .jsonl (compressed too), .parquet, stdlib, sample, hops:seed=3."
TOKENIZER = Option(metavar="NAME", help="Folder or hub name; default: the checkpoint's own.")
RECIPE = Option(argument=True, metavar="RECIPE", help="A name from adaponder recipes, or a YAML file.")


@dataclass(frozen=True, kw_only=True)
class Json:
    """Where the result goes, beside the screen."""

    json: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="Write the result here as JSON too; -: to standard output, and all else to standard error.",
            check=values.result,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where it runs."""

    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """In which precision weights are opened."""

    dtype: Annotated[
        str,
        Option(
            metavar="NAME",
            help="float32, bfloat16, float16, float64, or auto: as saved, on a CPU at least float32.",
            check=values.one_of(*DTYPES),
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class NarrowWeights:
    """Whether weights are made narrower once they are opened."""

    weights: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="int8, fp8 (in the layers), on a GPU bfloat16, float16: less memory. eval says what it changes.",
            check=values.one_of(*WEIGHTS),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What random numbers follow."""

    seed: Annotated[int, Option(metavar="N", min=0, help="Everything random follows this.")] = 0


@dataclass(frozen=True, kw_only=True)
class OpenedModel(Seed, Device, Dtype, Json):
    """How a checkpoint is opened and run, and where the result goes."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Which part of a text is scored, and in which windows."""

    split: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Of a prepared folder: train or validation.",
            check=values.one_of("train", "validation"),
        ),
    ] = "validation"
    window: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Tokens per window; default: the backbone's positions, at most 2048."),
    ] = None
    stride: Annotated[
        int | None, Option(metavar="N", min=1, help="Sliding windows that move on by this many; default: disjoint.")
    ] = None
    across_documents: Annotated[
        bool,
        Option(flags=("--across-documents/--by-document",), help="May tokens attend to the documents before theirs?"),
    ] = True
    max_tokens: Annotated[int | None, Option(metavar="N", min=1, help="Only the first so many tokens of the text.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class DepthOptions:
    """Who decides depth: at most one of policy, tau and profile."""

    policy: Annotated["Policy | None", Option(metavar="RULE", help=POLICIES, read=values.policy)] = None
    tau: Annotated[
        float | None,
        Option(metavar="X", help="Another threshold for the learned gate, 0 to 1.", check=values.between(0, 1)),
    ] = None
    profile: Annotated[str | None, Option(metavar="NAME", help="A budget that adaponder calibrate stored.")] = None
    max_iterations: Annotated[int | None, Option(metavar="N", min=1, help="Read no token more often than this.")] = None


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How much is scored at a time."""

    batch_size: Annotated[int, Option(metavar="N", min=1, help="Windows at a time; results do not depend on it.")] = 8


@dataclass(frozen=True, kw_only=True)
class NamedTokenizer:
    """Which tokenizer reads the text."""

    tokenizer: Annotated[str | None, TOKENIZER] = None


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(NamedTokenizer, OpenedModel):
    """A checkpoint, its tokenizer, and how it is opened and run."""

    checkpoint: Annotated[str, CHECKPOINT]
