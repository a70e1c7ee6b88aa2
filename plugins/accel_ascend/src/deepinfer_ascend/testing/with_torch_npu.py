"""What the real torch_npu says of this backend, without a device; run where ``standins`` made it.

``python -m deepinfer_ascend.testing.with_torch_npu CALLS MODEL [LATENT]`` prints one JSON object;
LATENT is a model of ``engines.write_latent_model``, for an environment that has flash_mla, too.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_ascend.testing.recording import USED_RESULTS, Call, replay
from deepinfer_ascend.testing.schemas import SCHEMAS

SOC_VERSION = 260


def pretend_950() -> str:
    """Let shape functions that ask for the chip hear of a 950; the version of torch_npu."""
    import torch_npu
    from torch_npu.npu import _backends
    from torch_npu.op_plugin.meta import _meta_registrations

    for module in (_backends, _meta_registrations, torch_npu.npu):
        module.get_soc_version = lambda: SOC_VERSION
    return str(torch_npu.__version__)


def changed_schemas() -> list[str]:
    """Ops whose signature is not the one that this package was written for."""
    real = {
        str(schema).partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("npu::")
    }
    return [schema for schema in SCHEMAS if schema not in real]


def meta_results(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Each call on tensors without numbers, beside the emulation: op, and what differs."""
    found = []
    for call in calls:
        if call["library"] != "npu":  # flash_mla has no shape functions
            continue
        try:
            ours, theirs = (_used(call, replay(call, device)) for device in ("cpu", "meta"))
        except Exception as error:
            found.append({"op": call["op"], "problem": f"{type(error).__name__}: {error}"})
            continue
        problem = "" if ours == theirs else f"the emulation gives {ours}, torch_npu {theirs}"
        found.append({"op": call["op"], "problem": problem})
    return found


def _used(call: Call, results: list[Tensor]) -> list[str]:
    used = USED_RESULTS.get(call["op"], range(len(results)))
    return [f"{results[at].dtype} {list(results[at].shape)}" for at in used]


NAMES = (
    "set_device", "Stream", "Event", "mem_get_info", "stream", "graph", "NPUGraph",
    "graph_pool_handle", "current_stream", "get_soc_version", "get_device_name", "device_count",
)  # fmt: skip
"""What ``runtime`` and ``probe`` ask ``torch.npu`` for."""


def missing_names() -> list[str]:
    """Names and arguments that the real torch_npu lacks."""
    import torch_npu
    from torch_npu.npu import graphs
    from torch_npu.npu.utils import get_cann_version

    missing = [name for name in NAMES if not hasattr(torch_npu.npu, name)]
    arguments = (
        (graphs.graph.__init__, {"npu_graph", "pool", "auto_dispatch_capture"}),
        (graphs.NPUGraph.update, {"cpu_update_input"}),
        (get_cann_version, {"module"}),
    )
    for function, names in arguments:
        lacking = names - set(inspect.signature(function).parameters)
        missing += [f"{function.__qualname__}({name})" for name in sorted(lacking)]
    op = "npu_fused_infer_attention_score_v2.default"
    handler: Any = graphs._NPU_GRAPH_OP_HANDLERS.get(op)
    updated = {each[2] for each in handler.UPDATE_SPECS[op]} if handler else set()
    return missing + sorted({"actual_seq_kvlen"} - updated)


def communication() -> list[str]:
    """Shapes of rows sent to experts elsewhere and of what comes back."""
    from deepinfer_ascend.parallel import ExpertGroup, combine, dispatch
    from deepinfer_ascend.testing.mistakes import on_meta

    group = ExpertGroup(name="experts", size=8, rank=1, num_experts=64, max_rows=16)
    ids, weights = on_meta(9, 4, dtype=torch.int32), on_meta(9, 4, dtype=torch.float32)
    sent = dispatch(on_meta(9, 128), ids, weights, group)
    out = combine(sent.rows, sent, ids, weights, group)
    return [f"{x.dtype} {list(x.shape)}" for x in (sent.counts, out)]


def tokens_of(model: str) -> dict[str, list[int]]:
    """What an engine answers whose calls go through torch_npu's own signatures."""
    from deepinfer_ascend.testing.engines import answers

    return answers(model)


def latent_tokens(model: str) -> dict[str, Any]:
    """What an engine answers whose sparse attention goes through flash_mla's own Python half."""
    from deepinfer_ascend.testing.engines import answers, latent_options
    from deepinfer_ascend.testing.flash_mla import put_under_the_real_one

    version = put_under_the_real_one()
    return {"version": version, "tokens": answers(model, **latent_options())}


def main(calls: str, model: str, latent: str = "") -> int:
    """Print everything."""
    version = pretend_950()
    from deepinfer_ascend.testing.emulation import install
    from deepinfer_ascend.testing.mistakes import caught, noticed_by_torch_npu

    changed = changed_schemas()
    install()
    report = {
        "torch_npu": version,
        "changed": changed,
        "calls": meta_results(json.loads(Path(calls).read_text())),
        "missing": missing_names(),
        "communication": communication(),
        "caught": caught(),
        "noticed": noticed_by_torch_npu(),
        "tokens": tokens_of(model),
        "latent": latent_tokens(latent) if latent else None,
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
