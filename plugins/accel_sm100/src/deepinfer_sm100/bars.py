"""Compile every kernel for SM100 and SM90 without a GPU, and hold what it needs against bars.

    python -m deepinfer_sm100.bars            # compare with the recorded bars
    python -m deepinfer_sm100.bars --record   # write them, after a change that is meant

Bars belong to one version of Triton. That a kernel compiles within the resources of a chip says
nothing of its results there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from attrs import frozen
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepinfer_sm100.kernels import attention, experts, gemm, hyper, latent, packing, rows, sampling

ARCHITECTURES = (90, 100)
RECORD = Path(__file__).with_name("bars.json")
SHARED_LIMIT, REGISTER_LIMIT, TENSOR_MEMORY_LIMIT = 232448, 65536, 512
SLACK = 8
"""Registers by which a kernel may grow unnoticed."""

_KINDS = {
    "b": "*bf16", "f": "*fp32", "d": "*fp64", "i": "*i32", "l": "*i64", "u": "*u8",
    "e": "*fp8e4nv", "I": "i32", "L": "i64", "F": "fp32",
}  # fmt: skip
_SIZES = {"inner", "width", "x_row", "weight_row", "k_row", "v_row", "q_row", "code_row"}
"""Integers that are multiples of 16 in models."""


@frozen(kw_only=True)
class Case:
    """One kernel as a model would compile it.

    Attributes:
        kernel: it.
        arguments: one letter of ``_KINDS`` for each argument that is no constant, in order.
        constants: the others.
        wants: instructions of which an architecture must show one.
        options: of compilation.
    """

    kernel: Any
    arguments: str
    constants: Mapping[str, Any]
    wants: Mapping[int, tuple[str, ...]] = {}
    options: Mapping[str, Any] = {}


_TENSOR_CORES = {90: ("HGMMA", "HMMA", "QGMMA"), 100: ("UTCHMMA", "UTCQMMA", "HMMA")}
_OWN_TENSOR_CORES = {90: ("HGMMA", "QGMMA"), 100: ("UTCHMMA", "UTCQMMA")}

CASES: Mapping[str, Case] = {
    "rms_norm": Case(
        kernel=rows.rms_norm_kernel, arguments="bbbbIIIFIII",
        constants={"HAS_DELTA": True, "ROWS": 1, "WIDTH": 4096},
    ),
    "rope": Case(
        kernel=rows.rope_kernel, arguments="bffbIIIIII",
        constants={"INTERLEAVED": False, "HEADS": 32, "HALF": 64, "REST": 0},
    ),
    "rope_interleaved": Case(
        kernel=rows.rope_kernel, arguments="bffbIIIIII",
        constants={"INTERLEAVED": True, "HEADS": 32, "HALF": 32, "REST": 128},
    ),
    "silu_mul": Case(
        kernel=rows.gate_mul_kernel, arguments="bbIII",
        constants={"GELU": False, "ROWS": 4, "WIDTH": 1024},
    ),
    "linear": Case(
        kernel=gemm.linear_kernel, arguments="bbbbIIII",
        constants={"HAS_BIAS": True, "ROWS": 64, "OUTER": 64, "INNER": 64},
        wants=_OWN_TENSOR_CORES,
    ),
    "linear_fp8": Case(
        kernel=gemm.packed_linear_kernel, arguments="beffbIIIIII",
        constants={
            "HAS_BIAS": False, "BITS": 8, "BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "ROWS": 64,
            "OUTER": 64, "INNER": 64,
        },
        wants=_OWN_TENSOR_CORES, options={"num_warps": 8},
    ),
    "linear_fp4": Case(
        kernel=gemm.packed_linear_kernel, arguments="buffbIIIIII",
        constants={
            "HAS_BIAS": False, "BITS": 4, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 32, "ROWS": 64,
            "OUTER": 64, "INNER": 64,
        },
        wants=_OWN_TENSOR_CORES, options={"num_warps": 8},
    ),
    "block_fp8": Case(
        kernel=gemm.block_fp8_kernel, arguments="efefbIII",
        constants={"BLOCK_ROWS": 128, "BLOCK": 128, "ROWS": 64, "OUTER": 64},
        wants=_OWN_TENSOR_CORES,
    ),
    "write_kv": Case(
        kernel=attention.write_kv_kernel, arguments="bblbbIIIIIIIII",
        constants={"ROWS": 8, "KEY": 128, "VALUE": 128},
    ),
    "attend": Case(
        kernel=attention.attend_kernel, arguments="bbbiiiifffIIIIFFI",
        constants={
            "CAPPED": False, "WINDOWED": False, "SPLIT": 1024, "BLOCK": 64, "TOKENS": 16,
            "GROUP": 4, "GROUP_PAD": 4, "KV_HEADS": 8, "KEY": 128, "KEY_PAD": 128, "VALUE": 128,
            "VALUE_PAD": 128, "PAGE": 64,
        },
        wants=_OWN_TENSOR_CORES,
    ),
    "combine": Case(
        kernel=attention.combine_kernel, arguments="fffifbI",
        constants={
            "HAS_SINKS": True, "SPLIT": 1024, "HEADS": 32, "ROWS": 32, "VALUE": 128,
            "VALUE_PAD": 128,
        },
    ),
    "draw": Case(
        kernel=sampling.draw_kernel, arguments="fdlddldlII", constants={"BLOCK": 2048},
        options={"num_warps": 8},
    ),
    "moe_gate": Case(
        kernel=experts.gate_kernel, arguments="bflIII",
        constants={"TOP": 8, "RENORMALISE": True, "ROWS": 4, "EXPERTS": 256},
    ),
    "moe_gate_up": Case(
        kernel=experts.gate_up_kernel, arguments="bbbiibIIIIFFF",
        constants={
            "HAS_BIAS": False, "CLAMPED": False, "TOP": 8, "ROWS": 16, "OUTER": 64, "INNER": 64,
            "EXPERTS": 256,
        },
        wants=_TENSOR_CORES,
    ),
    "moe_down": Case(
        kernel=experts.down_kernel, arguments="bbbiibIII",
        constants={"HAS_BIAS": False, "ROWS": 16, "OUTER": 64, "INNER": 64, "EXPERTS": 256},
        wants=_TENSOR_CORES,
    ),
    "moe_sum": Case(
        kernel=experts.sum_experts_kernel, arguments="bflbIII", constants={"TOP": 8, "BLOCK": 1024}
    ),
    "moe_place": Case(
        kernel=experts.place_kernel, arguments="liiI", constants={"BLOCK": 1024}
    ),
    "pack_fp8": Case(
        kernel=packing.pack_fp8_kernel, arguments="buuiIIIIF", constants={"BLOCK": 32},
        options={"num_warps": 1},
    ),
    "pack_fp4": Case(
        kernel=packing.pack_fp4_kernel, arguments="buuiIIIF",
        constants={"E4M3_SCALES": True, "BLOCK": 16}, options={"num_warps": 1},
    ),
    "sparse_latent": Case(
        kernel=latent.sparse_latent_kernel, arguments="buuifbfIIFII",
        constants={
            "BITS": 8, "BLOCK": 32, "HAS_SINKS": True, "HEADS": 16, "DIM": 512, "STEP": 32,
        },
        wants=_TENSOR_CORES, options={"num_warps": 8},
    ),
    "pool": Case(
        kernel=latent.pool_kernel, arguments="ffibII", constants={"RATIO": 2, "BLOCK": 512}
    ),
    "index_scores": Case(
        kernel=latent.index_scores_kernel, arguments="bfblfIII",
        constants={"HEADS": 64, "DIM": 128, "BLOCK": 64}, wants=_TENSOR_CORES,
    ),
    "top_entries": Case(
        kernel=latent.top_entries_kernel, arguments="flII", constants={"BLOCK": 2048}
    ),
    "mix": Case(
        kernel=hyper.mix_kernel, arguments="ffffffIF",
        constants={"ITERATIONS": 20, "COPIES": 4, "ROWS": 16},
    ),
    "collapse": Case(
        kernel=hyper.collapse_kernel, arguments="bfbI", constants={"COPIES": 4, "BLOCK": 1024}
    ),
    "spread": Case(
        kernel=hyper.spread_kernel, arguments="bbffbI", constants={"COPIES": 4, "BLOCK": 1024}
    ),
}  # fmt: skip
"""Kernels at the sizes of models that are served."""


@frozen(kw_only=True)
class Needs:
    """What a compiled kernel takes.

    Attributes:
        registers: of a thread.
        shared: bytes of shared memory.
        tensor_memory: columns.
        spills: loads and stores of registers that did not fit.
        products: kinds of instructions that multiply tiles.
    """

    registers: int
    shared: int
    tensor_memory: int
    spills: int
    products: tuple[str, ...]


def compiled(case: Case, architecture: int) -> tuple[Needs, int]:
    """Compile a kernel; return what it needs, and its threads."""
    names = case.kernel.arg_names
    free = [name for name in names if name not in case.constants]
    kinds = dict(zip(free, (_KINDS[letter] for letter in case.arguments), strict=True))
    signature = {name: kinds.get(name, "constexpr") for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name in _SIZES
    }
    source = ASTSource(case.kernel, signature, dict(case.constants), aligned)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(
        source, target=target, options={"enable_fp_fusion": False, **case.options}
    )
    usage, text = _inspected(made.asm["cubin"])
    registers = re.search(r"REG:(\d+)", usage)
    needs = Needs(
        registers=int(registers.group(1)) if registers else 0,
        shared=made.metadata.shared,
        tensor_memory=getattr(made.metadata, "tmem_size", 0) or 0,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", text)),
        products=tuple(
            kind
            for kind in ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "HMMA", "QMMA")
            if re.search(rf"\b{kind}\b", text)
        ),
    )
    return needs, 32 * made.metadata.num_warps


def _inspected(cubin: bytes) -> tuple[str, str]:
    """What Triton's own disassembler says of resources and instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        flags = ("--dump-resource-usage", "--dump-sass")
        return tuple(  # type: ignore[return-value]
            subprocess.run(
                [tool, flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in flags
        )


def problems(name: str, architecture: int, bar: Mapping[str, Any] | None) -> Iterator[str]:
    """What is wrong with a kernel on an architecture."""
    case = CASES[name]
    needs, threads = compiled(case, architecture)
    where = f"{name} on sm_{architecture}"
    if needs.spills:
        yield f"{where}: {needs.spills} spills"
    if needs.shared > SHARED_LIMIT:
        yield f"{where}: {needs.shared} bytes of shared memory, of {SHARED_LIMIT}"
    if needs.registers * threads > REGISTER_LIMIT:
        yield f"{where}: {needs.registers} registers for {threads} threads"
    if needs.tensor_memory > TENSOR_MEMORY_LIMIT:
        yield f"{where}: {needs.tensor_memory} columns of tensor memory"
    wanted = case.wants.get(architecture, ())
    if wanted and not set(wanted) & set(needs.products):
        yield f"{where}: multiplies by {needs.products or 'nothing'}, not {', '.join(wanted)}"
    if bar is not None:
        if needs.registers > bar["registers"] + SLACK:
            yield f"{where}: {needs.registers} registers, recorded were {bar['registers']}"
        if needs.shared > bar["shared"]:
            yield f"{where}: {needs.shared} bytes of shared memory, recorded were {bar['shared']}"


def recorded() -> Mapping[str, Mapping[str, Any]]:
    """Bars of the Triton at hand, by "kernel/architecture"; empty where none were recorded."""
    bars: Mapping[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found: Mapping[str, Mapping[str, Any]] = bars.get(triton.__version__, {})
    return found


def record() -> None:
    """Write the bars of the Triton at hand beside those of others."""
    bars = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    bars[triton.__version__] = {
        f"{name}/sm_{architecture}": {
            "registers": needs.registers,
            "shared": needs.shared,
            "tensor_memory": needs.tensor_memory,
            "products": list(needs.products),
        }
        for name, case in CASES.items()
        for architecture in ARCHITECTURES
        for needs, _ in [compiled(case, architecture)]
    }
    RECORD.write_text(json.dumps(bars, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Compare or record; the exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_sm100.bars")
    parser.add_argument("--record", action="store_true", help="write the bars")
    parser.add_argument("kernels", nargs="*", help="some kernels only")
    options = parser.parse_args(arguments)
    if options.record:
        record()
    found = 0
    bars = recorded()
    for name in options.kernels or CASES:
        for architecture in ARCHITECTURES:
            for problem in problems(name, architecture, bars.get(f"{name}/sm_{architecture}")):
                sys.stdout.write(f"{problem}\n")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
