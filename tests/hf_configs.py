"""Contents of config.json files: a small one, and some as they are published."""

SMALL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=300, hidden_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, hidden_act="silu", rms_norm_eps=1e-5,
    max_position_embeddings=8192, rope_theta=500000.0, bos_token_id=5,
)  # fmt: skip
# As they are published: with settings in the old places, and with what says nothing to us.
PUBLISHED = {
    "llama2-7b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=11008,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False, vocab_size=32000, pretraining_tp=1,
    ),
    "llama3.2-1b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
        head_dim=64, hidden_act="silu", hidden_size=2048, intermediate_size=8192, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_scaling=dict(
            factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256,
    ),
    "qwen2.5-0.5b": dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", attention_dropout=0.0, hidden_act="silu",
        hidden_size=896, intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24,
        num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0,
        sliding_window=32768, tie_word_embeddings=True, use_mrope=False, use_sliding_window=False, vocab_size=151936,
    ),
    "qwen3-8b": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu",
        hidden_size=4096, intermediate_size=12288, max_position_embeddings=40960, max_window_layers=36,
        num_attention_heads=32, num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0,
        decoder_sparse_step=1, head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144,
        max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
        norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        vocab_size=151936,
    ),
    "qwen3-235b-a22b": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1,
        head_dim=128, hidden_act="silu", hidden_size=4096, intermediate_size=12288, max_position_embeddings=40960,
        max_window_layers=94, mlp_only_layers=[], moe_intermediate_size=1536, norm_topk_prob=True,
        num_attention_heads=64, num_experts=128, num_experts_per_tok=8, num_hidden_layers=94, num_key_value_heads=4,
        rms_norm_eps=1e-6, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
    # google/gemma-3-27b-pt, a multimodal folder that leaves out what transformers has by default.
    "gemma-3-27b": dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", boi_token_index=255999,
        eoi_token_index=256000, eos_token_id=[1, 106], image_token_index=262144, initializer_range=0.02,
        mm_tokens_per_image=256, torch_dtype="bfloat16",
        text_config=dict(
            head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text", num_attention_heads=32,
            num_hidden_layers=62, num_key_value_heads=16, query_pre_attn_scalar=168,
            rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024,
        ),
        vision_config=dict(
            hidden_size=1152, image_size=896, intermediate_size=4304, model_type="siglip_vision_model",
            num_attention_heads=16, num_hidden_layers=27, patch_size=14, vision_use_head=False,
        ),
    ),
    # allenai/Olmo-3-1025-7B.
    "olmo-3-7b": dict(
        architectures=["Olmo3ForCausalLM"], model_type="olmo3", attention_bias=False, attention_dropout=0.0,
        hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65536,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-6,
        rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
            original_max_position_embeddings=8192, rope_type="yarn",
        ),
        rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
    ),
    "mistral-7b-v0.3": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", hidden_act="silu", hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False,
        vocab_size=32768,
    ),
    # Qwen/Qwen3.5-9B, a multimodal folder with a layer that predicts the token after the next.
    "qwen3.5-9b": dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", image_token_id=248056,
        text_config=dict(
            attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
            full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=4096, intermediate_size=12288,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, linear_conv_kernel_dim=4,
            linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
            mamba_ssm_dtype="float32", max_position_embeddings=262144, model_type="qwen3_5_text",
            mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, num_attention_heads=16, num_hidden_layers=32,
            num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False, vocab_size=248320,
            rope_parameters=dict(
                mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=10000000,
                rope_type="default",
            ),
        ),
        tie_word_embeddings=False, video_token_id=248057, vision_config=dict(depth=27, model_type="qwen3_5"),
    ),
    "qwen3.6-35b-a3b": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", image_token_id=248056,
        text_config=dict(
            attention_bias=False, attn_output_gate=True, full_attention_interval=4, head_dim=256, hidden_act="silu",
            hidden_size=2048, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
            model_type="qwen3_5_moe_text", moe_intermediate_size=512, num_attention_heads=16, num_experts=256,
            num_experts_per_tok=8, num_hidden_layers=40, num_key_value_heads=2, rms_norm_eps=1e-6,
            router_aux_loss_coef=0.001, shared_expert_intermediate_size=512, vocab_size=248320,
            rope_parameters=dict(partial_rotary_factor=0.25, rope_theta=10000000, rope_type="default"),
        ),
        tie_word_embeddings=False, vision_config=dict(depth=27, model_type="qwen3_5_moe"),
    ),
    # Qwen/Qwen3-Next-80B-A3B-Instruct, with the layer types left out and settings in the old places.
    "qwen3-next-80b-a3b": dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", attention_bias=False, attention_dropout=0.0,
        decoder_sparse_step=1, full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048,
        intermediate_size=5120, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144, mlp_only_layers=[],
        moe_intermediate_size=512, norm_topk_prob=True, num_attention_heads=16, num_experts=512,
        num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2, output_router_logits=False,
        partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=512, tie_word_embeddings=False, vocab_size=151936,
    ),
    # Without its quantization_config, which weights in bfloat16 do not have.
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880,
        initial_context_length=4096, initializer_range=0.02, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
        num_local_experts=32, output_router_logits=False, pad_token_id=199999, rms_norm_eps=1e-5,
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
        vocab_size=201088,
    ),
}  # fmt: skip
