"""The keys of verl 0.9.1 and their defaults: facts about another system's configuration, read from its public YAML files.

In: nothing. Out: `leaves()`: dotted key -> default, `...` where verl lets it follow another key. One paragraph per group of keys: the
sections that have it, then `key=default` in JSON, `~` for a default that follows. `_target_` keys, which name Python classes of
verl's and which nobody sets, are left out on purpose, as are the leaves of the torchtitan and veomni engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

VERSION = "0.9.1"


@cache
def leaves(*, megatron: bool = True) -> dict[str, Any]:
    """Key -> default of `verl.trainer.main_ppo`; `megatron` adds those of `model_engine=megatron`.

    >>> leaves()["trainer.total_epochs"], leaves()["actor_rollout_ref.ref.strategy"]
    (30, Ellipsis)
    """
    return dict(_read(_PPO)) | (dict(_read(_MEGATRON)) if megatron else {})


def _read(text: str) -> Iterator[tuple[str, Any]]:
    sections: list[str] = []
    for line in text.strip().splitlines():
        if not line.startswith(" "):
            sections = line.rstrip(":").split()
            continue
        for word in line.split():
            name, _, default = word.partition("=")
            value = ... if default == "~" else json.loads(default)
            yield from ((f"{section}.{name}", value) for section in sections)


_PPO = """
actor_rollout_ref.actor.optim:
  optimizer="AdamW" optimizer_impl="torch.optim" lr=1e-06 lr_warmup_steps_ratio=0.0 total_training_steps=-1 weight_decay=0.01
  lr_warmup_steps=-1 betas=[0.9,0.999] clip_grad=1.0 min_lr_ratio=0.0 num_cycles=0.5 lr_scheduler_type="constant" zero_indexed_step=true
  warmup_style=null override_optimizer_config=null
actor_rollout_ref.actor.fsdp_config.wrap_policy actor_rollout_ref.ref.fsdp_config.wrap_policy critic.fsdp.wrap_policy:
  min_num_params=0
actor_rollout_ref.actor.fsdp_config:
  param_offload=false optimizer_offload=false offload_policy=false reshard_after_forward=true fsdp_size=-1 forward_prefetch=false
  model_dtype="fp32" use_orig_params=false seed=42 full_determinism=false ulysses_sequence_parallel_size=1
  entropy_from_logits_with_chunking=~ entropy_from_logits_chunk_size=~ use_torch_compile=true entropy_checkpointing=~
  use_no_sync_for_gradient_accumulation=false pad_to_length=~ pad_to_length_bucket=1024 forward_only=false strategy="fsdp"
  dtype="bfloat16"
actor_rollout_ref.actor.fsdp_config.qat actor_rollout_ref.actor.qat actor_rollout_ref.ref.fsdp_config.qat critic.fsdp.qat:
  enable=false mode="w4a16" group_size=16 ignore_patterns=["lm_head","embed_tokens","re:.*mlp.gate$"] activation_observer="static_minmax"
  quantization_config_path=null
actor_rollout_ref.actor.fsdp_config.turbo_config.distributed actor_rollout_ref.ref.fsdp_config.turbo_config.distributed:
  fully_shard_parallel_size=16 tensor_parallel_size=1 expert_parallel_size=1 expert_fully_shard_parallel_size=1 ulysses_parallel_size=1
critic.fsdp.turbo_config.distributed:
  fully_shard_parallel_size=16 tensor_parallel_size=1 expert_parallel_size=1 expert_fully_shard_parallel_size=1 ulysses_parallel_size=1
actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.fsdp_plan:
  param_dtype="bf16" reduce_dtype="fp32" output_dtype="bf16" fsdp_implementation="native" num_to_forward_prefetch=1
  num_to_backward_prefetch=1
actor_rollout_ref.ref.fsdp_config.turbo_config.distributed.fsdp_plan critic.fsdp.turbo_config.distributed.fsdp_plan:
  param_dtype="bf16" reduce_dtype="fp32" output_dtype="bf16" fsdp_implementation="native" num_to_forward_prefetch=1
  num_to_backward_prefetch=1
actor_rollout_ref.actor:
  rollout_n=~ strategy="fsdp" ppo_mini_batch_size=256 ppo_micro_batch_size=null ppo_micro_batch_size_per_gpu=null use_dynamic_bsz=false
  ppo_max_token_len_per_gpu=16384 clip_ratio=0.2 clip_ratio_low=0.2 clip_ratio_high=0.2 tau_pos=1.0 tau_neg=1.05 freeze_vision_tower=false
  clip_ratio_c=3.0 loss_agg_mode="token-mean" loss_scale_factor=null entropy_coeff=0 calculate_entropy=false
  calculate_sum_pi_squared=false use_kl_loss=false use_prefix_grouper=false use_torch_compile=true kl_loss_coef=0.001
  kl_loss_type="low_var_kl" ppo_epochs=1 shuffle=false data_loader_seed=42 use_fused_kernels=~ grad_clip=1.0
  ulysses_sequence_parallel_size=1 entropy_from_logits_with_chunking=false entropy_from_logits_chunk_size=2048 entropy_checkpointing=false
  pad_to_length=false use_remove_padding=~
actor_rollout_ref.actor.policy_loss:
  loss_mode="vanilla" clip_cov_ratio=0.0002 clip_cov_lb=1.0 clip_cov_ub=5.0 kl_cov_ratio=0.0002 ppo_kl_coef=0.1 dro_beta=null
actor_rollout_ref.actor.checkpoint:
  save_contents=["model","optimizer","extra"] load_contents=~ async_save=false strict=true
actor_rollout_ref.actor.profiler actor_rollout_ref.ref.profiler critic.profiler:
  tool=~ enable=false all_ranks=false ranks=[] save_path=~ relocate_results=~ finish_hook_cmd=~ finish_hook_all_ranks=~
  finish_hook_ranks=~
actor_rollout_ref.actor.profiler.tool_config.nsys actor_rollout_ref.ref.profiler.tool_config.nsys critic.profiler.tool_config.nsys:
  discrete=~
actor_rollout_ref.actor.profiler.tool_config.npu actor_rollout_ref.ref.profiler.tool_config.npu critic.profiler.tool_config.npu:
  contents=[] level="level0" analysis=true discrete=false
actor_rollout_ref.actor.profiler.tool_config.torch actor_rollout_ref.ref.profiler.tool_config.torch critic.profiler.tool_config.torch:
  contents=[] discrete=false
actor_rollout_ref.actor.profiler.tool_config.torch.schedule actor_rollout_ref.ref.profiler.tool_config.torch.schedule:
  skip_first=0 wait=0 warmup=0 active=0 repeat=0
critic.profiler.tool_config.torch.schedule:
  skip_first=0 wait=0 warmup=0 active=0 repeat=0
actor_rollout_ref.actor.profiler.tool_config.torch_memory actor_rollout_ref.ref.profiler.tool_config.torch_memory:
  trace_alloc_max_entries=~ stack_depth=~ memory_snapshot_num_steps=~
critic.profiler.tool_config.torch_memory:
  trace_alloc_max_entries=~ stack_depth=~ memory_snapshot_num_steps=~
actor_rollout_ref.actor.profiler.tool_config.precision_debugger actor_rollout_ref.ref.profiler.tool_config.precision_debugger:
  config_path=~ steps=null stages=~ strict=~
actor_rollout_ref.rollout.profiler.tool_config.precision_debugger critic.profiler.tool_config.precision_debugger:
  config_path=~ steps=null stages=~ strict=~
actor_rollout_ref.ref:
  rollout_n=~ strategy=~ use_torch_compile=~ log_prob_micro_batch_size=null log_prob_micro_batch_size_per_gpu=null
  log_prob_use_dynamic_bsz=~ log_prob_max_token_len_per_gpu=~ ulysses_sequence_parallel_size=~ entropy_from_logits_with_chunking=false
  entropy_from_logits_chunk_size=2048 entropy_checkpointing=false pad_to_length=~
actor_rollout_ref.ref.fsdp_config:
  param_offload=false optimizer_offload=false offload_policy=false reshard_after_forward=true fsdp_size=-1 forward_prefetch=false
  model_dtype="fp32" use_orig_params=false seed=42 full_determinism=false ulysses_sequence_parallel_size=1
  entropy_from_logits_with_chunking=~ entropy_from_logits_chunk_size=~ use_torch_compile=true entropy_checkpointing=~
  use_no_sync_for_gradient_accumulation=false pad_to_length=~ pad_to_length_bucket=~ forward_only=true strategy="fsdp" dtype="bfloat16"
actor_rollout_ref.rollout:
  name="???" mode="async" nnodes=0 n_gpus_per_node=~ temperature=1.0 top_k=-1 top_p=1 full_determinism=false seed=42 prompt_length=~
  response_length=~ dtype="bfloat16" gpu_memory_utilization=0.5 ignore_eos=false enforce_eager=false cudagraph_capture_sizes=null
  free_cache_engine=true tensor_model_parallel_size=2 data_parallel_size=1 expert_parallel_size=1 pipeline_model_parallel_size=1
  max_num_batched_tokens=8192 max_model_len=null max_num_seqs=256 enable_chunked_prefill=true enable_prefix_caching=true
  logprobs_mode="processed_logprobs" scheduling_policy="fcfs" load_format="dummy" layered_summon=false log_prob_micro_batch_size=null
  log_prob_micro_batch_size_per_gpu=null log_prob_use_dynamic_bsz=~ log_prob_max_token_len_per_gpu=~ disable_log_stats=true do_sample=true
  n=1 over_sample_rate=0 multi_stage_wake_up=false router_config_path=null calculate_log_probs=true skip_tokenizer_init=true
  enable_rollout_routing_replay=false moe_load_balance_metrics_interval=0 quantization=null quantization_config_file=null mtp=~ qat=~
actor_rollout_ref.rollout.engine_kwargs:
  vllm={} sglang={} trtllm={}
actor_rollout_ref.rollout.val_kwargs:
  top_k=-1 top_p=1.0 temperature=0 n=1 do_sample=false
actor_rollout_ref.rollout.multi_turn:
  enable=false max_assistant_turns=null tool_config_path=null function_tool_path=null max_user_turns=null max_parallel_calls=1
  max_tool_response_length=256 tool_response_truncate_side="middle" use_inference_chat_template=false
  tokenization_sanity_check_mode="strict" format="hermes" num_repeat_rollouts=null
actor_rollout_ref.rollout.agent:
  num_workers=8 default_agent_loop="single_turn_agent" agent_loop_config_path=null
actor_rollout_ref.rollout.agent.custom_async_server data.custom_cls custom_reward_function trainer.v1.sampler.custom_sampler:
  path=null name=null
actor_rollout_ref.rollout.checkpoint_engine:
  backend="naive" update_weights_bucket_megabytes=2048 engine_kwargs={} custom_backend_module=null
actor_rollout_ref.rollout.trace:
  project_name=~ experiment_name=~ backend=null token2text=false max_samples_per_step_per_worker=null
actor_rollout_ref.rollout.profiler:
  tool=~ enable=~ all_ranks=~ ranks=~ save_path=~ relocate_results=~ finish_hook_cmd=~ finish_hook_all_ranks=~ finish_hook_ranks=~
actor_rollout_ref.rollout.profiler.tool_config.npu:
  contents=~ level=~ analysis=~ discrete=~ profile_token_start=null profile_token_end=null
actor_rollout_ref.rollout.profiler.tool_config.torch:
  contents=~ discrete=~ profile_token_start=null profile_token_end=null
actor_rollout_ref.rollout.prometheus:
  enable=false port=9090 file="/tmp/ray/session_latest/metrics/prometheus/prometheus.yml" served_model_name=~
actor_rollout_ref.rollout.disaggregation reward.reward_model.rollout.disaggregation:
  enabled=false prefill_replicas=1 decode_replicas=1 decode_tensor_model_parallel_size=null transfer_backend="nixl" bootstrap_port=null
  ib_device=null
actor_rollout_ref.model critic.model:
  path="~/models/deepseek-llm-7b-chat" hf_config_path=null tokenizer_path=null use_shm=false trust_remote_code=false
  custom_chat_template=null external_lib=null override_config={} enable_gradient_checkpointing=true enable_activation_offload=false
  use_remove_padding=true lora_rank=0 lora_alpha=16 target_modules="all-linear" exclude_modules=null lora_adapter_path=null
  use_liger=false use_fused_kernels=false
actor_rollout_ref.model.fused_kernel_options critic.model.fused_kernel_options:
  impl_backend="torch"
actor_rollout_ref.model.tiled_mlp critic.model.tiled_mlp:
  enabled=false num_shards=4
actor_rollout_ref.model.mtp critic.model.mtp:
  enable=false enable_train=false enable_rollout=false detach_encoder=false mtp_loss_scaling_factor=0.1 speculative_algorithm="EAGLE"
  speculative_num_steps=3 speculative_eagle_topk=1 speculative_num_draft_tokens=4 method="mtp" num_speculative_tokens=1
actor_rollout_ref.model.lora critic.model.lora:
  type="lora" merge=false rank=0 alpha=32 dropout=0.0 target_modules=["linear_qkv","linear_proj","linear_fc1","linear_fc2"]
  exclude_modules=[] dropout_position="pre" lora_A_init_method="xavier" lora_B_init_method="zero" a2a_experimental=false dtype=null
  adapter_path=null freeze_vision_model=true freeze_vision_projection=true freeze_language_model=true
actor_rollout_ref:
  hybrid_engine=true nccl_timeout=600
data:
  tokenizer=null use_shm=false train_files="~/data/rlhf/gsm8k/train.parquet" val_files="~/data/rlhf/gsm8k/test.parquet"
  train_max_samples=-1 val_max_samples=-1 prompt_key="prompt" reward_fn_key="data_source" max_prompt_length=512 max_response_length=512
  train_batch_size=1024 gen_batch_size=null val_batch_size=null tool_config_path=~ function_tool_path=~ return_raw_input_ids=false
  return_raw_chat=true return_full_prompt=false shuffle=true seed=null dataloader_num_workers=8 image_patch_size=14
  validation_shuffle=false filter_overlong_prompts=false filter_overlong_prompts_workers=1 truncation="error" image_key="images"
  video_key="videos" audio_key="audios" trust_remote_code=false return_multi_modal_inputs=true apply_chat_template_kwargs={}
  mm_processor_kwargs={}
critic.optim:
  optimizer="AdamW" optimizer_impl="torch.optim" lr=1e-05 lr_warmup_steps_ratio=0.0 total_training_steps=-1 weight_decay=0.01
  lr_warmup_steps=-1 betas=[0.9,0.999] clip_grad=1.0 min_lr_ratio=0.0 num_cycles=0.5 lr_scheduler_type="constant" zero_indexed_step=true
  warmup_style=null override_optimizer_config=null
critic.fsdp:
  param_offload=false optimizer_offload=false offload_policy=false reshard_after_forward=true fsdp_size=-1 forward_prefetch=false
  model_dtype="fp32" use_orig_params=false seed=42 full_determinism=false ulysses_sequence_parallel_size=1
  entropy_from_logits_with_chunking=false entropy_from_logits_chunk_size=2048 use_torch_compile=true entropy_checkpointing=false
  use_no_sync_for_gradient_accumulation=false pad_to_length=false pad_to_length_bucket=1024 forward_only=false strategy="fsdp"
  dtype="bfloat16"
critic:
  rollout_n=~ strategy="fsdp" enable=null ppo_mini_batch_size=~ ppo_micro_batch_size=null ppo_micro_batch_size_per_gpu=~ use_dynamic_bsz=~
  ppo_max_token_len_per_gpu=32768 forward_max_token_len_per_gpu=~ ppo_epochs=~ shuffle=~ data_loader_seed=42 cliprange_value=0.5
  loss_agg_mode=~ loss_scale_factor=~ forward_micro_batch_size=~ forward_micro_batch_size_per_gpu=~ ulysses_sequence_parallel_size=1
  grad_clip=1.0
critic.checkpoint:
  save_contents=["model","optimizer","extra"] load_contents=~ async_save=false
reward_model:
  num_workers=null reward_manager=null enable=null enable_resource_pool=null n_gpus_per_node=null nnodes=null reward_loop_source=null
  reward_loop_module_path=null reward_loop_class_name=null
reward_model.model:
  path=null external_lib=null trust_remote_code=null
reward_model.rollout:
  name=null dtype=null gpu_memory_utilization=null enforce_eager=null cudagraph_capture_sizes=null free_cache_engine=null
  data_parallel_size=null expert_parallel_size=null tensor_model_parallel_size=null max_num_batched_tokens=null max_model_len=null
  max_num_seqs=null load_format=null engine_kwargs=null limit_images=null enable_chunked_prefill=null enable_prefix_caching=null
  disable_log_stats=null skip_tokenizer_init=null prompt_length=null response_length=null
sandbox_fusion:
  url=null max_concurrent=null memory_limit_mb=null
reward:
  num_workers=8
reward.custom_reward_function:
  path=null name="compute_score"
reward.reward_manager:
  source="register" name="naive"
reward.reward_manager.module:
  path=null name="custom_reward_manager"
reward.reward_model:
  enable=false enable_resource_pool=false n_gpus_per_node=8 nnodes=0 model_path=null
reward.reward_model.rollout:
  name="???" dtype="bfloat16" gpu_memory_utilization=0.5 enforce_eager=true cudagraph_capture_sizes=null free_cache_engine=true
  data_parallel_size=1 expert_parallel_size=1 tensor_model_parallel_size=2 pipeline_model_parallel_size=1 max_num_batched_tokens=8192
  max_model_len=null max_num_seqs=1024 load_format="auto" layered_summon=false scheduling_policy="fcfs" full_determinism=false seed=42
  multi_stage_wake_up=false engine_kwargs={} limit_images=null enable_chunked_prefill=true enable_prefix_caching=true
  disable_log_stats=true skip_tokenizer_init=false ignore_eos=false temperature=1.0 top_k=-1 top_p=1 do_sample=true n=1 prompt_length=2048
  response_length=2048 quantization=null quantization_config_file=null mtp=null
reward.sandbox_fusion:
  url=null max_concurrent=64 memory_limit_mb=1024
algorithm.rollout_correction:
  rollout_is=null rollout_is_threshold=2.0 rollout_rs=null rollout_rs_threshold=null bypass_mode=false loss_type="ppo_clip"
  rollout_is_batch_normalize=false
algorithm:
  gamma=1.0 lam=1.0 adv_estimator="gae" norm_adv_by_std_in_grpo=true use_kl_in_reward=false kl_penalty="kl" use_pf_ppo=false
algorithm.filter_groups:
  enable=false metric="reward" max_num_gen_batches=0 max_inflight_gen_batches=1
algorithm.kl_ctrl:
  type="fixed" kl_coef=0.001 horizon=10000 target_kl=0.1
algorithm.pf_ppo:
  reweight_method="pow" weight_pow=2.0
distillation:
  enabled=false n_gpus_per_node=8 nnodes=0 teacher_key="data_source"
distillation.distillation_loss:
  loss_mode="k3" topk=32 use_task_rewards=true distillation_loss_coef=1.0 loss_max_clamp=null log_prob_min_clamp=null
  use_policy_gradient=false policy_loss_mode="vanilla" clip_ratio=0.2 clip_ratio_low=0.2 clip_ratio_high=0.2
distillation.teacher_models.teacher_model:
  key=null model_path=null num_replicas=0
distillation.teacher_models.teacher_model.inference:
  name=~ dtype=~ gpu_memory_utilization=0.5 enforce_eager=true cudagraph_capture_sizes=null free_cache_engine=true data_parallel_size=1
  expert_parallel_size=1 tensor_model_parallel_size=2 max_num_batched_tokens=8192 max_model_len=null max_num_seqs=1024 load_format="auto"
  engine_kwargs={} limit_images=null enable_chunked_prefill=true enable_prefix_caching=true disable_log_stats=true
  skip_tokenizer_init=true prompt_length=~ response_length=~ temperature=~
transfer_queue:
  enable=false
transfer_queue.metrics:
  enabled=false port=0
transfer_queue.backend:
  storage_backend="SimpleStorage"
transfer_queue.backend.SimpleStorage:
  total_storage_size=100000 num_data_storage_units=8
transfer_queue.backend.MooncakeStore:
  auto_init=false metadata_server="localhost:50123" master_server_address="localhost:50124" local_hostname="localhost" protocol="tcp"
  global_segment_size=4294967296 local_buffer_size=1073741824 device_name=""
trainer:
  balance_batch=true total_epochs=30 total_training_steps=null project_name="verl_examples" experiment_name="gsm8k"
  logger=["console","wandb"] log_val_generations=0 rollout_data_dir=null validation_data_dir=null nnodes=1 n_gpus_per_node=8 save_freq=-1
  esi_redundant_time=0 resume_mode="auto" resume_from_path=null checkpoint_callback_class=null val_before_train=true val_only=false
  test_freq=-1 critic_warmup=0 default_hdfs_dir=null del_local_ckpt_after_load=false default_local_dir=~ max_actor_ckpt_to_keep=null
  max_critic_ckpt_to_keep=null ray_wait_register_center_timeout=300 device="cuda" use_v1=true
trainer.v1:
  trainer_mode="sync" sync={}
trainer.v1.colocate_async:
  num_warmup_batches=1
trainer.v1.separate_async:
  num_warmup_batches=1 parameter_sync_step=4
trainer.v1.separate_async.hybrid_rollout:
  enable_switch=false switch_threshold_ratio=0.4 adaptive_switch_threshold=true switch_threshold_step_up=0.05
  switch_threshold_step_down=0.03 switch_threshold_release_steps=2 switch_cost_window_size=3
trainer.v1.sampler:
  max_off_policy_threshold=8 max_off_policy_strategy="drop" sync_refill_failed_groups=false sampler_kwargs={}
global_profiler:
  tool=null steps=null profile_continuous_steps=false save_path="outputs/profile" relocate_results=false finish_hook_cmd=null
  finish_hook_all_ranks=false finish_hook_ranks=[]
global_profiler.global_tool_config.nsys:
  discrete=false
global_profiler.global_tool_config.nsys.controller_nsight_options:
  trace="cuda,nvtx,cublas,ucx" cuda-memory-usage="true" cuda-graph-trace="graph"
global_profiler.global_tool_config.nsys.worker_nsight_options:
  trace="cuda,nvtx,cublas,ucx" cuda-memory-usage="true" cuda-graph-trace="graph" capture-range="cudaProfilerApi" capture-range-end=null
  kill="none"
global_profiler.global_tool_config.torch_memory:
  trace_alloc_max_entries=100000 stack_depth=32 memory_snapshot_num_steps=1 context="all" stacks="all" kw_args={}
global_profiler.global_tool_config.precision_debugger:
  config_path=null steps=null stages=null strict=false
skip.rollout skip.rollout_tq skip.async_rollout:
  enable=false dump_dir="~/.verl/rollout_dump" steps=[] action="cache"
ray_kwargs.ray_init:
  num_cpus=null
ray_kwargs.ray_init.runtime_env:
  py_executable=null
ray_kwargs:
  timeline_json_file=null
"""

_MEGATRON = """
actor_rollout_ref.actor.optim critic.optim:
  lr_warmup_init=0.0 lr_decay_steps=null lr_decay_style="constant" min_lr=0.0 weight_decay_incr_style="constant"
  lr_wsd_decay_style="exponential" lr_wsd_decay_steps=null use_checkpoint_opt_param_scheduler=false use_precision_aware_optimizer=false
  main_grads_dtype="fp32" exp_avg_dtype="fp32" exp_avg_sq_dtype="fp32" use_layer_wise_distributed_optimizer=false muon_momentum=0.95
  muon_nesterov=false muon_split_qkv=true muon_scale_mode="spectral" muon_coefficient_type="quintic" muon_num_ns_steps=5
  muon_tp_mode="blockwise" muon_fp32_matmul_prec="medium" muon_extra_scale_factor=1.0 muon_scalar_optimizer="adam"
  muon_match_adamw_update_rms=false
actor_rollout_ref.actor.megatron:
  param_offload=false optimizer_offload=false tensor_model_parallel_size=1 expert_model_parallel_size=1 expert_tensor_parallel_size=null
  pipeline_model_parallel_size=1 virtual_pipeline_model_parallel_size=null context_parallel_size=1 sequence_parallel=true
  use_distributed_optimizer=true use_dist_checkpointing=false dist_checkpointing_path=null dynamic_context_parallel=false
  max_seqlen_per_dp_cp_rank=null dist_checkpointing_prefix="" dist_ckpt_optim_fully_reshardable=false
  distrib_optim_fully_reshardable_mem_efficient=false entropy_from_logits_with_chunking=~ entropy_from_logits_chunk_size=~ seed=42
  override_ddp_config={} override_mcore_model_config={} use_mbridge=true vanilla_mbridge=false use_remove_padding=true
  pad_bshd_to_minibatch_max=true pad_to_length=false pad_to_length_bucket=512 use_megatron_fsdp=false forward_only=false dtype="bfloat16"
actor_rollout_ref.actor.megatron.override_transformer_config critic.megatron.override_transformer_config:
  recompute_granularity=null recompute_modules=["core_attn"] recompute_method=null recompute_num_layers=null attention_backend="flash"
actor_rollout_ref.actor.megatron.router_replay actor_rollout_ref.ref.megatron.router_replay critic.megatron.router_replay:
  mode="disabled" record_file=null replay_file=null
actor_rollout_ref.actor.megatron.qat actor_rollout_ref.ref.megatron.qat critic.megatron.qat:
  enable=false mode="w4a16" group_size=16 ignore_patterns=["lm_head","*mlp.gate"] activation_observer=null quantization_config_path=null
actor_rollout_ref.actor.checkpoint critic.checkpoint:
  mbridge_config={}
actor_rollout_ref.ref.megatron:
  param_offload=~ optimizer_offload=false tensor_model_parallel_size=~ expert_model_parallel_size=~ expert_tensor_parallel_size=~
  pipeline_model_parallel_size=~ virtual_pipeline_model_parallel_size=~ context_parallel_size=~ sequence_parallel=true
  use_distributed_optimizer=true use_dist_checkpointing=false dist_checkpointing_path=null dynamic_context_parallel=~
  max_seqlen_per_dp_cp_rank=~ dist_checkpointing_prefix="" dist_ckpt_optim_fully_reshardable=false
  distrib_optim_fully_reshardable_mem_efficient=false entropy_from_logits_with_chunking=~ entropy_from_logits_chunk_size=~ seed=~
  override_ddp_config={} override_transformer_config=~ override_mcore_model_config={} use_mbridge=~ vanilla_mbridge=~ use_remove_padding=~
  pad_bshd_to_minibatch_max=true pad_to_length=~ pad_to_length_bucket=~ use_megatron_fsdp=false forward_only=true dtype="bfloat16"
critic.megatron:
  param_offload=false optimizer_offload=false tensor_model_parallel_size=1 expert_model_parallel_size=1 expert_tensor_parallel_size=null
  pipeline_model_parallel_size=1 virtual_pipeline_model_parallel_size=null context_parallel_size=1 sequence_parallel=true
  use_distributed_optimizer=true use_dist_checkpointing=false dist_checkpointing_path=null dynamic_context_parallel=false
  max_seqlen_per_dp_cp_rank=null dist_checkpointing_prefix="" dist_ckpt_optim_fully_reshardable=false
  distrib_optim_fully_reshardable_mem_efficient=false entropy_from_logits_with_chunking=false entropy_from_logits_chunk_size=2048 seed=42
  override_ddp_config={} override_mcore_model_config={} use_mbridge=true vanilla_mbridge=false use_remove_padding=true
  pad_bshd_to_minibatch_max=true pad_to_length=false pad_to_length_bucket=512 use_megatron_fsdp=false forward_only=false dtype="bfloat16"
critic:
  nccl_timeout=600
"""
