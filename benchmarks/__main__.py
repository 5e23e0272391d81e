"""The command line: ``python -m benchmarks train|prefill|decode|serve|ops``."""

from benchmarks import decode, ops, serve, steps
from benchmarks.cli import program, run_program

app = program(
    "benchmarks",
    "Measure speed and memory: ours beside a plain PonderLM (stock modules, eager), in one run, with a record.\n\n"
    "Records (hardware, versions, commit, figures) go to benchmarks/records/. One test of each kernel runs first; if "
    "one fails, nothing is measured.",
    {"train": steps.train, "prefill": steps.prefill, "decode": decode.run, "serve": serve.run, "ops": ops.run},
)

if __name__ == "__main__":
    run_program(app)
