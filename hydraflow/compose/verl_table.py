"""What becomes of verl's keys that are not ours: another name, accepted without effect, or not supported yet.

In: nothing. Out: four tables from patterns to rows. In a pattern `{a,b}` stands for either, `*` for one name,
`**` for any names. The target is verl 0.9.1; rows for names of older and newer versions say so by not
standing in `verl_defaults.py`. A key of ours needs no row. Left out on purpose: how rows are applied
(`verl.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """Another name of a key of ours."""

    new: str
    """Our name, with the same braces as the pattern."""
    why: str = ""
    """What to know besides; empty: nothing."""


@dataclass(frozen=True)
class Ignored:
    """Accepted, and nothing happens."""

    why: str


@dataclass(frozen=True)
class Unsupported:
    """Refused, unless it is set to verl's default or to another value that asks for nothing."""

    would: str
    """What it does in verl, as in "it would ..."."""
    harmless: tuple[object, ...] = ()
    """Values besides verl's default that ask for nothing."""
    instead: str = ""
    """Overrides of ours that come near it."""


OVER_ALL_RANKS = "rows over all data ranks, divided by their number"
"""What is said of a renamed key whose value must be divided."""
ROLES = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}"
TRAINED = "{actor_rollout_ref.actor,critic}"
MODELS = "{actor_rollout_ref.model,critic.model}"
ROLLOUT = "actor_rollout_ref.rollout"
PROFILED = (
    f"{{{ROLLOUT},actor_rollout_ref.actor,actor_rollout_ref.ref,critic,reward_model,actor_rollout_ref}}"
)
SEED = "trainer.seed governs all randomness here"
HEAD = "logits are always computed in chunks of fsdp_config.head_chunk_tokens here"

SECTIONS: dict[str, str] = {
    "critic.fsdp.": "critic.fsdp_config.",
    "critic.model.fsdp_config.": "critic.fsdp_config.",
    "critic.model.optim.": "critic.optim.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.rollout.": "reward.reward_model.rollout.",
    "reward_model.model.rollout.": "reward.reward_model.rollout.",
    "ray_kwargs.ray_init.": "ray_init.",
}
"""Section of verl's -> the section whose keys it holds."""

ALIASES: dict[str, Alias] = {
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.ulysses_sequence_parallel_size": Alias(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "{actor_rollout_ref.actor,critic}.grad_clip": Alias(
        "{actor_rollout_ref.actor,critic}.optim.clip_grad", "verl 0.9.1 accepts this name and ignores it"
    ),
    "{actor_rollout_ref.actor,critic}.checkpoint.contents": Alias(
        "{actor_rollout_ref.actor,critic}.checkpoint.save_contents"
    ),
    "{actor_rollout_ref.actor,critic}.optim.grad_clip": Alias(
        "{actor_rollout_ref.actor,critic}.optim.clip_grad"
    ),
    "{actor_rollout_ref.actor,critic}.optim.{warmup_style,lr_decay_style}": Alias(
        "{actor_rollout_ref.actor,critic}.optim.{lr_scheduler_type,lr_scheduler_type}"
    ),
    "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.rollout_n": Alias("actor_rollout_ref.rollout.n"),
    "actor_rollout_ref.ref.strategy": Alias(
        "actor_rollout_ref.actor.strategy", "the reference runs on the actor's engine"
    ),
    "actor_rollout_ref.{actor,ref}.fsdp_config.strategy": Alias("actor_rollout_ref.actor.strategy"),
    "critic.fsdp_config.strategy": Alias("critic.strategy"),
    "actor_rollout_ref.actor.use_remove_padding": Alias("actor_rollout_ref.model.use_remove_padding"),
    "actor_rollout_ref.rollout.{prompt_length,response_length}": Alias(
        "data.{max_prompt_length,max_response_length}"
    ),
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": Alias(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
    ),
    "data.seed": Alias("trainer.seed", SEED),
    "{ray_kwargs,ray_init}.timeline_json_file": Alias("{ray_init,ray_init}.timeline_file"),
    "trainer.profile_steps": Alias("global_profiler.steps"),
    "trainer.val_generations_to_log_to_wandb": Alias("trainer.log_val_generations"),
    "reward_model.num_workers": Alias("reward.num_workers"),
    "reward_model.{enable,enable_resource_pool,nnodes,n_gpus_per_node}": Alias(
        "reward.reward_model.{enable,enable_resource_pool,nnodes,n_gpus_per_node}"
    ),
    "reward_model.model.path": Alias("reward.reward_model.model_path"),
    "reward_model.micro_batch_size_per_gpu": Alias("reward.reward_model.micro_batch_size_per_gpu"),
    "reward_model.forward_max_token_len_per_gpu": Alias("reward.reward_model.max_token_len_per_gpu"),
    "reward.reward_model.rollout.tensor_model_parallel_size": Alias(
        "reward.reward_model.tensor_model_parallel_size"
    ),
    "model_engine": Alias("actor_rollout_ref.actor.strategy and critic.strategy"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": Alias(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", OVER_ALL_RANKS
    ),
    "critic.ppo_micro_batch_size": Alias("critic.ppo_micro_batch_size_per_gpu", OVER_ALL_RANKS),
    "critic.forward_micro_batch_size": Alias("critic.forward_micro_batch_size_per_gpu", OVER_ALL_RANKS),
    "actor_rollout_ref.{ref,rollout}.log_prob_micro_batch_size": Alias(
        "actor_rollout_ref.{ref,rollout}.log_prob_micro_batch_size_per_gpu", OVER_ALL_RANKS
    ),
    "reward_model.micro_batch_size": Alias("reward.reward_model.micro_batch_size_per_gpu", OVER_ALL_RANKS),
}
"""Renamed keys. Those that count rows over all ranks are divided by the data ranks (`verl.py`)."""

IGNORED: dict[str, Ignored] = {
    "actor_rollout_ref.{actor,ref}.use_torch_compile": Ignored("verl reads fsdp_config.use_torch_compile"),
    "actor_rollout_ref.actor.qat.**": Ignored("verl reads actor.fsdp_config.qat"),
    "actor_rollout_ref.actor.router_replay.**": Ignored("verl reads actor.megatron.router_replay"),
    "actor_rollout_ref.actor.{freeze_vision_tower,use_prefix_grouper}": Ignored(
        "verl's training engines never read it"
    ),
    "{actor_rollout_ref,critic}.nccl_timeout": Ignored("verl never reads it"),
    "trainer.ray_wait_register_center_timeout": Ignored("verl's trainer never reads it"),
    "trainer.esi_redundant_time": Ignored("verl's trainer never reads it"),
    f"{ROLLOUT}.{{do_sample,over_sample_rate,multi_stage_wake_up}}": Ignored(
        "verl's generation engines never read it"
    ),
    f"{ROLLOUT}.multi_turn.{{num_repeat_rollouts,use_inference_chat_template,tokenization_sanity_check_mode}}": Ignored(
        "verl's agent loops never read it"
    ),
    "data.{return_raw_input_ids,return_raw_chat,return_full_prompt,return_multi_modal_inputs,tokenizer}": Ignored(
        "verl's data set makes nothing of it"
    ),
    f"{TRAINED}.optim.total_training_steps": Ignored("verl overwrites it with the trainer's number of steps"),
    "**._target_": Ignored("it names a class of verl's"),
}
"""Keys that verl itself ignores: they never did anything."""

NOT_NEEDED: dict[str, Ignored] = {
    f"{PROFILED}.profiler.{{enable,all_ranks,ranks,tool,save_path}}": Ignored(
        "global_profiler.{tool,steps,ranks} profile all roles of a process together"
    ),
    f"{ROLES}.fsdp_config.{{forward_prefetch,use_orig_params,use_torch_compile,use_no_sync_for_gradient_accumulation}}": Ignored(
        "it changes speed only"
    ),
    f"{ROLES}.fsdp_config.{{pad_to_length,pad_to_length_bucket}}": Ignored(
        "rows are packed without padding here"
    ),
    f"{ROLES}.{{fsdp_config,megatron}}.forward_only": Ignored("verl sets it itself"),
    f"{ROLES}.{{fsdp_config.seed,megatron.seed,data_loader_seed}}": Ignored(SEED),
    f"{ROLES}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}}": Ignored(
        HEAD
    ),
    f"{ROLES}.fsdp_config.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}}": Ignored(
        HEAD
    ),
    f"{ROLES}.megatron.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size}}": Ignored(HEAD),
    f"{ROLES}.pad_to_length": Ignored("rows are packed without padding here"),
    f"{ROLES}.megatron.{{use_remove_padding,pad_bshd_to_minibatch_max,pad_to_length,pad_to_length_bucket}}": Ignored(
        "model.use_remove_padding decides for every engine here"
    ),
    f"{ROLES}.megatron.{{use_mbridge,vanilla_mbridge,load_weight}}": Ignored(
        "weights are always read from Hugging Face files here"
    ),
    f"{ROLES}.use_fused_kernels": Ignored(HEAD),
    f"{MODELS}.{{use_fused_kernels,fused_kernel_options.*}}": Ignored(HEAD),
    f"{MODELS}.{{use_shm,use_liger}}": Ignored("it changes speed only"),
    "actor_rollout_ref.actor.calculate_entropy": Ignored("the entropy is always measured here"),
    "data.{use_shm,dataloader_num_workers,filter_overlong_prompts_workers}": Ignored("it changes speed only"),
    f"{ROLLOUT}.{{enforce_eager,cudagraph_capture_sizes,enable_chunked_prefill,enable_prefix_caching}}": Ignored(
        "it changes speed only"
    ),
    f"{ROLLOUT}.{{layered_summon,disable_log_stats,disable_log_requests,skip_tokenizer_init}}": Ignored(
        "it changes speed or logging only"
    ),
    f"{ROLLOUT}.free_cache_engine": Ignored(
        "the cache is always given back between generation and training here"
    ),
    f"{ROLLOUT}.load_format": Ignored("the engine always gets the trainer's weights here"),
    f"{ROLLOUT}.calculate_log_probs": Ignored("sampled log-probabilities are always kept here"),
    f"{ROLLOUT}.mode": Ignored("there is one way to generate here"),
    f"{ROLLOUT}.seed": Ignored(SEED),
    f"{ROLLOUT}.checkpoint_engine.{{backend,engine_kwargs}}": Ignored(
        "how weights travel is chosen by placement here"
    ),
    "transfer_queue.**": Ignored("columns stay where they were made here, without a queue"),
    "trainer.use_v1": Ignored("there is one trainer here"),
}
"""Keys without a counterpart that are not missed: what is learned does not depend on them."""

UNSUPPORTED: dict[str, Unsupported] = {
    # --- training engines
    f"{ROLES}.fsdp_config.offload_policy": Unsupported(
        "keep shards in host memory by FSDP2's policy",
        instead="actor_rollout_ref.actor.fsdp_config.param_offload=true",
    ),
    f"{ROLES}.fsdp_config.full_determinism": Unsupported("force deterministic kernels"),
    f"{ROLES}.{{fsdp_config,megatron}}.qat.**": Unsupported("train for quantised weights"),
    f"{ROLES}.fsdp_config.turbo_config.**": Unsupported("set up the fsdp_turbo engine"),
    f"{ROLES}.{{torchtitan,veomni}}.**": Unsupported(
        "set up another training engine", instead="actor_rollout_ref.actor.strategy=fsdp2"
    ),
    f"{ROLES}.megatron.{{use_dist_checkpointing,dist_checkpointing_path,dist_checkpointing_prefix}}": Unsupported(
        "read weights from a Megatron checkpoint"
    ),
    f"{ROLES}.megatron.{{dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient}}": Unsupported(
        "save an optimizer state that fits other layouts"
    ),
    f"{ROLES}.megatron.{{dynamic_context_parallel,max_seqlen_per_dp_cp_rank}}": Unsupported(
        "choose the context parallel size per row",
        instead="actor_rollout_ref.actor.megatron.context_parallel_size=...",
    ),
    f"{ROLES}.megatron.{{override_ddp_config,override_mcore_model_config,extra}}": Unsupported(
        "set options inside Megatron-Core", ({},)
    ),
    f"{ROLES}.megatron.{{override_ddp_config,override_mcore_model_config,extra}}.**": Unsupported(
        "set options inside Megatron-Core"
    ),
    f"{ROLES}.megatron.use_megatron_fsdp": Unsupported("shard with Megatron's own FSDP"),
    f"{ROLES}.megatron.router_replay.**": Unsupported("record and replay the routing of experts"),
    f"{TRAINED}.checkpoint.{{strict,mbridge_config}}": Unsupported(
        "choose how a checkpoint is read and written"
    ),
    f"{TRAINED}.optim.{{optimizer,optimizer_impl,override_optimizer_config,override_optimizer_config.**}}": Unsupported(
        "choose another optimizer than AdamW", ("adam", "adamw", {})
    ),
    f"{TRAINED}.optim.{{num_cycles,zero_indexed_step}}": Unsupported("shape the cosine schedule"),
    f"{TRAINED}.optim.{{lr_warmup_init,lr_decay_steps,min_lr,lr_wsd_decay_style,lr_wsd_decay_steps}}": Unsupported(
        "shape Megatron's learning-rate schedule", instead="actor_rollout_ref.actor.optim.min_lr_ratio=..."
    ),
    f"{TRAINED}.optim.{{weight_decay_incr_style,use_checkpoint_opt_param_scheduler}}": Unsupported(
        "shape Megatron's schedules"
    ),
    f"{TRAINED}.optim.{{use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype}}": Unsupported(
        "keep optimizer state in fewer bits"
    ),
    f"{TRAINED}.optim.{{use_layer_wise_distributed_optimizer,muon_momentum,muon_nesterov,muon_split_qkv,muon_scale_mode}}": Unsupported(
        "train with Muon"
    ),
    f"{TRAINED}.optim.{{muon_coefficient_type,muon_num_ns_steps,muon_tp_mode,muon_fp32_matmul_prec}}": Unsupported(
        "train with Muon"
    ),
    f"{TRAINED}.optim.{{muon_extra_scale_factor,muon_scalar_optimizer,muon_match_adamw_update_rms}}": Unsupported(
        "train with Muon"
    ),
    f"{PROFILED}.profiler.{{relocate_results,finish_hook_cmd,finish_hook_all_ranks,finish_hook_ranks,tool_config.**}}": Unsupported(
        "shape this role's profiles"
    ),
    # --- the mathematics
    "actor_rollout_ref.actor.{tau_pos,tau_neg}": Unsupported("shape the sapo loss"),
    "actor_rollout_ref.actor.policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef,dro_beta}": Unsupported(
        "shape another policy loss than vanilla"
    ),
    "actor_rollout_ref.actor.calculate_sum_pi_squared": Unsupported(
        "measure what the optimal token baseline needs"
    ),
    "actor_rollout_ref.actor.{tis_imp_ratio_cap,behav_imp_weight_cap}": Unsupported(
        "correct for the difference between rollout and training probabilities", (-1, None)
    ),
    "actor_rollout_ref.actor.state_masking": Unsupported("mask what tools wrote", (False,)),
    "critic.loss_scale_factor": Unsupported("scale the critic's loss"),
    "algorithm.rollout_correction.*": Unsupported(
        "correct for the difference between rollout and training probabilities"
    ),
    "algorithm.{rollout_is,rollout_is_threshold,rollout_is_threshold_lower,rollout_is_level,rollout_is_mode}": Unsupported(
        "correct for the difference between rollout and training probabilities", (False, None)
    ),
    "algorithm.{rollout_is_veto_threshold,rollout_is_batch_normalize,rollout_rs,rollout_rs_threshold}": Unsupported(
        "correct for the difference between rollout and training probabilities", (False, None)
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": Unsupported("let several batches be sampled at once"),
    "algorithm.{use_pf_ppo,pf_ppo.*}": Unsupported("weigh samples by their reward (PF-PPO)"),
    "algorithm.{gdpo_reward_keys,gdpo_reward_weights}": Unsupported("weigh several rewards (GDPO)", (None,)),
    "distillation.**": Unsupported("learn from a teacher model"),
    # --- generation
    f"{ROLLOUT}.{{full_determinism,logprobs_mode,scheduling_policy,expert_parallel_size}}": Unsupported(
        "set up the engine this way"
    ),
    f"{ROLLOUT}.engine_kwargs.{{sglang,trtllm}}": Unsupported(
        "be handed to an engine that is not used here", ({},)
    ),
    f"{ROLLOUT}.engine_kwargs.{{sglang,trtllm}}.**": Unsupported(
        "be handed to an engine that is not used here"
    ),
    f"{ROLLOUT}.{{router_config_path,enable_rollout_routing_replay,moe_load_balance_metrics_interval}}": Unsupported(
        "configure the router of requests or of experts"
    ),
    f"{ROLLOUT}.multi_turn.{{enable,max_assistant_turns,max_user_turns,max_turns,max_parallel_calls,format}}": Unsupported(
        "hold conversations of several turns", (False, None)
    ),
    f"{ROLLOUT}.multi_turn.{{tool_config_path,function_tool_path,interaction_config_path,completion_callback}}": Unsupported(
        "give the model tools", (None,)
    ),
    f"{ROLLOUT}.multi_turn.{{max_tool_response_length,tool_response_truncate_side}}": Unsupported(
        "limit what tools return"
    ),
    f"{ROLLOUT}.multi_turn.{{enable_tokenization_sanity_check,enable_tokenization_sanity_check_mode}}": Unsupported(
        "check the tokens of conversations", (False, None)
    ),
    f"{ROLLOUT}.agent.{{default_agent_loop,agent_loop_config_path,custom_async_server.*}}": Unsupported(
        "lead conversations its own way"
    ),
    f"{ROLLOUT}.{{chat_scheduler,swap_space,layer_name_map.**,micro_batch_size,use_fire_sampling}}": Unsupported(
        "set up the engine of an older version", (None, False)
    ),
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module": Unsupported("carry weights with code of one's own"),
    f"{ROLLOUT}.trace.*": Unsupported("record trajectories with a tracing service"),
    f"{ROLLOUT}.prometheus.*": Unsupported("serve the engine's metrics to Prometheus"),
    f"{ROLLOUT}.{{quantization,quantization_config_file,qat,qat.**}}": Unsupported(
        "sample with quantised weights", (None,)
    ),
    f"{{{ROLLOUT},actor_rollout_ref.model,critic.model}}.{{mtp,mtp.*}}": Unsupported(
        "predict several tokens at once", (None,)
    ),
    f"{{{ROLLOUT},reward.reward_model.rollout}}.disaggregation.*": Unsupported(
        "separate prefill and decoding"
    ),
    "actor_rollout_ref.hybrid_engine": Unsupported(
        "give the actor and the rollout engines of their own when false", (True,)
    ),
    # --- model
    f"{MODELS}.{{hf_config_path,external_lib}}": Unsupported(
        "read the model with other files or code", (None,)
    ),
    f"{MODELS}.enable_activation_offload": Unsupported(
        "keep activations in host memory",
        instead="actor_rollout_ref.model.enable_gradient_checkpointing=true",
    ),
    f"{MODELS}.{{exclude_modules,lora_adapter_path}}": Unsupported("shape the low-rank adapters", (None,)),
    f"{MODELS}.lora.*": Unsupported(
        "give Megatron low-rank adapters", instead="actor_rollout_ref.model.lora_rank=..."
    ),
    f"{MODELS}.tiled_mlp.*": Unsupported("compute the MLP in tiles to save memory"),
    # --- data
    "data.{image_key,video_key,audio_key,image_patch_size,mm_processor_kwargs}": Unsupported(
        "read images, video or sound", ({},)
    ),
    "data.mm_processor_kwargs.**": Unsupported("read images, video or sound"),
    "data.{tool_config_path,function_tool_path}": Unsupported("give the model tools", (None,)),
    "data.{custom_cls.*,sampler.*,datagen.*}": Unsupported(
        "read the data with a class of one's own", (None,)
    ),
    "data.validation_shuffle": Unsupported("shuffle the held-out prompts"),
    "data.trust_remote_code": Unsupported(
        "run the tokenizer's own code", (False,), instead="actor_rollout_ref.model.trust_remote_code=true"
    ),
    # --- rewards
    "reward.reward_manager.{source,name,module.*}": Unsupported(
        "score with another reward manager than naive",
        ("naive",),
        instead="reward.custom_reward_function.path=...",
    ),
    "reward_model.reward_manager": Unsupported(
        "score with another reward manager than naive",
        ("naive", None),
        instead="reward.custom_reward_function.path=...",
    ),
    "reward_model.{reward_loop_source,reward_loop_module_path,reward_loop_class_name}": Unsupported(
        "score with a class of one's own"
    ),
    "reward_model.{launch_reward_fn_async,use_reward_loop}": Unsupported(
        "score beside generation", (False, True)
    ),
    "reward_model.reward_kwargs.**": Unsupported(
        "be handed to the reward manager", instead="reward.custom_reward_function.reward_kwargs={...}"
    ),
    "reward_model.{strategy,max_length,use_dynamic_bsz,megatron.**,model.{fsdp_config,megatron,override_config}.**}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward_model.model.{input_tokenizer,external_lib,trust_remote_code,use_remove_padding,use_fused_kernels,use_shm}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{name,dtype,gpu_memory_utilization,enforce_eager,cudagraph_capture_sizes,free_cache_engine}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{data_parallel_size,expert_parallel_size,pipeline_model_parallel_size}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{max_num_batched_tokens,max_model_len,max_num_seqs,load_format,layered_summon}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{scheduling_policy,full_determinism,seed,multi_stage_wake_up,engine_kwargs,limit_images,mtp}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{enable_chunked_prefill,enable_prefix_caching,disable_log_stats,skip_tokenizer_init}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.{ignore_eos,temperature,top_k,top_p,do_sample,n,prompt_length,response_length,quantization}": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.reward_model.rollout.quantization_config_file": Unsupported(
        "set up the engine of the reward model", (None,)
    ),
    "reward.sandbox_fusion.*": Unsupported("run generated programs in a sandbox", (None,)),
    # --- the loop
    "trainer.{del_local_ckpt_after_load,default_hdfs_dir}": Unsupported("keep checkpoints elsewhere"),
    "trainer.{remove_previous_ckpt_in_save,checkpoint_callback_class}": Unsupported(
        "manage checkpoints", (False, None)
    ),
    "trainer.v1.{trainer_mode,sync}": Unsupported(
        "train beside generation",
        ({},),
        instead="async_training.staleness_threshold=... async_training.trigger_parameter_sync_step=...",
    ),
    "trainer.v1.{colocate_async,separate_async,sampler}.**": Unsupported(
        "shape asynchronous training",
        instead="async_training.staleness_threshold=... async_training.trigger_parameter_sync_step=...",
    ),
    "trainer.{npu_profile.**,worker_nsight_options.**,controller_nsight_options.**}": Unsupported(
        "shape profiles", (None,)
    ),
    "global_profiler.{profile_continuous_steps,relocate_results,finish_hook_cmd,finish_hook_all_ranks,finish_hook_ranks}": Unsupported(
        "shape profiles"
    ),
    "global_profiler.global_tool_config.**": Unsupported("shape profiles"),
    "skip.*.*": Unsupported(
        "use responses of an earlier run again", instead="trainer.debug.load_rollouts=..."
    ),
    "rollout.{nnodes,n_gpus_per_node,n,total_rollout_steps,test_freq}": Unsupported(
        "set up fully asynchronous training",
        instead="actor_rollout_ref.rollout.nnodes=... actor_rollout_ref.rollout.n_gpus_per_node=...",
    ),
    "async_training.{use_dynamic_resource_scheduling,checkpoint_engine.**,compute_prox_log_prob,use_rollout_log_probs}": Unsupported(
        "shape asynchronous training", (False,)
    ),
    "ray_init.runtime_env.{py_executable,working_dir,py_modules,excludes,pip,uv,conda,container,image_uri,config,nsight}": Unsupported(
        "set up Ray's workers", (None,), "ray_init.runtime_env.env_vars={...}"
    ),
    "ray_init.{num_gpus,resources,labels,object_store_memory,namespace,local_mode,ignore_reinit_error,_temp_dir}": Unsupported(
        "be handed to ray.init", (None, False)
    ),
    "ray_init.{include_dashboard,dashboard_host,dashboard_port,log_to_driver,logging_level,configure_logging}": Unsupported(
        "be handed to ray.init", (None, False)
    ),
}
"""What cannot be honoured yet."""

MEGATRON_FOLLOWS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "param_offload",
    "override_transformer_config",
)
ULYSSES = "fsdp_config.ulysses_sequence_parallel_size"
FOLLOWS: dict[str, str] = {
    **{
        f"actor_rollout_ref.ref.megatron.{name}": f"actor_rollout_ref.actor.megatron.{name}"
        for name in MEGATRON_FOLLOWS
    },
    f"actor_rollout_ref.ref.{ULYSSES}": f"actor_rollout_ref.actor.{ULYSSES}",
    **{
        f"{role}.checkpoint.load_contents": f"{role}.checkpoint.save_contents"
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "critic.loss_agg_mode": "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.n_gpus_per_node": "trainer.n_gpus_per_node",
}
"""Keys of ours that, where nobody sets them, have the value of another, as in verl."""

DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
}
STRATEGIES = {"fsdp": "fsdp2"}
ENGINES = {"hf": "native"}
FILTER_METRICS = {"reward": "score", "seq_final_reward": "seq_reward"}
VERL_TRACKERS = ("vemlp_wandb", "clearml", "trackio", "rl_insight")
"""Trackers of verl's that there are not here; metrics.jsonl is always written."""

CONFIG_NAMES: dict[str, str] = {"ppo_trainer": "dp", "ppo_megatron_trainer": "megatron"}
"""verl's configuration files -> the model_engine that they choose."""
