"""Signatures of the ops that ``calls`` uses, as torch_npu 2.13.0 registers them.

A test compares them with an installed torch_npu; where none is installed they stand in for it.
"""

from __future__ import annotations

TORCH_NPU = "2.13.0"

SCHEMAS: tuple[str, ...] = (
    (
        "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float "
        "epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float "
        "alpha=1.702, float limit=7., float bias=1., bool interleaved=True) -> Tensor"
    ),
    (
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? "
        'group_index=None, int? dst_type=None, str quant_mode="pertoken", float '
        "dst_type_max=0.) -> (Tensor, Tensor)"
    ),
    (
        'npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int '
        "dst_type=296, int block_size=32, int? scale_alg=0, float dst_type_max=0., float "
        "max_low_bound=0.) -> (Tensor, Tensor)"
    ),
    (
        "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, "
        "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? "
        "atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
        "Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? "
        "dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? "
        "dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? "
        "dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? "
        "quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int "
        "num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1., int "
        'pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", int '
        "sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int "
        "value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? "
        "query_dtype=None, int? key_dtype=None, int? value_dtype=None, int? "
        "query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
        "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? "
        "dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? "
        "dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)"
    ),
    'npu_gelu_mul(Tensor input, *, str approximate="none") -> Tensor',
    (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? "
        "scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? "
        "antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
        "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]? "
        "activation_quant_offset=None, int? split_item=0, int? group_type=None, int? "
        "group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? "
        "output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    (
        "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor "
        "assist_info_for_combine, Tensor ep_send_counts, Tensor expert_scales, str group_ep, "
        "int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? "
        "tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? "
        "shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? "
        "const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? "
        'const_expert_v=None, Tensor? performance_info=None, str group_tp="", int '
        "tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, "
        "int shared_expert_rank_num=0, int global_bs=0, int comm_quant_mode=0, str "
        'comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0) '
        "-> Tensor"
    ),
    (
        "npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep, int "
        "ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? scales=None, Tensor? "
        "x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, Tensor? "
        'performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, int '
        "expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int "
        'quant_mode=0, int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int '
        "zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, "
        "int? x_dtype=None, int? scales_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor)"
    ),
    (
        "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, "
        "Tensor, Tensor)"
    ),
    (
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? "
        "offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, int "
        "drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? "
        "x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? "
        "probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
    ),
    (
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? "
        "pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? "
        "group_sizes=None, Tensor? y_scale=None) -> Tensor"
    ),
    (
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> "
        "(Tensor, Tensor)"
    ),
    (
        'npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? '
        "rotate=None) -> Tensor"
    ),
    (
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) "
        "value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? "
        'compress_seq_offsets=None, Tensor? seq_lens=None, str? cache_mode="PA_NZ") -> ()'
    ),
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
)
"""Ops by name and signature."""
