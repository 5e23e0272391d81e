"""What each command can be told: one frozen dataclass per command, from which its command line is made.

Importing these imports neither torch nor typer. From Python: ``evaluate.run(EvalOptions(checkpoint=…, data=…))``.
"""

from adaponder.commands.options.bench import (
    BenchOptions,
    DecodeBenchOptions,
    OpsBenchOptions,
    PrefillBenchOptions,
    ServeBenchOptions,
    TrainBenchOptions,
)
from adaponder.commands.options.evaluation import (
    AnalyzeOptions,
    CalibrateOptions,
    CompareOptions,
    EvalOptions,
    PoliciesOptions,
)
from adaponder.commands.options.export import ExportOptions
from adaponder.commands.options.generation import GenerateOptions
from adaponder.commands.options.model import ConvertOptions, DoctorOptions, InspectOptions, PuzzleOptions
from adaponder.commands.options.option import Option
from adaponder.commands.options.serving import ServeOptions
from adaponder.commands.options.training import (
    DemoOptions,
    PrepareOptions,
    RecipesOptions,
    SweepOptions,
    TrainOptions,
)

__all__ = [
    "AnalyzeOptions",
    "BenchOptions",
    "CalibrateOptions",
    "CompareOptions",
    "ConvertOptions",
    "DecodeBenchOptions",
    "DemoOptions",
    "DoctorOptions",
    "EvalOptions",
    "ExportOptions",
    "GenerateOptions",
    "InspectOptions",
    "OpsBenchOptions",
    "Option",
    "PoliciesOptions",
    "PrefillBenchOptions",
    "PrepareOptions",
    "PuzzleOptions",
    "RecipesOptions",
    "ServeBenchOptions",
    "ServeOptions",
    "SweepOptions",
    "TrainBenchOptions",
    "TrainOptions",
]
