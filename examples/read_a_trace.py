"""Ask your own questions of a trace: a table with one line for each token of a text, read with pandas.

    adaponder analyze sample --data sample --only grid --out runs/sample
    python examples/read_a_trace.py runs/sample/trace.parquet

You learn what the columns are. `depth` is how often the token was read and `nll` the loss of the prediction made from
it; `nll_i`, `entropy_i` and `gate_i` are values after iteration i, and `full_nll_i` losses when every token has full
depth. `learned` is false where the predicted token is part of a question; of a plain text all are learned.
"""

import argparse

import pandas as pd


def main(path: str) -> None:
    trace = pd.read_parquet(path)
    losses = sorted(name for name in trace if name.startswith("full_nll_"))
    deepest = len(losses)
    print(f"{len(trace):,} tokens, loss {trace.nll.mean():.4f}, mean depth {trace.depth.mean():.2f} of {deepest}\n")

    print("What each depth costs and gains: tokens by their depth, and their loss had all been read so often")
    by_depth = trace.groupby("depth").agg(tokens=("nll", "size"), loss=("nll", "mean"))
    print(by_depth.join(trace.groupby("depth")[losses].mean()).round(3).to_string(), "\n")

    gain = trace[losses[0]] - trace[losses[-1]]
    print(f"Does reading on help? From depth 1 to {deepest}: {gain.mean():.4f} nats on average,")
    print(f"better for {(gain > 0.01).mean():.0%} of the tokens and worse for {(gain < -0.01).mean():.0%}.\n")

    if "gate_1" in trace:
        agreement = trace.gate_1.rank().corr(gain.rank())
        print(f"Does the first gate know? Rank correlation of gate and gain: {agreement:.2f}.\n")

    print("Tokens that are read most often, of those that occur at least five times")
    words = trace.groupby("token", observed=True).agg(times=("depth", "size"), depth=("depth", "mean"))
    words = words[words.times >= 5].sort_values("depth", ascending=False)
    print(pd.concat([words.head(5), words.tail(5)]).round(2).rename(index=repr).to_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a trace.parquet that adaponder analyze wrote")
    main(parser.parse_args().trace)
