"""Tests the kernel that runs all layers over one row: emulated on the CPU, thread by thread, and compiled by NVRTC."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.inference.bodies import FusedBody, Pools
from adaponder.ops.cuda import CompileError, compile_source, pack
from adaponder.ops.ledger_attention import LedgerRows
from adaponder.ops.row_linear import Linear
from adaponder.ops.row_pass import SOURCE, RowPass, constants_for, options_for
from support import stock

TESTS = Path(__file__).parents[2]
ROWS, SLOTS = 80, 300
NEOX = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
LLAMA = NEOX | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
DECODERS = {
    "neox": ("gpt_neox", NEOX),
    "neox-serial": ("gpt_neox", NEOX | {"use_parallel_residual": False}),
    "llama": ("llama", LLAMA),
    "llama-biased": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", LLAMA),
    "qwen2-mixed": ("qwen2-mixed", LLAMA),
    "sandwich": ("hyperclovax", LLAMA | {"num_key_value_heads": 8, "attention_multiplier": 0.3}),  # Ouro's layers
}


GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
ALONE = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "attention_multiplier": 0.1}
REAL = {
    "70m": ("gpt_neox", {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}),
    "160m": ("gpt_neox", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}),
    "410m": ("gpt_neox", {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}),
    "llama-1b": ("llama", GROUPED | {"hidden_size": 2048, "intermediate_size": 8192}),
    "ouro": ("hyperclovax", ALONE | {"hidden_size": 2048, "intermediate_size": 5632}),
}


def body_of(name: str, dtype: torch.dtype, device: str = "cpu") -> FusedBody:
    family, sizes = DECODERS.get(name) or REAL[name]
    sizes = {"initializer_range": 0.02, "num_hidden_layers": 2} | sizes
    model = stock(family, **sizes)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # norms and biases that are not 1 and 0, and sums that matter
        scale = 0.3 if parameter.ndim == 1 else 0.05
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.data.add_(noise * scale)
        parameter.data.copy_(parameter.to(torch.bfloat16 if dtype == torch.float64 else dtype))
    nn.Module.to(model, torch.device(device), dtype)
    return FusedBody(Backbone(model), rows=1, independent=True, positions=SLOTS + 1)


@lru_cache
def emulator(options: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Compiles the kernel for the CPU."""
    library = folder / f"row_pass_{abs(hash(options))}.so"
    source = folder / "emulate.cpp"
    source.write_text(
        f'#include "{SOURCE}"\n'
        'extern "C" bool emulate(int blocks, int threads, long shared, unsigned seed, void** arguments) {\n'
        "    return emulation::launch(row_pass, blocks, threads, shared, seed, arguments);\n}\n"
    )
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-DEMULATED", f"-I{TESTS}"]
    subprocess.run([*command, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def emulated(body: FusedBody, folder: Path, num_blocks: int, seed: int) -> RowPass:
    constants = constants_for(body.decoder(), 3)  # room for as many tasks as 3 blocks have
    assert isinstance(constants, dict), constants
    library = emulator(tuple(options_for(constants)), folder)

    def launch(blocks: int, threads: int, arguments: Sequence[Tensor | int]) -> None:
        ended = library.emulate(blocks, threads, ctypes.c_long(int(constants["SHARED_BYTES"])), seed, pack(arguments))
        assert ended, "the threads wait for one another"

    return RowPass(body.decoder(), constants, num_blocks, launch)


def row_at(slot: int, seed: int) -> tuple[Tensor, LedgerRows]:
    """Returns (position, rows) of a row at a slot of lane 1, iteration 1, that sees 3 % of the earlier slots."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(1, ROWS, (2, 2, SLOTS), generator=generator).int()
    index[torch.rand(index.shape, generator=generator) < 0.97] = -1
    row = torch.tensor([0])
    index[1, 1, slot] = 0
    lane = iteration = torch.tensor([1])
    rows = LedgerRows(index, lane, torch.tensor([slot]), iteration, row, num_single=1)
    return torch.tensor([slot]), rows


def passed(body: FusedBody, run, slot: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Runs ``run`` over one row; returns hidden state, stream and the row's keys and values, in float64."""
    generator, like = torch.Generator().manual_seed(seed), body.norm.weight
    pools = Pools.empty(body.row_shapes(), ROWS, dtype, like.device)
    for pool in (*pools.keys, *pools.values):
        pool.copy_(torch.randn(pool.shape, generator=generator).to(torch.bfloat16))
        pool[0] = float("nan")
    position, rows = row_at(slot, seed)
    position, rows = position.to(like.device), LedgerRows(*(v.to(like.device) for v in rows[:5]), num_single=1)
    x = torch.randn(1, len(like), generator=generator).to(torch.bfloat16).to(like)
    with torch.no_grad():
        hidden, stream = run(x, position, rows, pools)
    written = [pool[0] for pool in (*pools.keys, *pools.values)]
    return [value.double() for value in (hidden, stream, *written)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", DECODERS)
def test_the_kernel_is_no_worse_than_the_layers_one_by_one(name, folder):
    bodies = {dtype: body_of(name, dtype) for dtype in (torch.bfloat16, torch.float64)}
    for seed, (slot, num_blocks) in enumerate(((0, 3), (SLOTS - 1, 9))):
        kernel = emulated(bodies[torch.bfloat16], folder, num_blocks, seed)
        true = passed(bodies[torch.float64], bodies[torch.float64].forward, slot, seed, torch.float64)
        plain = passed(bodies[torch.bfloat16], bodies[torch.bfloat16].forward, slot, seed, torch.bfloat16)
        ours = passed(bodies[torch.bfloat16], kernel, slot, seed, torch.bfloat16)
        assert_no_worse(ours, plain, true)
        assert kernel.counter.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["out", "gate", "down"])
def test_a_matrix_that_is_not_contiguous_is_refused(name):
    decoder = body_of("llama", torch.bfloat16).decoder()
    weight, bias = getattr(decoder.layers[1], name)
    columns = Linear(weight.t().contiguous().t(), bias)
    layers = [decoder.layers[0], decoder.layers[1]._replace(**{name: columns})]
    assert isinstance(constants_for(decoder, 132), dict)
    assert constants_for(decoder._replace(layers=layers), 132) == "weights that are not contiguous"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DECODERS, *REAL])
def test_on_a_gpu_the_kernel_is_no_worse_than_the_layers_one_by_one(name, monkeypatch):
    monkeypatch.setenv("ADAPONDER_UNPROVEN", "1")
    body, exact = body_of(name, torch.bfloat16, "cuda"), body_of(name, torch.float64, "cuda")
    kernel = body.row_pass
    assert isinstance(kernel, RowPass), kernel
    body.row_pass = "left out"
    for seed, slot in enumerate((0, 1, SLOTS - 1)):
        true = passed(exact, exact.forward, slot, seed, torch.float64)
        plain = passed(body, body.forward, slot, seed, torch.bfloat16)
        ours = passed(body, kernel, slot, seed, torch.bfloat16)
        assert_no_worse(ours, plain, true)
        again = passed(body, kernel, slot, seed, torch.bfloat16)
        assert all(torch.equal(mine, same) for mine, same in zip(ours, again, strict=True))


@pytest.mark.gpu
def test_the_kernel_is_captured_in_a_cuda_graph(monkeypatch):
    monkeypatch.setenv("ADAPONDER_UNPROVEN", "1")
    body = body_of("410m", torch.bfloat16, "cuda")
    assert isinstance(body.row_pass, RowPass)
    pools = Pools.empty(body.row_shapes(), ROWS, torch.bfloat16, torch.device("cuda"))
    position, rows = row_at(SLOTS - 1, 0)
    position, rows = position.cuda(), LedgerRows(*(values.cuda() for values in rows[:5]), num_single=1)
    x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
    body.forward(x, position, rows, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = body.forward(x, position, rows, pools)
    for _ in range(50):
        x.normal_()
        graph.replay()
        captured = [value.clone() for value in output]
        assert all(map(torch.equal, captured, body.forward(x, position, rows, pools)))


def assert_no_worse(ours: list[Tensor], plain: list[Tensor], true: list[Tensor]) -> None:
    for mine, theirs, exact in zip(ours, plain, true, strict=True):
        scale = exact.abs().max()
        error, allowed = (mine - exact).abs().max() / scale, (theirs - exact).abs().max() / scale
        assert error <= 1.2 * allowed + 0.001, (float(error), float(allowed))


def test_nvrtc_compiles_the_kernel(folder):
    constants = constants_for(body_of("neox", torch.bfloat16).decoder(), 132)
    assert isinstance(constants, dict)
    try:
        compile_source("", ["-arch=sm_90a"])
    except CompileError as error:
        pytest.skip(str(error))
    assert len(compile_source(SOURCE.read_text(), ["-arch=sm_90a", "-std=c++17", *options_for(constants)])) > 1000
