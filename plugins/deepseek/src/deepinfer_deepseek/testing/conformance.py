"""What the conformance kit must know of this plugin's components to run the laws of their slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepinfer_core.testing.attention_world import AttentionWorld
from deepinfer_core.testing.checkpoint_files import write_safetensors
from deepinfer_core.testing.contracts.attention import AttentionContract
from deepinfer_core.testing.contracts.checkpoint import CheckpointContract
from deepinfer_core.testing.contracts.model import ModelContract
from deepinfer_core.testing.contracts.paged_model import PagedModelContract
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.engram import compressed_ids
from deepinfer_deepseek.testing.slow import SlowV41
from deepinfer_deepseek.testing.tiny import TINY_V4, tiny_config

_SMOOTH: Mapping[str, Any] = {"index_topk": 64, "n_routed_experts": 2, "num_experts_per_tok": 2}
"""Nothing is left out by a choice, so that rounding changes results little."""


class _Contract(PagedModelContract):
    attention = "latent"

    @staticmethod
    def weight(name: str, shape: Sequence[int]) -> Tensor:
        """See ``ModelContract.weight``; tables of experts hold numbers, and mixing is mild."""
        if name.endswith(".tid2eid"):
            rows, chosen = shape
            ids = torch.arange(rows).unsqueeze(1) + torch.arange(chosen)
            return ids % int(_SMOOTH["n_routed_experts"])
        found = ModelContract.weight(name, shape)
        return 0.3 * found if name.endswith("_scale") else found


class V41Contract(_Contract):
    """Laws of ``deepseek-v41``."""

    model_config: ClassVar[Mapping[str, Any]] = tiny_config(
        **_SMOOTH,
        num_hidden_layers=5,
        compress_ratios=[0, 2, 2, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3,
        candidate_topk_blocks=64,
        engram_layer_ids=[1],
    )

    def expected_logits(
        self, weights: Mapping[str, Tensor], token_ids: Sequence[int]
    ) -> Tensor | None:
        """See ``ModelContract.expected_logits``: by the slow model."""
        config = self.model_config
        ids = compressed_ids(Tokenizer(byte_level_tokenizer()), config["vocab_size"]).tolist()
        named = {name: weight.numpy() for name, weight in weights.items()}
        return torch.from_numpy(SlowV41(config, named, ids).logits(token_ids))


class V4Contract(_Contract):
    """Laws of ``deepseek-v4``."""

    model_config: ClassVar[Mapping[str, Any]] = {**TINY_V4, **_SMOOTH}


class V3Contract(ModelContract):
    """Laws of ``deepseek-v3``."""

    model_config: ClassVar[Mapping[str, Any]] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 10,
        "v_head_dim": 14,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
    }


class FilesContract(CheckpointContract):
    """Laws of checkpoint reader ``deepseek``."""

    def write(
        self, directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> Path:
        """See ``CheckpointContract.write``; names of V3 are those of other models."""
        return write_safetensors(directory, tensors, {**config, "model_type": "deepseek_v3"})


class LatentContract(AttentionContract):
    """Laws of attention ``latent``: one key for all heads that is its value too, and a window."""

    shapes = ((6, 1, 16, 0), (3, 1, 8, 0), (4, 1, 24, 0), (9, 1, 64, 0))
    widest: ClassVar[int] = 96

    def world(self, *, window: int = 0, **options: Any) -> AttentionWorld:
        """See ``AttentionContract.world``; where no window is asked for, there is a wide one."""
        return super().world(window=window or self.widest, **options)
