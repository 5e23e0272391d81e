"""Bad data is named when opened, odd text is defined, and an interrupted preparation goes on (promises 15 to 19)."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from adaponder.checkpoints.manifest import sealed
from adaponder.data import DataError, Sampler, Shards
from adaponder.data import shards as verify
from adaponder.data.encode import Encoder
from adaponder.data.manifest import Manifest
from adaponder.data.prepare import prepare
from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash
from adaponder.errors import AdaPonderError, InputError

TOKENS, DOCS = "train/tokens-00001.bin", "train/docs-00001.parquet"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "part.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) + "\n" for n in range(60)))
    return path


def arguments(corpus: Path, out: Path) -> dict:
    return {
        "inputs": [str(corpus)],
        "out": out,
        "tokenizer": "train-bpe:270",
        "validation": 0.3,
        "shard_tokens": 150,
    }


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """Prepared without interruption: at least three training shards and two of validation."""
    out = tmp_path_factory.mktemp("whole")
    made = prepare(**arguments(corpus, out))
    assert len(made.splits["train"]) >= 3
    assert len(made.splits["validation"]) >= 2
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wider(data: bytes) -> bytes:
    return np.frombuffer(data, "<u2").astype("<u4").tobytes()


def fewer_rows(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)


def renamed_column(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["begin", *table.column_names[1:]]), path)


def without_source(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["source"]), path)


def shifted(path: Path) -> None:
    table = pq.read_table(path)
    start = table.column("start").to_numpy().copy()
    start[1] += 1
    pq.write_table(table.set_column(0, table.schema.field("start"), [start]), path)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (TOKENS, lambda path: path.write_bytes(path.read_bytes()[:-1])),
        (TOKENS, lambda path: path.write_bytes(b"")),
        (TOKENS, lambda path: path.write_bytes(wider(path.read_bytes()))),
        (TOKENS, lambda path: path.unlink()),
        (DOCS, lambda path: path.write_bytes(path.read_bytes()[:-10])),
        (DOCS, lambda path: path.write_bytes(b"")),
        (DOCS, lambda path: path.unlink()),
        (DOCS, fewer_rows),
        (DOCS, renamed_column),
        (DOCS, without_source),
        (DOCS, shifted),
        (DOCS, lambda path: shutil.copy(path.with_name("docs-00000.parquet"), path)),
        ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:-30])),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"uint16"', '"uint32"'))),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"uint16"', '"float32"'))),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"format": 2', '"format": 9'))),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"documents": ', '"documents": 1'))),
        ("manifest.json", lambda path: path.write_text("[]")),
        ("manifest.json", lambda path: path.unlink()),
    ],
)
def test_15_a_damaged_shard_is_named_when_opened(copy, name: str, harm: Callable[[Path], object]):
    harm(copy / name)
    for hashing in (True, False):
        with pytest.raises(DataError, match=name):
            Shards.open(copy, verify=hashing)


def open_all(folder: Path) -> None:
    for split in ("train", "validation"):
        Shards.open(folder, split)


def test_15_one_flipped_byte_in_any_file_is_found_and_named(whole, tmp_path):
    """Every file of a prepared folder, each at its start, its end and places between."""
    names = sorted(contents(whole))
    assert {"manifest.json", "tokenizer.json", TOKENS, DOCS} < set(names)
    random = np.random.default_rng(0)
    for name in names:
        copy = shutil.copytree(whole, tmp_path / "copy")
        data = (copy / name).read_bytes()
        for place in (0, len(data) - 1, *random.integers(0, len(data), 4).tolist()):
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(random.integers(8))
            (copy / name).write_bytes(flipped)
            with pytest.raises(DataError, match=re.escape(name)):
                open_all(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_15_a_byte_without_meaning_is_a_byte_all_the_same(copy, name):
    """A space for a line break, a habit of use: the content is as before, the file is not."""
    path = copy / name
    path.write_bytes(path.read_bytes().replace(b"{\n", b"{ ", 1))
    with pytest.raises(DataError, match=re.escape(name)):
        Shards.open(copy)


def test_15_checksums_are_left_out_only_where_somebody_says_so(copy, monkeypatch, capfd):
    data = bytearray((copy / TOKENS).read_bytes())
    data[100] ^= 1
    (copy / TOKENS).write_bytes(data)
    assert Shards.open(copy, verify=False).tokens
    monkeypatch.setenv("ADAPONDER_VERIFY", "0")
    assert Shards.open(copy).tokens
    assert "ADAPONDER_VERIFY=0" in capfd.readouterr().err
    monkeypatch.setenv("ADAPONDER_VERIFY", "no")
    with pytest.raises(InputError, match="ADAPONDER_VERIFY=no: 1 verifies"):
        Shards.open(copy)


def spied(monkeypatch) -> list[list[Path]]:
    """The files of each verification from here on."""
    hashed, original = [], verify.sha256_of_each

    def spy(files: list[Path], *given, **options) -> list[str]:
        hashed.append(files)
        return original(files, *given, **options)

    monkeypatch.setattr(verify, "sha256_of_each", spy)
    return hashed


def test_15_the_processes_of_a_machine_share_the_hashing_and_miss_nothing(copy, monkeypatch):
    hashed = spied(monkeypatch)
    for number in range(3):
        Shards.open(copy, share=(number, 3))
    together = [path for part in hashed for path in part]
    assert sorted(together) == sorted((copy / "train").iterdir())
    assert max(map(len, hashed)) - min(map(len, hashed)) <= 1
    with pytest.raises(InputError, match="share"):
        Shards.open(copy, share=(3, 3))


def test_15_a_process_that_torchrun_started_hashes_its_part_of_a_runs_data(copy, monkeypatch):
    from adaponder.recipes import load_recipe
    from adaponder.training.data import open_data
    from adaponder.training.distributed import World

    monkeypatch.setenv("LOCAL_RANK", "1")
    recipe = load_recipe("cpu/demo", [f"data.source={copy}"])
    hashed = spied(monkeypatch)
    open_data(recipe, copy, World())
    # Without the number of processes, nothing may be left to a process that perhaps is not there.
    assert [sorted(part) for part in hashed] == [sorted((copy / split).iterdir()) for split in ("train", "validation")]
    hashed.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    open_data(recipe, copy, World())
    assert hashed == [sorted((copy / split).glob("docs-*")) for split in ("train", "validation")]


def test_15_a_long_verification_tells_how_far_it_is(copy, monkeypatch, capfd):
    monkeypatch.setattr(verify, "_LARGE", 1)
    clock = iter(range(0, 10_000, 31))
    monkeypatch.setattr(verify.time, "monotonic", lambda: next(clock))
    Shards.open(copy)
    shown = capfd.readouterr().err
    assert "verifying checksums of" in shown
    assert "100% verified" in shown


def reseal(folder: Path, change: Callable[[dict], object]) -> None:
    """Puts a changed manifest in place whose own checksum is right: what somebody might make on purpose."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    change(content)
    (folder / "manifest.json").write_text(sealed(content))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["splits"]["train"]["shards"][0].update(tokens=-5), "tokens of a shard is -5"),
        (lambda m: m["splits"]["train"]["shards"][0].update(documents=10**30), "documents of a shard is 10000"),
        (lambda m: m["splits"]["train"]["shards"][0].update(number=True), "number of a shard is True"),
        (lambda m: m["splits"]["train"]["shards"][0].update(tokens=2.0), "tokens of a shard is 2.0"),
        (lambda m: m["splits"]["train"]["shards"][0].update(docs_sha256="../x"), "docs_sha256 of a shard"),
        (lambda m: m["splits"]["train"].update(tokens=-1), "do not add up to -1"),
        (lambda m: m["splits"].update(test=m["splits"]["train"]), "splits train, validation, test"),
        (lambda m: m["splits"].pop("validation"), "splits train"),
        (lambda m: m.update(splits=5), "not a valid manifest"),
        (lambda m: m.update(vocab_size=-7), "vocab_size -7"),
        (lambda m: m.update(vocab_size=2**40, dtype="uint32"), "do not go together"),
        (lambda m: m.update(vocab_size="270"), "do not go together"),
        (lambda m: m.update(end_id=None), "end_id None"),
        (lambda m: m.update(end_id=1e9), "end_id 1000000000"),
        (lambda m: m.update(tokenizer_hash=3), "tokenizer_hash and tokenizer_sha256"),
        (lambda m: m.update(skipped={"hidden": -1}), "skipped must count"),
        (lambda m: m.update(skipped=[]), "skipped must count"),
        (lambda m: m.update(fingerprint=[]), "fingerprint must be an object"),
        (lambda m: m["fingerprint"].update(validation="x"), "validation"),
        (lambda m: m.update(more=1), "not a valid manifest"),
        (lambda m: m.update(format=1), "format 1, this version reads 2"),
        (lambda m: m.update(format="9" * 1000), "format 9999"),
    ],
)
def test_15_a_manifest_made_on_purpose_is_refused_in_one_line(copy, change, named):
    reseal(copy, change)
    with pytest.raises(DataError, match=rf"manifest\.json: .*{re.escape(named)}") as refused:
        Shards.open(copy)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5_000 + "}", '{"a":' * 200 + "1" + "}" * 200])
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
def test_15_nesting_and_digits_without_end_are_refused_in_one_line(copy, name, text):
    (copy / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(name)) as refused:
        Shards.open(copy)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", TOKENS, DOCS])
def test_15_a_pipe_in_place_of_a_file_does_not_hang(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(DataError, match=rf"{re.escape(name)} is not an ordinary file"):
        Shards.open(copy)


def test_15_a_shard_that_shrinks_while_in_use_is_named(copy):
    shards = Shards.open(copy)
    (copy / TOKENS).write_bytes(b"")
    with pytest.raises(DataError, match=f"{TOKENS}: truncated since it was opened"):
        shards.read(0, shards.tokens)


def test_15_a_damaged_finished_folder_is_not_taken_for_finished(copy, corpus):
    data = bytearray((copy / TOKENS).read_bytes())
    data[9] ^= 1
    (copy / TOKENS).write_bytes(data)
    with pytest.raises(DataError, match=TOKENS):
        prepare(**arguments(corpus, copy))


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
    with pytest.raises(DataError, match=f"{tokenizer_hash(other)[:12]}.*the tokenizer of the checkpoint"):
        shards.require_tokenizer(tokenizer_hash(other), "the checkpoint")
    other.save(str(copy / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json has hash"):
        Shards.open(copy)


def test_18_data_smaller_than_one_window_or_one_batch_is_refused_with_the_cure(whole):
    shards = Shards.open(whole)
    with pytest.raises(DataError, match="sequence"):
        Sampler(shards, sequence=shards.tokens, global_batch=1, seed=0)
    with pytest.raises(DataError, match="global_batch to 1"):
        Sampler(shards, sequence=shards.tokens - 1, global_batch=2, seed=0)


def test_18_odd_documents_are_defined(tmp_path):
    """Empty: left out. One token: kept. Invalid UTF-8, lone surrogates: U+FFFD. NUL: kept in a record. All counted."""
    lines = [
        rb'{"text": ""}',
        rb'{"text": "a"}',
        b'{"text": "bad \xff byte"}',
        rb'{"text": "half \ud800 pair"}',
        rb'{"text": "whole \ud83d\ude00 pair"}',
        rb'{"text": "nul \u0000 inside"}',
    ]
    (tmp_path / "odd.jsonl").write_bytes(b"\n".join(lines))
    made = prepare([str(tmp_path / "odd.jsonl")], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)
    assert made.skipped == {"hidden": 0, "special": 0, "binary": 0, "invalid_utf8": 2, "empty": 1}
    shards = Shards.open(tmp_path / "out")
    tokens = shards.read(0, shards.tokens)
    words = load_tokenizer(str(tmp_path / "out"))[0]
    parts = np.split(tokens, np.flatnonzero(tokens == shards.end_id) + 1)[:-1]
    assert [words.decode(part.tolist()[:-1]) for part in parts] == [
        "a",
        "bad \ufffd byte",
        "half \ufffd pair",
        "whole 😀 pair",
        "nul \0 inside",
    ]


@pytest.mark.every
def test_18_a_line_of_ten_megabytes_is_a_document_like_any_other(tmp_path):
    (tmp_path / "long.jsonl").write_text('{"text": "short"}\n{"text": "' + "ab" * 5_000_000 + '"}\n')
    load_tokenizer("train-bpe:300", ["ab" * 400, "short text"])[0].save(str(tmp_path / "t.json"))
    begun = time.monotonic()
    made = prepare(
        [str(tmp_path / "long.jsonl")], out=tmp_path / "out", tokenizer=str(tmp_path / "t.json"), validation=0
    )
    assert time.monotonic() - begun < 60
    assert (made.total("train", "documents"), made.total("train", "utf8_bytes")) == (2, 10_000_005)
    assert Shards.open(tmp_path / "out").number_blocks(np.array([0]), 20)[0, -1] == 1


def test_18_a_source_that_no_utf8_can_hold_is_mended_and_counted(tmp_path):
    """Half a surrogate pair in a record, and bytes of a file name that are no UTF-8."""
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "one", "source": "half \ud800"}')
    odd = tmp_path / os.fsdecode(b"name-\xff.jsonl")
    odd.write_bytes(b'{"text": "two"}')
    inputs = [str(tmp_path / "a.jsonl"), str(odd)]
    made = prepare(inputs, out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)
    assert made.skipped["invalid_utf8"] == 2
    table = pq.read_table(tmp_path / "out" / "train" / "docs-00000.parquet")
    assert table.column("source").to_pylist() == ["half \ufffd", "name-\ufffd"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read even by its owner")
def test_18_an_unreadable_file_is_one_line(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Input/output error"):
        prepare([str(tmp_path / "in")], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)


def test_18_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')

    def rewrite(now) -> None:
        if now.stage == "tokenizer":
            path.write_text('{"text": "ONE"}\n{"text": "two"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        prepare([str(path)], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0, progress=rewrite)


def test_18_what_is_left_out_of_a_folder_is_counted_and_a_pipe_does_not_hang(tmp_path):
    (tmp_path / "in" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "folder" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "in" / "a.txt")
    made = prepare([str(tmp_path / "in")], out=tmp_path / "out", tokenizer="train-bpe:257", validation=0)
    assert made.total("train", "documents") == 2
    assert made.skipped["special"] == 3
    assert "pipes, devices, broken links and links to folders skipped: 3" in made.remarks()


def test_18_a_pipe_named_as_input_or_tokenizer_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="pipe is a pipe or device"):
        prepare([str(tmp_path / "pipe")], out=tmp_path / "out", tokenizer="train-bpe:257")
    with pytest.raises(InputError, match=r"--tokenizer .*pipe"):
        prepare([str(tmp_path / "a.txt")], out=tmp_path / "out", tokenizer=str(tmp_path / "pipe"))


def killed(act: Callable[[], object]) -> bool:
    """Runs ``act`` in a forked child; whether it was killed rather than finished."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def die_before(call: int) -> None:
    """From here on, the ``call``-th time that anything is made durable this process is killed instead."""
    left, unlink = [call], os.unlink

    def deadly(function: Callable) -> Callable:
        def wrapped(*given) -> object:
            left[0] -= function is not unlink or Path(given[0]).exists()
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given)

        return wrapped

    os.fsync, os.replace, os.unlink = deadly(os.fsync), deadly(os.replace), deadly(os.unlink)


def assert_only_whole_files(out: Path, whole: Path) -> None:
    """What bears a final name of a shard is, byte for byte, what an unbroken run leaves under it."""
    wanted, found = contents(whole), contents(out) if out.exists() else {}
    for name, data in found.items():
        if name.endswith((".bin", ".parquet")) or name in ("manifest.json", "tokenizer.json"):
            assert data == wanted[name], name


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.every), 5])
def test_19_killed_at_every_instant_it_goes_on_to_the_same_bytes(corpus, whole, tmp_path, step):
    """Before and after every write, rename and removal of the whole preparation, or some of them."""
    call = 1
    while True:
        out = tmp_path / str(call)

        def doomed(out: Path = out, call: int = call) -> None:
            die_before(call)
            prepare(**arguments(corpus, out))

        if not killed(doomed):
            break
        assert_only_whole_files(out, whole)
        if not (out / "manifest.json").exists():
            with pytest.raises(DataError, match=r"prepared only in part|not a folder made by"):
                Shards.open(out)
        prepare(**arguments(corpus, out))
        assert contents(out) == contents(whole)
        call += step
    assert call > 50


def test_19_killed_again_and_again_it_still_arrives(corpus, whole, tmp_path):
    out, deaths = tmp_path / "out", 0

    def doomed() -> None:
        die_before(16)
        prepare(**arguments(corpus, out))

    while killed(doomed):
        deaths += 1
        assert deaths < 60, "no progress between deaths"
        assert_only_whole_files(out, whole)
    assert deaths >= 3
    assert contents(out) == contents(whole)


def test_19_what_is_done_is_not_done_again(corpus, whole, tmp_path, monkeypatch):
    """A rerun encodes no document that a complete shard holds."""
    shards = Manifest.load(whole).splits

    def stop(now) -> None:
        if (tmp_path / "out" / "train" / shards["train"][1].tokens_name).exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 5)
    with pytest.raises(KeyboardInterrupt):
        prepare(**arguments(corpus, tmp_path / "out"), progress=stop)
    kept = json.loads((tmp_path / "out" / "progress.json").read_text())
    encoded = []
    original = Encoder._encode
    monkeypatch.setattr(
        Encoder, "_encode", lambda self, items, out: encoded.extend(items) or original(self, items, out)
    )
    made = prepare(**arguments(corpus, tmp_path / "out"))
    total = made.total("train", "documents") + made.total("validation", "documents")
    done = sum(shard["documents"] for split in kept["shards"].values() for shard in split)
    assert done > 10
    assert len(encoded) == total - done
    assert contents(tmp_path / "out") == contents(whole)


def test_19_other_arguments_cannot_go_on_from_here(corpus, tmp_path):
    def doomed() -> None:
        die_before(20)
        prepare(**arguments(corpus, tmp_path / "out"))

    assert killed(doomed)
    with pytest.raises(InputError, match=r"begun with other arguments: validation was 0.3, is 0.1"):
        prepare(**(arguments(corpus, tmp_path / "out") | {"validation": 0.1}))


def rewritten(path: Path) -> None:
    """Another text of the same size, at what seems the same time."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"document 7 ", b"DOCUMENT 7 "))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("call", [13, 16, 20, 40, None])
def test_19_an_input_rewritten_at_equal_size_is_never_mixed_in(corpus, tmp_path, call):
    """After the tokenizer, in the midst of shards, and when all is done."""
    own = tmp_path / "part.jsonl"
    shutil.copy(corpus, own)

    def doomed() -> None:
        die_before(call or 0)
        prepare(**arguments(own, tmp_path / "out"))

    assert killed(doomed) == (call is not None)
    before = contents(tmp_path / "out")
    rewritten(own)
    with pytest.raises(InputError, match=r"begun with other arguments: inputs was .*part\.jsonl"):
        prepare(**arguments(own, tmp_path / "out"))
    assert contents(tmp_path / "out") == before


def test_19_what_is_done_must_be_whole_to_go_on_from(corpus, tmp_path):
    """One flipped byte in a finished shard or in the journal of an unfinished folder."""

    def doomed() -> None:
        die_before(40)
        prepare(**arguments(corpus, tmp_path / "out"))

    assert killed(doomed)
    assert (tmp_path / "out" / "train" / "tokens-00000.bin").exists()
    for name in ("train/tokens-00000.bin", "train/docs-00000.parquet", "progress.json", "tokenizer.json"):
        path = tmp_path / "out" / name
        data = path.read_bytes()
        path.write_bytes(data[:70] + bytes([data[70] ^ 1]) + data[71:])
        with pytest.raises(AdaPonderError, match=re.escape(name)):
            prepare(**arguments(corpus, tmp_path / "out"))
        path.write_bytes(data)
    prepare(**arguments(corpus, tmp_path / "out"))


@pytest.mark.parametrize("call", [1, 2, 7, 10, 13, 30])
def test_19_a_full_disk_is_said_clearly_and_leaves_no_temporary_file(corpus, whole, tmp_path, monkeypatch, call):
    left = [call]
    real = os.fsync

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"could not be written: No space left on device; .* run the same command again"
    ):
        prepare(**arguments(corpus, tmp_path / "out"))
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".tmp")]
    assert_only_whole_files(tmp_path / "out", whole)
    prepare(**arguments(corpus, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(whole)


def test_19_an_impossible_folder_is_refused_at_once(corpus):
    with pytest.raises(InputError, match="--out"):
        prepare(**arguments(corpus, corpus / "out"))


def test_19_two_preparations_do_not_write_to_one_folder(corpus, tmp_path):
    def second(now) -> None:
        with pytest.raises(InputError, match="--out"):
            prepare(**arguments(corpus, tmp_path / "out"))

    prepare(**arguments(corpus, tmp_path / "out"), progress=second)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux lets one wait for another's children")
def test_19_kill_9_takes_the_workers_along_and_a_rerun_goes_on(corpus, whole, tmp_path, monkeypatch):
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


def test_19_an_interruption_while_train_prepares_ends_it_at_once(corpus, tmp_path, monkeypatch, capsys, ctrl_c):
    """Exit 130 after the batch at hand, nothing but whole files, and the same command goes on."""
    from adaponder.cli import main
    from adaponder.data import prepare as module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_CHUNK_DOCUMENTS", 5)
    command = ["adaponder", "train", "cpu/demo", "--out", str(tmp_path / "run")]
    settings = {"source": corpus, "tokenizer": "train-bpe:270", "validation": 0.3}
    monkeypatch.setattr("sys.argv", command + [f"--set=data.{name}={value}" for name, value in settings.items()])
    batches = []

    def interrupted(self, batch) -> None:
        batches.append(batch)
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(module.ShardWriter, "add", interrupted)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 130
    assert len(batches) == 2
    assert "interrupted; run the same command again" in capsys.readouterr().err
    assert not multiprocessing.active_children()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    (out,) = (tmp_path / "data").iterdir()
    again = {"inputs": [str(corpus)], "tokenizer": "train-bpe:270", "validation": 0.3}
    prepare(**again, out=out)
    prepare(**again, out=tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")
