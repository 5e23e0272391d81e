"""The command line: ``python -m benchmarks train|prefill|decode|serve|ops``."""

from benchmarks import decode, ops, prefill, serve, train
from benchmarks.cli import add_command, program, run_program

app = program(
    "benchmarks",
    "Measure speed and memory: ours beside a plain PonderLM (stock modules, eager), in one run, with a record.\n\n"
    "Records (hardware, versions, commit, figures) go to benchmarks/records/. One test of each kernel runs first; if "
    "one fails, nothing is measured.",
)
for module in (train, prefill, decode, serve, ops):
    add_command(app, module.__name__.rpartition(".")[2], module.run)

if __name__ == "__main__":
    run_program(app)
