"""vLLM's LLM: its arguments (those of EngineArgs), and those of its calls. Names as of vLLM 0.32, and older ones that
scripts still have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.compatibility.rules import NoEffect, Refused, Rules

# arguments of our own LLM that vLLM has too; a test holds this to its signature
OWN = {
    "model": "a directory, a hub id, or a .gguf file; without it, the embedded model",
    "tokenizer": "a directory or a hub id with a tokenizer.json",
    "skip_tokenizer_init": "prompts and answers are token ids alone",
    "dtype": "auto is float32 on a CPU",
    "seed": "of requests that have none; without it, theirs are fresh and reported",
    "max_model_len": "",
    "max_num_seqs": "by default 256 on a GPU, 16 on a CPU",
    "max_num_batched_tokens": "by default 8192 on a GPU, 512 on a CPU",
    "gpu_memory_utilization": "0.9 by default",
    "enable_prefix_caching": "",
    "enforce_eager": "",
    "quantization": "fp8 or int4: dense matrices are rounded at load, on a GPU; else checked against the checkpoint",
    "kv_cache_dtype": "auto: as the model, float16 for GGUF files on a CPU; fp8 on GPUs; float16, float32 on CPUs",
    "tensor_parallel_size": "processes that share every layer, over NCCL or gloo; see parallel.md",
    "pipeline_parallel_size": "stages with some of the layers each; see parallel.md",
    "speculative_config": "docs/doctor.md; with adaptive, as many tokens as are worth it",
    "chat_template": "text, or a file that holds it",
    "generation_config": "auto, vllm, or a directory",
    "override_generation_config": "",
}


def _is_xgrammar(config: Any) -> bool:
    """Whether structured_outputs_config asks for nothing but what is so in any case."""
    backends = {"backend": ("auto", "xgrammar"), "disable_fallback": (False, True)}
    switches = ("disable_any_whitespace", "enable_in_reasoning", "reasoning_parser", "reasoning_parser_plugin")
    taken = {**backends, **dict.fromkeys(switches, (False, "")), "disable_additional_properties": (False, True)}
    return isinstance(config, Mapping) and all(value in taken.get(name, ()) for name, value in config.items())


_ONE_DEVICE = "an engine is one group of ranks on one machine: see docs/parallel.md, or start several"
_NO_LORA = "LoRA adapters are not supported: merge the adapter into the weights"
_NO_CODE = "no code but Outrider's own is ever run: leave it out; what can be loaded, `outrider matrix` says"
_TEXT_ONLY = "models answer in text: use another engine for embeddings and scores"
_AS_IT_IS = "a checkpoint is read as its own config.json says: change it there, or leave this out"
_SAME_TOKENS = "it would change what the target says: leave it out"
_ON_DEVICE = "weights and cache stay on the device: lower max_model_len or max_num_seqs, or use quantised weights"
_OWN_PIXELS = "images are prepared as the checkpoint's own processor says"

LLM = Rules(
    works={
        "revision": "of a hub id",
        "tokenizer_revision": "of a hub id",
        "download_dir": "",
        "hf_token": "",
        "kv_cache_memory_bytes": "called kv_cache_memory here",
        "block_size": "called page_size here",
        "spec_method": "speculative_config's method",
        "spec_model": "speculative_config's model",
        "spec_tokens": "speculative_config's num_speculative_tokens",
        "max_logprobs": "100 is the most in any case",
    },
    renamed={"kv_cache_memory_bytes": "kv_cache_memory", "block_size": "page_size"},
    no_effect=[
        NoEffect(["trust_remote_code"], "no code of a model's directory is ever run, trusted or not"),
        NoEffect(
            [
                *("compilation_config", "attention_config", "attention_backend", "kernel_config", "mamba_config"),
                *("moe_backend", "linear_backend", "sparse_indexer_topk_backend", "mamba_backend", "ir_op_priority"),
                *("gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend", "mamba_ssu_algorithm"),
                *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "max_seq_len_to_capture"),
                *("enable_flashinfer_autotune", "optimization_level", "performance_mode", "use_fp64_gumbel"),
                *("disable_cascade_attn", "kv_sharing_fast_prefill", "swa_bounded_replay", "use_v2_block_manager"),
                *("cudagraph_metrics", "jit_monitor_mode", "jit_monitor_verbose", "all2all_backend"),
            ],
            "kernels and recordings are Outrider's own, and chosen by itself",
        ),
        NoEffect(
            [
                *("enable_chunked_prefill", "async_scheduling", "stream_interval", "num_scheduler_steps"),
                *("max_num_scheduled_tokens", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
                *("max_num_partial_prefills", "max_long_partial_prefills", "max_num_active_seqs"),
                *("scheduler_reserve_full_isl", "prefill_schedule_interval", "watermark", "disable_chunked_mm_input"),
                *("max_num_queued_reqs", "max_num_queued_tokens", "enable_shm_tensor_arena"),
                *("disable_hybrid_kv_cache_manager", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
                *("prefix_match_unit", "mamba_block_size", "mamba_cache_mode", "replayssm_buffer_len"),
                *("use_replayssm", "enable_mamba_shared_prefix_checkpoint", "swap_space", "preemption_mode"),
                *("disable_async_output_proc", "enable_batch_sharded_sampling", "shutdown_timeout"),
            ],
            "one scheduler: prompts in chunks, beside everything else; tokens do not depend on it",
        ),
        NoEffect(
            [
                *("disable_log_stats", "disable_log_requests", "enable_log_requests", "aggregate_engine_logging"),
                *("served_model_name", "show_hidden_metrics_for_version", "otlp_traces_endpoint", "log_level"),
                *("collect_detailed_traces", "per_request_spec_decode_metrics", "kv_cache_metrics", "logging_config"),
                *("kv_cache_metrics_sample", "custom_histogram_buckets", "enable_layerwise_nvtx_tracing"),
                *("enable_mfu_metrics", "enable_logging_iteration_details", "enable_mm_processor_stats"),
                *("log_config_file", "profiler_config", "ray_workers_use_nsight", "use_tqdm_on_load"),
                *("fail_on_environ_validation", "enable_trace_replay", "additional_config"),
            ],
            "offline nothing is logged; get_metrics() and RequestOutput.metrics always have figures",
        ),
        NoEffect(
            [
                *("safetensors_load_strategy", "safetensors_prefetch_num_threads", "pt_load_map_location"),
                *("safetensors_prefetch_block_size", "max_parallel_loading_workers", "ignore_patterns"),
                *("allow_deprecated_quantization", "renderer_num_workers", "enable_cumem_allocator"),
            ],
            "weights are mapped and read once, safetensors and GGUF only",
        ),
        NoEffect(
            [
                *("limit_mm_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "skip_mm_profiling"),
                *("mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_attn_backend"),
                *("mm_tensor_ipc", "mm_processor_device", "mm_ipc_gpu_memory_gb", "mm_device_do_normalize"),
                *("disable_mm_preprocessor_cache", "language_model_only", "ec_manager_config", "mm_encoder_tp_mode"),
                "interleave_mm_strings",
            ],
            "the vision tower is loaded with the first image; the context is the only limit",
        ),
        NoEffect(
            [
                *("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_extra_vocab_size"),
                *("max_lora_cls_labels", "lora_target_modules", "specialize_active_lora"),
            ],
            "they say how adapters would be held, and there are none",
        ),
        NoEffect(
            [
                *("master_addr", "master_port", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
                *("data_parallel_backend", "data_parallel_address", "data_parallel_rpc_port", "dcp_comm_backend"),
                *("dcp_q_replicate", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"),
                *("disable_custom_all_reduce", "disable_nccl_for_dp_synchronization", "dp_sync_interval"),
                *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "ubatch_size", "eplb_config"),
                *("elastic_ep_max_dp_size", "expert_placement_strategy", "enable_ep_weight_filter", "enable_hc_sp"),
                *("numa_bind_nodes", "numa_bind_cpus", "enable_nccl_comm_suspend", "_api_process_count"),
                *("_api_process_rank", "offload_backend", "offload_num_in_group", "offload_prefetch_step"),
                *("offload_params", "cpu_offload_params", "kv_offloading_backend", "mamba_cache_philox_rounds"),
                *("sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "video_pruning_method"),
                *("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
            ],
            "they refine what is refused itself",
        ),
    ],
    refused=[
        Refused(
            {
                "data_parallel_size": (1,),
                **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size", "nnodes"), (1,)),
                **dict.fromkeys(("node_rank", "data_parallel_rank", "data_parallel_start_rank"), (0,)),
                **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_elastic_ep"), (False,)),
                **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb", "numa_bind"), (False,)),
                "data_parallel_multi_port_external_lb": (False,),
                "data_parallel_size_local": (1,),
                "distributed_executor_backend": ("uni", "mp"),
                "device_ids": (),
                "fault_tolerance_config": (),
                "enable_fault_tolerance": (False,),
            },
            _ONE_DEVICE,
        ),
        Refused(
            {
                **dict.fromkeys(("enable_lora", "fully_sharded_loras", "enable_tower_connector_lora"), (False,)),
                **dict.fromkeys(("enable_mixed_moe_lora_format", "enable_moe_shared_loras"), (False,)),
                "default_mm_loras": (),
            },
            _NO_LORA,
        ),
        Refused(
            {
                "code_revision": (),
                "model_impl": ("auto", "vllm"),
                "worker_cls": ("auto",),
                **dict.fromkeys(("worker_extension_cls", "scheduler_cls", "model_class_overrides"), ()),
                **dict.fromkeys(("io_processor_plugin", "logits_processors", "reasoning_parser_plugin"), ()),
            },
            _NO_CODE,
        ),
        Refused(
            {
                "runner": ("auto", "generate"),
                "convert": ("auto", "none"),
                "task": ("auto", "generate"),
                "pooler_config": (),
                "override_pooler_config": (),
                "mm_encoder_only": (False,),
            },
            _TEXT_ONLY,
        ),
        Refused(
            {
                "load_format": ("auto", "safetensors", "hf", "gguf"),
                "config_format": ("auto", "hf"),
                "tokenizer_mode": ("auto", "hf", "fast"),
                **dict.fromkeys(("model_weights", "hf_config_path", "hf_overrides", "quantization_config"), ()),
                **dict.fromkeys(("model_loader_extra_config", "rope_scaling", "rope_theta"), ()),
                "disable_sliding_window": (False,),
            },
            _AS_IT_IS,
        ),
        Refused(
            {
                "mamba_cache_dtype": ("auto",),
                "mamba_ssm_cache_dtype": ("auto",),
                "enable_mamba_cache_stochastic_rounding": (False,),
                "mm_encoder_attn_dtype": (),
                "mm_encoder_fp8_scale_path": (),
                "video_pruning_rate": (0,),
                **dict.fromkeys(("kv_cache_dtype_skip_layers", "watermark_config", "diffusion_config"), ()),
                "engram_config": (),
            },
            _SAME_TOKENS,
        ),
        Refused({"cpu_offload_gb": (0,), "kv_offloading_size": (0,), "offload_group_size": (0,)}, _ON_DEVICE),
        Refused(
            {
                **dict.fromkeys(("kv_transfer_config", "kv_events_config", "ec_transfer_config"), ()),
                **dict.fromkeys(("weight_transfer_config", "aux_output_config"), ()),
                "enable_sleep_mode": (False,),
            },
            "an engine keeps its weights and its cache to itself: close() frees them",
        ),
        Refused(
            {
                "enable_return_routed_experts": (False,),
                "return_sampling_mask": (False,),
                "enable_prompt_embeds": (False,),
                "enable_mm_embeds": (False,),
                "tokens_only": (False,),
            },
            "prompts are text, tokens and images, and outputs are what RequestOutput holds",
        ),
        Refused({"logprobs_mode": ("raw_logprobs",)}, "log-probabilities are the target's own, before any option"),
        Refused({"scheduling_policy": ("fcfs",)}, "requests are served in the order in which they come"),
        Refused({"num_gpu_blocks_override": ()}, "say how large the cache is instead: kv_cache_memory_bytes"),
        Refused({"mm_processor_kwargs": (), "media_io_kwargs": ()}, _OWN_PIXELS),
        Refused(
            {"allowed_local_media_path": (), "allowed_media_domains": ()}, "nothing is fetched: give images as objects"
        ),
        Refused(
            {"reasoning_parser": (), "reasoning_config": ()},
            "offline, an answer is one text: use Guided(after=...) to bind what follows the reasoning",
        ),
        Refused(
            {"structured_outputs_config": _is_xgrammar, "guided_decoding_backend": ("auto", "xgrammar")},
            "grammars are matched by xgrammar",
        ),
    ],
)

SPECULATIVE = Rules(
    works={},
    no_effect=[
        NoEffect(
            [
                *("enforce_eager", "disable_padded_drafter_batch", "use_local_argmax_reduction", "draft_load_config"),
                *("moe_backend", "attention_backend", "max_model_len", "disable_eagle_block_drop"),
                *("index_share_for_mtp_iteration", "disable_logprobs", "disable_log_stats"),
                *("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"),
            ],
            "the drafter runs in the target's rounds, in the form in which its checkpoint is",
        ),
        NoEffect(["draft_sample_method"], "a drafter draws with the target's own noise"),
        NoEffect(
            ["enable_adaptive_verification", "num_speculative_tokens_per_batch_size", "disable_by_batch_size"],
            "with adaptive, the default, as many tokens are drafted and verified as are worth it",
        ),
    ],
    refused=[
        Refused({"tensor_parallel_size": (1,)}, "it is called draft_tensor_parallel_size"),
        Refused({"rejection_sample_method": ("standard",)}, "a draft token stands where it is the target's own choice"),
        Refused({"revision": (), "code_revision": ()}, "give the directory of that revision as model"),
        Refused({"use_heterogeneous_vocab": (False,)}, "target and draft model must have one vocabulary"),
        Refused({"spec_token_tree": (), "speculative_token_tree": ()}, "drafts are chains, not trees"),
        Refused({"dspark_draft_topk": ()}, "the checkpoint says how DSpark drafts"),
    ],
)

CALLS = Rules(
    works={"tokenization_kwargs": "add_special_tokens alone"},
    no_effect=[
        NoEffect(["trace_headers", "session_id", "kv_hints"], "nothing is traced, and prefixes are found anyway")
    ],
    refused=[
        Refused({"lora_request": ()}, _NO_LORA),
        Refused({"prompt_adapter_request": ()}, "there are no prompt adapters"),
        Refused({"priority": lambda given: not any(_as_list(given))}, "requests are served in the order they come"),
        Refused({"mm_processor_kwargs": ()}, _OWN_PIXELS),
        Refused(
            {"chat_template_content_format": ("auto",)}, "a template gets lists or text, whichever it is written for"
        ),
        Refused({"prompt_text": ()}, "give it with the tokens: TokensPrompt(prompt=..., prompt_token_ids=...)"),
        Refused({"guided_options_request": ()}, "use SamplingParams(structured_outputs=...)"),
        Refused({"data_parallel_rank": (0,)}, _ONE_DEVICE),
        Refused(
            {"reasoning_ended": (False,), "reasoning_parser_kwargs": ()}, "an answer is one text: use Guided(after=...)"
        ),
    ],
)

# keys of a prompt that is a dict
PROMPT = Rules(
    works={
        "prompt": "text",
        "prompt_token_ids": "",
        "multi_modal_data": "image alone",
        "cache_salt": "pages and drafts are shared with requests of the same salt alone",
        "add_special_tokens": "Outrider's own: of a text",
    },
    no_effect=[NoEffect(["multi_modal_uuids"], "an image is known by what it shows")],
    refused=[
        Refused({"prompt_embeds": (), "token_type_ids": (), "prompt_token_offsets": ()}, "prompts are text or tokens"),
        Refused({"mm_processor_kwargs": (), "media_io_kwargs": ()}, _OWN_PIXELS),
        Refused({"encoder_prompt": (), "decoder_prompt": ()}, "targets are decoders: there is one prompt"),
    ],
)

# of vLLM's LLM, methods that ours does not have
METHODS = {
    "beam_search": "there is no beam search: use n with a temperature",
    **dict.fromkeys(("encode", "embed", "classify", "reward"), _TEXT_ONLY),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), "close() frees the device; make a new LLM later"),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "use stream(), threads, or AsyncLLM"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "there are no workers: the target is llm.target"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use torch's profiler around generate()"),
}


def method_named(name: str) -> str:
    """A drafting method by our name. vLLM has one for each family's MTP modules, and one for a GPU's n-grams."""
    return "mtp" if name.endswith("_mtp") else {"ngram_gpu": "ngram"}.get(name, name)


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
