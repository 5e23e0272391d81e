#!/usr/bin/env bash
# Builds the source archive and the wheel, checks their metadata, installs each into an empty environment on every Python
# of this machine from 3.11 on, and there runs the puzzle, generation, the server and the examples, outside of the checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT="$root/constraints.txt"

python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build==1.6.1 twine==7.0.0
rm -rf "$root/dist"
"$work/tools/bin/python" -m build --outdir "$root/dist" "$root" > "$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; exit 1; }
"$work/tools/bin/twine" check --strict "$root"/dist/*

try() {  # $1: Python, $2: archive
  local home="$work/$(basename "$1")-${2##*.}"
  "$1" -m venv "$home"
  "$home/bin/pip" install --quiet "$2[serve]"
  mkdir "$home/empty" && cd "$home/empty"
  "$home/bin/adaponder" --version
  "$home/bin/adaponder" puzzle --seed 1 > puzzle.txt
  "$home/bin/adaponder" generate sample --prompt "def " --max-new-tokens 8 --seed 0
  "$home/bin/adaponder" serve sample-hops --port 0 > serve.txt 2>&1 &
  server=$!
  for _ in $(seq 240); do grep -q 'http://' serve.txt && break; sleep 0.5; done
  url=$(grep -o 'http://[0-9.:]*' serve.txt | head -n 1)
  "$home/bin/python" -c "import sys, urllib.request as u; sys.exit(u.urlopen('$url/').status != 200)"
  "$home/bin/python" -c "import sys, urllib.request as u; sys.exit(b'sample-hops' not in u.urlopen('$url/v1/models').read())"
  kill "$server" && wait "$server" || true
  server=
  for example in wrap_a_decoder own_policy own_method generate_under_a_budget; do
    "$home/bin/python" "$root/examples/$example.py" > "$example.txt"
  done
  "$home/bin/python" "$root/examples/train.py" --steps 5 --out model > train.txt
  "$home/bin/adaponder" analyze sample --data sample --out runs/sample --max-tokens 200 > analyze.txt
  "$home/bin/python" "$root/examples/read_a_trace.py" runs/sample/trace.parquet > trace.txt
  cd "$root"
  echo "$(basename "$2") works with $("$1" --version)"
}

for python in $(compgen -c python3. | grep -xE 'python3\.(1[1-9]|[2-9][0-9])' | sort -uV); do
  "$python" -c "import venv" 2> /dev/null || continue # a name without an interpreter behind it
  for archive in "$root"/dist/*.whl "$root"/dist/*.tar.gz; do
    try "$(command -v "$python")" "$archive"
  done
done
ls -l "$root/dist"
