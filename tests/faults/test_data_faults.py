"""Bad data is named when opened, odd text is defined, and an interrupted preparation goes on (promises 15 to 19)."""

import contextlib
import functools
import json
import multiprocessing
import operator
import os
import re
import select
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaponder.checkpoints.manifest import sealed
from adaponder.data import DataError, Sampler, Shards
from adaponder.data import shards as verify
from adaponder.data.encode import Encoder
from adaponder.data.manifest import Manifest
from adaponder.data.prepare import prepare
from adaponder.data.shards import ShardWriter
from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash
from adaponder.errors import AdaPonderError, InputError
from adaponder.recipes import load_recipe
from adaponder.training.data import open_data
from adaponder.training.distributed import World
from fault_support import contents, flip, full_disk, killed

TOKENS, DOCS = "train/tokens-00001.bin", "train/docs-00001.parquet"
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "part.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) + "\n" for n in range(60)))
    return path


def arguments(corpus: Path, out: Path) -> dict:
    settings = {"tokenizer": "train-bpe:270", "validation": 0.3, "shard_tokens": 150}
    return {"inputs": [str(corpus)], "out": out} | settings


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """Prepares without interruption at least three training shards and two of validation."""
    out = tmp_path_factory.mktemp("whole")
    manifest = prepare(**arguments(corpus, out))
    assert len(manifest.splits["train"]) >= 3
    assert len(manifest.splits["validation"]) >= 2
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def table(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def shifted(documents: pa.Table) -> pa.Table:
    start = documents.column("start").to_numpy().copy()
    start[1] += 1
    return documents.set_column(0, documents.schema.field("start"), [start])


ANY = {
    "missing": Path.unlink,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),  # does not hang
    "empty": content(lambda data: b""),
    "truncated": content(lambda data: data[:-30]),
}
JSON = {
    "many digits": content(lambda data: b'{"format": ' + b"9" * 5_000 + b"}"),
    "deep": content(lambda data: b'{"a":' * 200 + b"1" + b"}" * 200),
    "no object": content(lambda data: b"[]"),
    "a byte without meaning": content(lambda data: data.replace(b"{\n", b"{ ", 1)),
}
DAMAGE = {
    TOKENS: ANY | {"another type": content(lambda data: np.frombuffer(data, "<u2").astype("<u4").tobytes())},
    DOCS: ANY
    | {
        "fewer rows": table(lambda documents: documents.slice(0, documents.num_rows - 1)),
        "a renamed column": table(lambda documents: documents.rename_columns(["x", *documents.column_names[1:]])),
        "a missing column": table(lambda documents: documents.drop_columns(["source"])),
        "shifted documents": table(shifted),
        "another table": lambda path: shutil.copy(path.with_name("docs-00000.parquet"), path),
    },
    MANIFEST: ANY
    | JSON
    | {
        "wider tokens": content(lambda data: data.replace(b'"uint16"', b'"uint32"')),
        "tokens of floats": content(lambda data: data.replace(b'"uint16"', b'"float32"')),
        "another format": content(lambda data: data.replace(b'"format": 2', b'"format": 9')),
        "other counts": content(lambda data: data.replace(b'"documents": ', b'"documents": 1')),
    },
    TOKENIZER: ANY,
}


@pytest.mark.parametrize(("name", "damage"), [(name, damage) for name, kinds in DAMAGE.items() for damage in kinds])
def test_15_a_damaged_file_is_named_in_one_line_when_opened(copy, name, damage):
    DAMAGE[name][damage](copy / name)
    for hashing in (True, False):
        with pytest.raises(DataError, match=re.escape(name)) as refused:
            Shards.open(copy, verify=hashing)
        assert len(str(refused.value)) < 600


def open_all(folder: Path) -> None:
    for split in ("train", "validation"):
        Shards.open(folder, split)


def test_15_one_flipped_byte_in_any_file_is_found_and_named(copy, corpus):
    files = contents(copy)
    assert {MANIFEST, TOKENIZER, TOKENS, DOCS} < set(files)
    random = np.random.default_rng(0)
    for name, data in sorted(files.items()):
        for place in (0, len(data) - 1, *random.integers(0, len(data), 4).tolist()):
            flip(copy / name, place, int(random.integers(8)))
            with pytest.raises(DataError, match=re.escape(name)):
                open_all(copy)
            if name == TOKENS:  # nor is the folder taken for finished
                with pytest.raises(DataError, match=name):
                    prepare(**arguments(corpus, copy))
            (copy / name).write_bytes(data)


def test_15_checksums_are_skipped_only_on_request(copy, monkeypatch, capfd):
    flip(copy / TOKENS, 100)
    assert Shards.open(copy, verify=False).tokens
    monkeypatch.setenv("ADAPONDER_VERIFY", "0")
    assert Shards.open(copy).tokens
    assert "ADAPONDER_VERIFY=0" in capfd.readouterr().err
    monkeypatch.setenv("ADAPONDER_VERIFY", "no")
    with pytest.raises(InputError, match="ADAPONDER_VERIFY=no"):
        Shards.open(copy)


def spied(monkeypatch) -> list[list[Path]]:
    hashed, original = [], verify.sha256_of_each

    def spy(files: list[Path], *given, **options) -> list[str]:
        hashed.append(files)
        return original(files, *given, **options)

    monkeypatch.setattr(verify, "sha256_of_each", spy)
    return hashed


def test_15_the_processes_of_a_machine_share_the_hashing_and_miss_nothing(copy, monkeypatch):
    recipe, hashed = load_recipe("cpu/demo", [f"data.source={copy}"]), spied(monkeypatch)
    everything = [sorted((copy / split).iterdir()) for split in ("train", "validation")]
    monkeypatch.setenv("LOCAL_RANK", "1")
    open_data(recipe, copy, World())
    # Without the number of processes, nothing may be left to a process that perhaps is not there.
    assert [sorted(files) for files in hashed] == everything
    hashed.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        open_data(recipe, copy, World())
    assert [sorted(path for files in hashed[split::2] for path in files) for split in (0, 1)] == everything
    assert max(map(len, hashed[::2])) - min(map(len, hashed[::2])) <= 1
    with pytest.raises(InputError, match="share"):
        Shards.open(copy, share=(3, 3))


FIRST = ("splits", "train", "shards", 0)
FORGED = [
    ((*FIRST, "tokens"), -5, "tokens"),
    ((*FIRST, "documents"), 10**30, "documents"),
    ((*FIRST, "number"), True, "number"),
    ((*FIRST, "docs_sha256"), "../x", "docs_sha256"),
    (("splits", "train", "tokens"), -1, "-1"),
    (("splits", "validation"), None, ""),
    (("vocab_size",), 2**40, "vocab_size"),
    (("end_id",), 1e9, "end_id"),
    (("tokenizer_hash",), 3, "tokenizer_hash"),
    (("template_sha256",), "x", "template_sha256"),
    (("begin_token",), 5, "begin_token"),
    (("skipped",), {"hidden": -1}, "skipped"),
    (("fingerprint",), [], "fingerprint"),
    (("fingerprint", "validation"), "x", "fingerprint"),
    (("more",), 1, "more"),
    (("format",), "9" * 1000, "format"),
]


@pytest.mark.parametrize(("keys", "value", "named"), FORGED, ids=lambda piece: str(piece)[:30])
def test_15_a_forged_manifest_is_refused_in_one_line(copy, keys, value, named):
    """Its own checksum is right."""
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["checksum"]
    functools.reduce(operator.getitem, keys[:-1], manifest)[keys[-1]] = value
    (copy / MANIFEST).write_text(sealed(manifest))
    with pytest.raises(DataError, match=rf"manifest\.json: .*{re.escape(named)}") as refused:
        Shards.open(copy)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600


def test_15_a_shard_that_shrinks_while_in_use_is_named(copy):
    shards = Shards.open(copy)
    (copy / TOKENS).write_bytes(b"")
    with pytest.raises(DataError, match=TOKENS):
        shards.read(0, shards.tokens)


def test_16_a_token_outside_the_vocabulary_is_named_by_shard_and_offset(copy):
    first = Manifest.load(copy).splits["train"][0].tokens
    tokens = np.fromfile(copy / TOKENS, "<u2")
    tokens[37] = 60_000
    tokens.tofile(copy / TOKENS)
    shards = Shards.open(copy, verify=False)
    assert len(shards.read(0, first + 37)) == first + 37
    with pytest.raises(DataError, match=rf"{TOKENS}: token id 60000 at offset 37 "):
        shards.read(first - 5, 60)
    sampler = Sampler(shards, sequence=1, global_batch=shards.tokens // 2, seed=0)
    with pytest.raises(DataError, match="at offset 37 "):
        sampler.batch(0)


def test_17_another_tokenizer_is_refused(copy):
    other = load_tokenizer("train-bpe:260", ["other text"])[0]
    shards = Shards.open(copy)
    shards.require_tokenizer(tokenizer_hash(load_tokenizer(str(copy))[0]), "the checkpoint")
    with pytest.raises(DataError, match=f"{tokenizer_hash(other)[:12]}.*the checkpoint"):
        shards.require_tokenizer(tokenizer_hash(other), "the checkpoint")
    other.save(str(copy / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Shards.open(copy)


def test_18_odd_documents_are_defined(tmp_path):
    """Empty: left out. One token: kept. Invalid UTF-8, lone surrogates: U+FFFD. NUL: kept in a record. All counted."""
    lines = [
        rb'{"text": ""}',
        rb'{"text": "a"}',
        b'{"text": "bad \xff byte"}',
        rb'{"text": "half \ud800 pair"}',
        rb'{"text": "whole \ud83d\ude00 pair"}',
        rb'{"text": "nul \u0000 inside", "source": "half \ud800"}',
    ]
    path = tmp_path / os.fsdecode(b"name-\xff.jsonl")
    path.write_bytes(b"\n".join(lines))
    manifest = prepare([str(path)], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)
    assert manifest.skipped == {"hidden": 0, "special": 0, "binary": 0, "invalid_utf8": 6, "empty": 1}
    shards = Shards.open(tmp_path / "out")
    tokens = shards.read(0, shards.tokens)
    words = load_tokenizer(str(tmp_path / "out"))[0]
    parts = np.split(tokens, np.flatnonzero(tokens == shards.end_id) + 1)[:-1]
    texts = ["a", "bad \ufffd byte", "half \ufffd pair", "whole 😀 pair", "nul \0 inside"]
    assert [words.decode(piece.tolist()[:-1]) for piece in parts] == texts
    sources = pq.read_table(tmp_path / "out" / "train" / "docs-00000.parquet").column("source").to_pylist()
    assert sources == [*["name-\ufffd"] * 4, "half \ufffd"]


def test_18_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def rewrite(now) -> None:
        if now.stage == "tokenizer":
            path.write_text('{"text": "ONE"}\n{"text": "two"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl"):
        prepare([str(path)], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0, progress=rewrite)


def test_18_a_pipe_is_skipped_in_a_folder_and_refused_by_name(tmp_path):
    (tmp_path / "in" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "folder" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "in" / "a.txt")
    manifest = prepare([str(tmp_path / "in")], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)
    assert (manifest.total("train", "documents"), manifest.skipped["special"]) == (2, 3)
    assert ": 3" in manifest.remarks()[0]
    for source, tokenizer in (("pipe", "train-bpe:257"), ("a.txt", str(tmp_path / "in" / "pipe"))):
        with pytest.raises(InputError, match="pipe"):
            prepare([str(tmp_path / "in" / source)], out=tmp_path / "other", tokenizer=tokenizer)


def dies_before(call: int, corpus: Path, out: Path) -> bool:
    """Prepares in a child that is killed at the ``call``-th write, rename or removal; returns whether it was."""

    def doomed() -> None:
        left, unlink = [call], os.unlink

        def deadly(function: Callable) -> Callable:
            def wrapped(*given) -> object:
                left[0] -= function is not unlink or Path(given[0]).exists()
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*given)

            return wrapped

        os.fsync, os.replace, os.unlink = deadly(os.fsync), deadly(os.replace), deadly(os.unlink)
        prepare(**arguments(corpus, out))

    return killed(doomed)


def assert_only_whole_files(out: Path, whole: Path) -> None:
    """Checks that each file with a final name has the bytes that an unbroken run writes."""
    wanted, found = contents(whole), contents(out) if out.exists() else {}
    for name, data in found.items():
        if name.endswith((".bin", ".parquet")) or name in ("manifest.json", "tokenizer.json"):
            assert data == wanted[name], name


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.every), 11])
def test_19_killed_at_every_instant_preparation_continues_to_the_same_bytes(corpus, whole, tmp_path, step):
    """Before and after every write, rename and removal of the whole preparation, or some of them."""
    call = 1
    while dies_before(call, corpus, out := tmp_path / str(call)):
        assert_only_whole_files(out, whole)
        if not (out / MANIFEST).exists():
            with pytest.raises(DataError):
                Shards.open(out)
        prepare(**arguments(corpus, out))
        assert contents(out) == contents(whole)
        call += step
    assert call > 50


def test_19_what_is_done_is_not_done_again(corpus, whole, tmp_path, monkeypatch):
    out, shards = tmp_path / "out", Manifest.load(whole).splits

    def stop(now) -> None:
        if (out / "train" / shards["train"][1].tokens_name).exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 5)
    with pytest.raises(KeyboardInterrupt):
        prepare(**arguments(corpus, out), progress=stop)
    state = json.loads((out / "progress.json").read_text())
    encoded, original = [], Encoder._encode
    monkeypatch.setattr(Encoder, "_encode", lambda *given: encoded.extend(given[1]) or original(*given))
    manifest = prepare(**arguments(corpus, out))
    total = manifest.total("train", "documents") + manifest.total("validation", "documents")
    done = sum(shard["documents"] for split in state["shards"].values() for shard in split)
    assert done > 10
    assert len(encoded) == total - done
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("call", [13, 40, None])
def test_19_an_input_rewritten_at_equal_size_is_never_mixed_in(corpus, tmp_path, call):
    """After the tokenizer, in the midst of shards, and when all is done; the time of change seems the same."""
    path, out = Path(shutil.copy(corpus, tmp_path / "part.jsonl")), tmp_path / "out"
    assert dies_before(call or 0, path, out) == (call is not None)
    before, times = contents(out), path.stat()
    path.write_bytes(path.read_bytes().replace(b"document 7 ", b"DOCUMENT 7 "))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match="inputs"):
        prepare(**arguments(path, out))
    assert contents(out) == before


def test_19_finished_shards_must_be_intact_to_continue(corpus, tmp_path):
    out = tmp_path / "out"
    assert dies_before(40, corpus, out)
    for name in ("train/tokens-00000.bin", "train/docs-00000.parquet", "progress.json", TOKENIZER):
        data = (out / name).read_bytes()
        flip(out / name, 70)
        with pytest.raises(AdaPonderError, match=re.escape(name)):
            prepare(**arguments(corpus, out))
        (out / name).write_bytes(data)
    prepare(**arguments(corpus, out))


@pytest.mark.parametrize("call", [1, 7, 13, 30])
def test_19_a_full_disk_is_named_and_leaves_no_temporary_file(corpus, whole, tmp_path, monkeypatch, call):
    out, left, real = tmp_path / "out", [call], os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        (full_disk if left[0] == 0 else real)(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        prepare(**arguments(corpus, out))
    assert not [name for name in contents(out) if name.endswith(".tmp")]
    assert_only_whole_files(out, whole)
    prepare(**arguments(corpus, out))
    assert contents(out) == contents(whole)


def test_19_a_folder_that_is_in_use_or_impossible_is_refused(corpus, tmp_path):
    def second(now) -> None:
        with pytest.raises(InputError, match="--out"):
            prepare(**arguments(corpus, tmp_path / "out"))

    prepare(**arguments(corpus, tmp_path / "out"), progress=second)
    with pytest.raises(InputError, match="--out"):
        prepare(**arguments(corpus, corpus / "out"))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux lets one wait for another's children")
def test_19_kill_9_ends_the_workers_and_a_rerun_continues(corpus, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 20)
    reading, writing = os.pipe()

    def stop(now) -> None:
        if now.stage == "tokens":
            os.write(writing, json.dumps([child.pid for child in multiprocessing.active_children()]).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed(lambda: prepare(**arguments(corpus, tmp_path / "out"), workers=2, progress=stop))
    workers = json.loads(os.read(reading, 1000))
    assert 1 <= len(workers) <= 2
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            watched = os.pidfd_open(worker)
            assert select.select([watched], [], [], 30)[0], "a worker outlived its parent"
            os.close(watched)
    assert_only_whole_files(tmp_path / "out", whole)
    assert not (tmp_path / "out" / "manifest.json").exists()
    prepare(**arguments(corpus, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(whole)


def test_19_an_interruption_while_train_prepares_ends_it_at_once(corpus, command, tmp_path, monkeypatch, ctrl_c):
    """Exit 130 after the batch at hand, and the folder of the run is still empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 5)
    batches = []

    def interrupted(writer: ShardWriter, batch: object) -> None:
        batches.append(batch)
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ShardWriter, "add", interrupted)
    settings = (f"--set=data.source={corpus}", "--set=data.tokenizer=train-bpe:270")
    code, _, error = command("train", "cpu/demo", "--out", "run", *settings)
    assert (code, len(batches)) == (130, 2)
    assert "run the same command again" in error
    assert not multiprocessing.active_children()
    assert not (tmp_path / "run").exists()
