"""Command lines of verl's example scripts of main_ppo, with the scripts' own defaults filled in: one for each
algorithm, training engine and rollout engine that the scripts show. Most share a part, which is here once.

In the sections below a key begins with a letter for its section: A actor, M model, R rollout, F reference,
C critic, D data, G algorithm, T trainer; `+` before it as in the script, `!` leaves out a shared key.
"""

from __future__ import annotations

_SECTIONS = {
    "A": "actor_rollout_ref.actor",
    "M": "actor_rollout_ref.model",
    "R": "actor_rollout_ref.rollout",
    "F": "actor_rollout_ref.ref",
    "C": "critic",
    "D": "data",
    "G": "algorithm",
    "T": "trainer",
}


def _line(*parts: str) -> list[str]:
    """The overrides of all parts, words apart; what comes later goes before what came earlier."""
    found: dict[str, str] = {}
    for word in " ".join(parts).split():
        name, _, value = word.partition("=")
        section, _, rest = name.lstrip("+!").partition(".")
        key = f"{_SECTIONS.get(section, section)}.{rest}" if rest else section
        found.pop(key, None)
        if not name.startswith("!"):
            found[key] = f"{'+' * name.startswith('+')}{key}={value}"
    return list(found.values())


# --- what many lines share --------------------------------------------------

_RUN = """T.logger=["console","wandb"] T.project_name=verl_examples T.experiment_name=qwen3_8b
    T.n_gpus_per_node=8 T.nnodes=1 T.save_freq=20 T.test_freq=5 T.total_epochs=15 T.balance_batch=True"""
_MATH = """D.train_files=['/data/gsm8k/train.parquet','/data/math/train.parquet']
    D.val_files=['/data/gsm8k/test.parquet','/data/math/test.parquet']"""
_GSM8K = "D.train_files=/data/gsm8k/train.parquet D.val_files=/data/gsm8k/test.parquet"
_DAPO_MATH = "D.train_files=['/data/dapo-math-17k.parquet'] D.val_files=['/data/aime-2024.parquet']"
_SIZES = """D.train_batch_size=1024 D.max_prompt_length=1024 D.max_response_length=2048
    D.filter_overlong_prompts=True D.truncation='error' A.ppo_mini_batch_size=256 A.use_dynamic_bsz=True
    A.ppo_max_token_len_per_gpu=24576 R.log_prob_use_dynamic_bsz=True
    R.log_prob_max_token_len_per_gpu=24576 F.log_prob_use_dynamic_bsz=True
    F.log_prob_max_token_len_per_gpu=24576"""
_VLLM = "R.name=vllm R.tensor_model_parallel_size=2 R.gpu_memory_utilization=0.6 R.n=5"
_KL_LOSS = "A.use_kl_loss=True A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl A.entropy_coeff=0"
_NO_KL = "A.use_kl_loss=False A.entropy_coeff=0"
_BASE = f"""G.adv_estimator=grpo G.use_kl_in_reward=False {_MATH} {_SIZES} {_VLLM} {_RUN}
    M.path=Qwen/Qwen3-8B M.use_remove_padding=True A.optim.lr=1e-6"""
_FSDP = f"""{_BASE} M.enable_gradient_checkpointing=True A.fsdp_config.param_offload=False
    A.fsdp_config.optimizer_offload=False F.fsdp_config.param_offload=True"""
_OFFLOADED = "A.fsdp_config.param_offload=True A.fsdp_config.optimizer_offload=True"
_MEGATRON = f"""{_BASE} model_engine=megatron A.megatron.tensor_model_parallel_size=2
    A.megatron.pipeline_model_parallel_size=2 F.megatron.tensor_model_parallel_size=2
    F.megatron.pipeline_model_parallel_size=2"""
_NO_REFERENCE = "!F.log_prob_use_dynamic_bsz !F.log_prob_max_token_len_per_gpu !F.fsdp_config.param_offload"
_OVERRIDE = "+A.megatron.override_transformer_config"
_RECOMPUTED = f"""{_OVERRIDE}.recompute_method=uniform {_OVERRIDE}.recompute_granularity=full
    {_OVERRIDE}.recompute_num_layers=1"""
_MEGATRON_OFFLOADED = """A.megatron.param_offload=True A.megatron.grad_offload=True
    A.megatron.optimizer_offload=True F.megatron.param_offload=True"""
_CPU_OPTIMIZER = """+A.optim.override_optimizer_config.optimizer_offload_fraction=1
    +A.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True
    +A.optim.override_optimizer_config.use_precision_aware_optimizer=True
    +A.optim.override_optimizer_config.optimizer_cpu_offload=True"""
_LONG = """D.train_batch_size=256 D.max_prompt_length=2048 D.max_response_length=8192 A.ppo_mini_batch_size=32
    R.n=16 R.tensor_model_parallel_size=4 R.gpu_memory_utilization=0.8 T.val_before_train=False
    T.save_freq=50 T.test_freq=10 T.total_epochs=10"""
_MOE = f"""{_MEGATRON} {_DAPO_MATH} {_LONG} {_NO_KL} {_MEGATRON_OFFLOADED} {_RECOMPUTED}
    M.path=Qwen/Qwen3-30B-A3B-Base T.critic_warmup=0
    A.ppo_max_token_len_per_gpu=30720 R.log_prob_max_token_len_per_gpu=30720
    F.log_prob_max_token_len_per_gpu=30720 A.megatron.pipeline_model_parallel_size=1
    F.megatron.pipeline_model_parallel_size=1 A.megatron.expert_model_parallel_size=8
    F.megatron.expert_model_parallel_size=8 A.megatron.expert_tensor_parallel_size=1
    F.megatron.expert_tensor_parallel_size=1 A.megatron.use_mbridge=True F.megatron.use_mbridge=True
    {_OVERRIDE}.moe_router_dtype=fp32 {_OVERRIDE}.moe_permute_fusion=True"""
_OVERLONG = """reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=4096
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward.reward_kwargs.max_resp_len=8192"""
_CORRECTION = """D.train_files=data/train.parquet D.val_files=data/test.parquet D.max_prompt_length=2048
    D.max_response_length=4096 D.train_batch_size=128 D.truncation='left' G.gamma=1.0
    M.path=Qwen/Qwen2.5-7B A.optim.lr=5e-7 A.ppo_mini_batch_size=32 A.ppo_micro_batch_size_per_gpu=8
    A.ppo_epochs=1 R.calculate_log_probs=True R.log_prob_micro_batch_size_per_gpu=8 R.name=vllm
    T.logger=["console","wandb"] T.project_name=rollout_corr_example T.experiment_name=rollout_corr
    T.total_epochs=10 G.rollout_correction.bypass_mode=true G.rollout_correction.rollout_is_threshold=2.0"""
_LORA = f"""{_FSDP} {_GSM8K} {_KL_LOSS} D.train_batch_size=64 D.max_prompt_length=512
    D.max_response_length=1024 A.ppo_mini_batch_size=32 A.ppo_max_token_len_per_gpu=12288
    R.log_prob_max_token_len_per_gpu=12288 F.log_prob_max_token_len_per_gpu=12288 A.optim.lr=3e-6
    R.load_format=safetensors R.layered_summon=True"""
_TEACHER = "distillation.teacher_models.teacher_model"
_DISTILLATION = f"""{_NO_REFERENCE} D.train_batch_size=128 A.ppo_mini_batch_size=128 R.n=1
    R.gpu_memory_utilization=0.4 R.max_model_len=3073 T.val_before_train=False T.save_freq=200
    distillation.enabled=True distillation.n_gpus_per_node=4 distillation.nnodes=1
    distillation.distillation_loss.topk=64 distillation.distillation_loss.use_task_rewards=False
    distillation.distillation_loss.loss_max_clamp=10.0
    distillation.distillation_loss.log_prob_min_clamp=-10.0"""
_ONE_TEACHER = f"""{_TEACHER}.model_path=Qwen/Qwen3-32B {_TEACHER}.inference.tensor_model_parallel_size=2
    {_TEACHER}.inference.name=vllm {_TEACHER}.inference.gpu_memory_utilization=0.4
    {_TEACHER}.inference.max_model_len=3073"""
_ROWS = """!A.use_dynamic_bsz !A.ppo_max_token_len_per_gpu !R.log_prob_use_dynamic_bsz
    !R.log_prob_max_token_len_per_gpu !F.log_prob_use_dynamic_bsz !F.log_prob_max_token_len_per_gpu"""
_DIST_CKPT = """A.megatron.use_dist_checkpointing=True A.megatron.dist_checkpointing_path=/ckpt/mcore
    F.megatron.use_dist_checkpointing=True F.megatron.dist_checkpointing_path=/ckpt/mcore"""

# --- the lines --------------------------------------------------

LINES = {
    "ppo_fsdp": _line(
        _FSDP,
        """!G.use_kl_in_reward G.adv_estimator=gae R.n=1 A.entropy_coeff=0 T.critic_warmup=0
        C.model.path=Qwen/Qwen3-8B C.model.use_remove_padding=True
        C.model.enable_gradient_checkpointing=True C.optim.lr=1e-5 C.use_dynamic_bsz=True
        C.ppo_max_token_len_per_gpu=24576 C.fsdp.param_offload=False C.fsdp.optimizer_offload=False""",
    ),
    "ppo_megatron": _line(
        _MEGATRON,
        """!G.use_kl_in_reward G.adv_estimator=gae R.n=1 A.entropy_coeff=0 T.critic_warmup=0
        C.model.path=Qwen/Qwen3-8B C.model.use_remove_padding=True C.optim.lr=1e-5 C.use_dynamic_bsz=True
        C.ppo_max_token_len_per_gpu=24576 C.megatron.tensor_model_parallel_size=2
        C.megatron.pipeline_model_parallel_size=2""",
    ),
    "ppo_reward_model": _line(
        f"""G.adv_estimator=gae {_MATH} D.train_batch_size=4096 D.max_prompt_length=4096
        D.max_response_length=4096 D.filter_overlong_prompts=True D.truncation='error'
        D.return_raw_chat=True M.path=Qwen/Qwen2-7B-Instruct A.optim.lr=1e-6 M.use_remove_padding=True
        M.enable_gradient_checkpointing=True A.ppo_mini_batch_size=512 A.use_dynamic_bsz=True
        A.ppo_max_token_len_per_gpu=24000 A.fsdp_config.param_offload=False
        A.fsdp_config.optimizer_offload=False A.use_kl_loss=False R.tensor_model_parallel_size=2 R.name=vllm
        R.gpu_memory_utilization=0.5 R.log_prob_max_token_len_per_gpu=24000 C.optim.lr=1e-5
        C.model.use_remove_padding=True C.model.path=Qwen/Qwen2-7B-Instruct
        C.model.enable_gradient_checkpointing=True C.use_dynamic_bsz=True C.ppo_max_token_len_per_gpu=98304
        C.model.fsdp_config.param_offload=False C.model.fsdp_config.optimizer_offload=False
        reward_model.enable=True reward_model.model_path=sfairXC/FsfairX-LLaMA3-RM-v0.1
        reward_model.use_reward_loop=True reward_model.inference.name=vllm
        reward_model.inference.gpu_memory_utilization=0.8
        reward_model.inference.tensor_model_parallel_size=1 reward_model.inference.prompt_length=8192
        reward_model.inference.response_length=4096 reward_model.num_workers=8 G.use_kl_in_reward=False
        T.critic_warmup=0 {_RUN} !T.balance_batch T.val_before_train=False"""
    ),
    "grpo_fsdp": _line(_FSDP, _KL_LOSS),
    "grpo_fsdp_sglang": _line(_FSDP, _KL_LOSS, "R.name=sglang"),
    "grpo_fsdp_trtllm": _line(_FSDP, _KL_LOSS, "R.name=trtllm"),
    "grpo_fsdp_blackwell": _line(
        _FSDP,
        _KL_LOSS,
        """T.n_gpus_per_node=4 R.enforce_eager=True R.free_cache_engine=True
        A.fsdp_config.model_dtype=bfloat16 +ray_kwargs.ray_init.num_gpus=4""",
    ),
    "grpo_megatron": _line(_MEGATRON, _KL_LOSS),
    "grpo_megatron_fused_kernels": _line(
        f"""G.adv_estimator=grpo {_MATH} D.return_raw_chat=True D.train_batch_size=1024
        D.max_prompt_length=1024 D.max_response_length=1024 D.filter_overlong_prompts=True
        D.truncation='error' M.path=Qwen/Qwen2-7B-Instruct M.use_fused_kernels=True A.optim.lr=1e-6
        A.ppo_mini_batch_size=256 A.ppo_micro_batch_size_per_gpu=4 A.megatron.pipeline_model_parallel_size=2
        A.megatron.tensor_model_parallel_size=2 {_KL_LOSS} R.log_prob_micro_batch_size_per_gpu=4 {_VLLM}
        F.log_prob_micro_batch_size_per_gpu=4 F.megatron.pipeline_model_parallel_size=2
        F.megatron.tensor_model_parallel_size=2 G.use_kl_in_reward=False T.critic_warmup=0 {_RUN}
        !T.balance_batch model_engine=megatron"""
    ),
    "grpo_32b_rows": _line(
        _FSDP,
        _GSM8K,
        _KL_LOSS,
        _ROWS,
        """!T.balance_batch M.path=Qwen/Qwen2.5-32B M.use_remove_padding=False D.max_response_length=1024
        A.ppo_mini_batch_size=128 A.ppo_micro_batch_size_per_gpu=2 R.log_prob_micro_batch_size_per_gpu=2
        F.log_prob_micro_batch_size_per_gpu=2 R.tensor_model_parallel_size=8 R.gpu_memory_utilization=0.4
        R.enable_chunked_prefill=False R.enforce_eager=False R.free_cache_engine=True T.nnodes=2
        R.checkpoint_engine.update_weights_bucket_megabytes=4096 T.critic_warmup=0""",
    ),
    "grpo_hsdp": _line(
        _FSDP,
        _GSM8K,
        _ROWS,
        """!D.filter_overlong_prompts !D.truncation !G.use_kl_in_reward !T.balance_batch
        M.path=Qwen/Qwen2-7B-Instruct D.max_prompt_length=512 D.max_response_length=1024
        A.ppo_micro_batch_size_per_gpu=80 A.use_kl_loss=True A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl
        A.fsdp_config.fsdp_size=4 R.log_prob_micro_batch_size_per_gpu=160
        F.log_prob_micro_batch_size_per_gpu=160 G.kl_ctrl.kl_coef=0.001 T.critic_warmup=0
        T.logger=['console','wandb'] T.save_freq=-1""",
    ),
    "grpo_seq_balance": _line(
        _FSDP,
        _GSM8K,
        """!D.filter_overlong_prompts !D.truncation !G.use_kl_in_reward !T.balance_batch !T.test_freq
        !R.log_prob_use_dynamic_bsz !R.log_prob_max_token_len_per_gpu !F.log_prob_use_dynamic_bsz
        !F.log_prob_max_token_len_per_gpu M.path=deepseek-ai/deepseek-llm-7b-chat D.val_batch_size=1312
        D.max_prompt_length=512 D.max_response_length=512 A.ppo_max_token_len_per_gpu=24000
        A.use_kl_loss=True A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl
        A.fsdp_config.grad_offload=False G.kl_ctrl.kl_coef=0.001 T.critic_warmup=0 T.save_freq=-1
        T.logger=['console','wandb']""",
    ),
    "grpo_codeforces": _line(
        _FSDP,
        _NO_KL,
        """!A.entropy_coeff !T.balance_batch D.train_files=['/data/codeforces/train.parquet']
        D.val_files=['/data/codeforces/test.parquet'] D.train_batch_size=128 D.max_response_length=1024
        D.shuffle=False M.path=Qwen/Qwen2.5-0.5B A.ppo_mini_batch_size=128 A.ppo_micro_batch_size_per_gpu=8
        A.ppo_max_token_len_per_gpu=16384 R.log_prob_micro_batch_size_per_gpu=8
        R.log_prob_max_token_len_per_gpu=16384 F.log_prob_micro_batch_size_per_gpu=8
        F.log_prob_max_token_len_per_gpu=16384 F.ulysses_sequence_parallel_size=1
        A.ulysses_sequence_parallel_size=1 A.fsdp_config.param_offload=True
        A.fsdp_config.optimizer_offload=True R.tensor_model_parallel_size=1 R.gpu_memory_utilization=0.3
        R.n=4 T.n_gpus_per_node=4 T.save_freq=200 T.val_before_train=True
        T.use_legacy_worker_impl=disable T.resume_mode=disable T.log_val_generations=5""",
    ),
    "grpo_reward_model": _line(
        _FSDP,
        _ROWS,
        """!M.use_remove_padding !A.fsdp_config.param_offload !A.fsdp_config.optimizer_offload
        !F.fsdp_config.param_offload !T.balance_batch D.train_files=data/full_hh_rlhf/rl/train.parquet
        D.val_files=data/full_hh_rlhf/rl/train.parquet D.prompt_key=prompt D.return_raw_chat=True
        D.train_batch_size=512 D.max_prompt_length=4096 M.path=mistralai/Mistral-Nemo-Instruct-2407
        A.ppo_mini_batch_size=128 A.ppo_micro_batch_size_per_gpu=10 A.use_kl_loss=False
        R.log_prob_micro_batch_size_per_gpu=10 R.gpu_memory_utilization=0.7 R.tensor_model_parallel_size=4
        reward.num_workers=8 reward.reward_model.enable=True
        reward.reward_model.model_path=Skywork/Skywork-Reward-Llama-3.1-8B
        reward.reward_model.rollout.name=vllm reward.reward_model.rollout.gpu_memory_utilization=0.8
        reward.reward_model.rollout.tensor_model_parallel_size=1
        reward.reward_model.rollout.prompt_length=8192 reward.reward_model.rollout.response_length=4096
        T.val_before_train=False T.save_freq=10 T.test_freq=-1 T.total_epochs=5""",
    ),
    "grpo_gpt_oss": _line(
        _FSDP,
        _GSM8K,
        _KL_LOSS,
        _ROWS,
        """!T.balance_batch D.train_batch_size=256 D.max_prompt_length=512 D.max_response_length=8192
        +D.apply_chat_template_kwargs.reasoning_effort=medium M.path=/models/gpt-oss-20b-bf16
        A.ppo_micro_batch_size_per_gpu=32 +A.fsdp_config.model_dtype=bfloat16
        R.log_prob_micro_batch_size_per_gpu=32 F.log_prob_micro_batch_size_per_gpu=32 R.name=sglang
        R.engine_kwargs.sglang.attention_backend=triton R.gpu_memory_utilization=0.7
        R.load_format=safetensors T.critic_warmup=0 T.save_freq=50 T.test_freq=10""",
    ),
    "grpo_moonlight": _line(
        _MEGATRON,
        _GSM8K,
        _KL_LOSS,
        _ROWS,
        _DIST_CKPT,
        """!M.use_remove_padding !T.balance_batch D.train_batch_size=192 D.trust_remote_code=True
        M.path=moonshotai/Moonlight-16B-A3B M.trust_remote_code=True A.ppo_mini_batch_size=64
        A.ppo_micro_batch_size_per_gpu=16 A.megatron.pipeline_model_parallel_size=3
        A.megatron.tensor_model_parallel_size=4 A.megatron.expert_model_parallel_size=4
        A.megatron.expert_tensor_parallel_size=1 R.log_prob_micro_batch_size_per_gpu=16
        R.tensor_model_parallel_size=4 F.log_prob_micro_batch_size_per_gpu=16
        F.megatron.pipeline_model_parallel_size=3 F.megatron.tensor_model_parallel_size=4
        F.megatron.expert_model_parallel_size=4 F.megatron.expert_tensor_parallel_size=1 T.critic_warmup=0
        T.nnodes=3""",
    ),
    "grpo_deepseek_v3": _line(
        _MEGATRON,
        _KL_LOSS,
        _MEGATRON_OFFLOADED,
        _RECOMPUTED,
        _CPU_OPTIMIZER,
        _OVERLONG,
        f"""!M.use_remove_padding !D.filter_overlong_prompts G.kl_ctrl.kl_coef=0.0
        D.train_files=/data/dapo-math-17k.parquet D.val_files=/data/aime-2024.parquet D.train_batch_size=96
        D.max_prompt_length=2048 D.max_response_length=8192 D.truncation=left
        M.path=deepseek-ai/DeepSeek-V3 M.use_fused_kernels=True A.optim.lr_warmup_steps=10
        A.optim.weight_decay=0.1 A.optim.clip_grad=1.0 A.ppo_mini_batch_size=32
        A.ppo_max_token_len_per_gpu=10240 A.clip_ratio_low=0.2 A.clip_ratio_high=0.28 A.clip_ratio_c=10.0
        A.loss_agg_mode=token-mean A.megatron.tensor_model_parallel_size=8
        A.megatron.pipeline_model_parallel_size=12 A.megatron.expert_model_parallel_size=8
        A.megatron.expert_tensor_parallel_size=1 A.megatron.context_parallel_size=1
        A.megatron.use_mbridge=True {_OVERRIDE}.apply_rope_fusion=False {_OVERRIDE}.moe_router_dtype=fp32
        {_OVERRIDE}.moe_shared_expert_overlap=False {_OVERRIDE}.moe_enable_deepep=True
        {_OVERRIDE}.moe_token_dispatcher_type=flex {_OVERRIDE}.moe_permute_fusion=True
        {_OVERRIDE}.gradient_accumulation_fusion=True
        {_OVERRIDE}.account_for_embedding_in_pipeline_split=False
        {_OVERRIDE}.account_for_loss_in_pipeline_split=False
        {_OVERRIDE}.num_layers_in_last_pipeline_stage=6 R.tensor_model_parallel_size=32 R.n=8
        R.max_num_batched_tokens=10240 R.log_prob_max_token_len_per_gpu=10240 R.enable_chunked_prefill=True
        R.enforce_eager=True R.temperature=1.0 R.top_p=1.0 R.top_k=-1 R.val_kwargs.temperature=1.0
        R.val_kwargs.top_p=0.7 R.val_kwargs.top_k=-1 R.val_kwargs.do_sample=True R.val_kwargs.n=1
        F.log_prob_max_token_len_per_gpu=10240 F.megatron.tensor_model_parallel_size=8
        F.megatron.pipeline_model_parallel_size=12 F.megatron.expert_model_parallel_size=8
        F.megatron.expert_tensor_parallel_size=1 F.megatron.context_parallel_size=1
        +reward.reward_kwargs.overlong_buffer_cfg.log=False T.nnodes=12 T.val_before_train=False
        T.resume_mode=auto T.log_val_generations=10 T.save_freq=100 T.test_freq=10 T.total_epochs=10
        T.default_local_dir=/ckpt actor_rollout_ref.nccl_timeout=1200""",
    ),
    "grpo_qwen3_236b": _line(
        _MEGATRON,
        _ROWS,
        _DIST_CKPT,
        _MEGATRON_OFFLOADED,
        f"""!M.use_remove_padding !D.filter_overlong_prompts !T.balance_batch !R.name
        D.train_files=/data/dapo-math-17k.parquet D.val_files=/data/aime-2024.parquet D.prompt_key=prompt
        D.truncation='left' D.max_prompt_length=2048 D.max_response_length=4096 D.train_batch_size=256 R.n=4
        G.kl_ctrl.kl_coef=0.0 A.use_kl_loss=False A.kl_loss_coef=0.0 A.clip_ratio_low=0.2
        A.clip_ratio_high=0.28 A.clip_ratio_c=10.0 A.ppo_micro_batch_size_per_gpu=1
        F.log_prob_micro_batch_size_per_gpu=4 R.log_prob_micro_batch_size_per_gpu=4
        M.path=/models/Qwen3-235B-A22B M.enable_gradient_checkpointing=True A.optim.lr_warmup_steps=10
        A.optim.weight_decay=0.1 A.ppo_mini_batch_size=16 A.megatron.pipeline_model_parallel_size=8
        A.megatron.tensor_model_parallel_size=4 A.megatron.expert_model_parallel_size=4
        {_OVERRIDE}.num_layers_in_first_pipeline_stage=5 {_OVERRIDE}.num_layers_in_last_pipeline_stage=5
        A.entropy_coeff=0 A.optim.clip_grad=1.0 A.loss_agg_mode=token-mean R.gpu_memory_utilization=0.8
        R.tensor_model_parallel_size=8 R.enable_chunked_prefill=True R.max_num_batched_tokens=6144
        R.temperature=1.0 R.top_p=1.0 R.top_k=-1 R.val_kwargs.temperature=1.0 R.val_kwargs.top_p=0.7
        R.val_kwargs.top_k=-1 R.val_kwargs.do_sample=True R.val_kwargs.n=1
        F.megatron.pipeline_model_parallel_size=8 F.megatron.tensor_model_parallel_size=4
        F.megatron.expert_model_parallel_size=4 reward_model.reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
        +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
        +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.1
        +reward_model.reward_kwargs.overlong_buffer_cfg.log=False
        +reward_model.reward_kwargs.max_resp_len=4096 T.nnodes=32 T.val_before_train=False T.test_freq=10
        T.total_epochs=10 T.total_training_steps=100 T.default_local_dir=/ckpt T.resume_mode=auto
        T.log_val_generations=10 T.logger=['console','wandb']""",
    ),
    "grpo_vision": _line(
        _FSDP,
        _KL_LOSS,
        """D.train_files=/data/geo3k/train.parquet D.val_files=/data/geo3k/test.parquet D.image_key=images
        D.train_batch_size=512 A.ppo_mini_batch_size=128 A.kl_loss_coef=0.01
        M.path=Qwen/Qwen2.5-VL-7B-Instruct A.strategy=fsdp2 M.use_fused_kernels=True
        R.multi_stage_wake_up=True R.enable_chunked_prefill=False R.enforce_eager=False
        R.free_cache_engine=True""",
    ),
    "scaling_32b_megatron": _line(
        _MEGATRON,
        _KL_LOSS,
        _MEGATRON_OFFLOADED,
        """!model_engine !F.megatron.tensor_model_parallel_size !F.megatron.pipeline_model_parallel_size
        A.strategy=megatron A.model_engine=megatron M.path=Qwen/Qwen2.5-32B D.train_batch_size=512
        D.max_prompt_length=2048 D.max_response_length=6144 A.ppo_max_token_len_per_gpu=32768
        R.log_prob_max_token_len_per_gpu=32768 F.log_prob_max_token_len_per_gpu=32768
        A.megatron.tensor_model_parallel_size=8 A.megatron.pipeline_model_parallel_size=1
        R.tensor_model_parallel_size=8 T.critic_warmup=0""",
    ),
    "scaling_72b_fsdp": _line(
        _FSDP,
        _KL_LOSS,
        _OFFLOADED,
        """M.path=Qwen/Qwen2.5-72B-Instruct T.nnodes=4 R.tensor_model_parallel_size=16 T.critic_warmup=0
        T.total_epochs=1""",
    ),
    "lora_fsdp": _line(_LORA, "M.lora_rank=64 M.lora_alpha=32 T.n_gpus_per_node=2 T.val_before_train=False"),
    "lora_from_adapter": _line(
        _LORA,
        """M.use_shm=True M.lora_adapter_path=/adapters/mine D.train_batch_size=1024
        A.ppo_mini_batch_size=256""",
    ),
    "lora_merged": _line(
        _LORA,
        """+M.lora.merge=True M.lora_rank=32 M.lora_alpha=64 D.train_batch_size=128 D.max_prompt_length=1024
        A.strategy=fsdp2 A.fsdp_config.model_dtype=bf16 A.optim.lr=1.0e-05 A.ppo_mini_batch_size=64
        A.ppo_max_token_len_per_gpu=24576 R.log_prob_max_token_len_per_gpu=24576
        F.log_prob_max_token_len_per_gpu=24576 R.n=8 F.strategy=fsdp2 F.fsdp_config.model_dtype=bf16
        T.val_before_train=True T.logger=["console","tensorboard","file"] T.total_epochs=1""",
    ),
    "lora_moe_megatron": _line(
        _MEGATRON,
        _GSM8K,
        _KL_LOSS,
        _MEGATRON_OFFLOADED,
        _RECOMPUTED,
        """!M.use_remove_padding M.path=Qwen/Qwen3-30B-A3B-Instruct-2507 M.use_fused_kernels=True
        M.lora.rank=32 M.lora.alpha=64 M.lora.lora_A_init_method=kaiming D.train_batch_size=128
        D.max_response_length=1024 A.optim.lr=3e-6 A.ppo_mini_batch_size=16 A.ppo_max_token_len_per_gpu=2048
        R.log_prob_max_token_len_per_gpu=2048 F.log_prob_max_token_len_per_gpu=2048
        A.megatron.use_mbridge=True A.megatron.vanilla_mbridge=False A.megatron.expert_model_parallel_size=4
        A.megatron.expert_tensor_parallel_size=1 A.megatron.context_parallel_size=2
        F.megatron.expert_model_parallel_size=4 F.megatron.expert_tensor_parallel_size=1
        F.megatron.context_parallel_size=2 R.tensor_model_parallel_size=8 R.gpu_memory_utilization=0.25
        R.enforce_eager=True R.free_cache_engine=True R.n=4""",
    ),
    "rloo": _line(
        _FSDP, _NO_KL, "G.adv_estimator=rloo G.use_kl_in_reward=True G.kl_penalty=kl G.kl_ctrl.kl_coef=0.001"
    ),
    "remax": _line(
        _FSDP,
        _NO_KL,
        """G.adv_estimator=remax G.use_kl_in_reward=True G.kl_penalty=kl G.kl_ctrl.kl_coef=0.001 R.n=4
        T.critic_warmup=0 T.total_epochs=10""",
    ),
    "remax_sync": _line(
        _FSDP,
        _NO_KL,
        """G.adv_estimator=remax G.use_kl_in_reward=True G.kl_penalty=kl G.kl_ctrl.kl_coef=0.0
        M.path=Qwen/Qwen2.5-Math-7B D.train_batch_size=128 A.ppo_mini_batch_size=64
        A.ulysses_sequence_parallel_size=2 R.gpu_memory_utilization=0.7 R.n=4
        F.fsdp_config.param_offload=False T.critic_warmup=0 T.test_freq=10 T.total_epochs=10
        +ray_kwargs.ray_init.runtime_env.env_vars.TRANSFER_QUEUE_ENABLE=1""",
    ),
    "reinforce_plus_plus": _line(
        _FSDP,
        _NO_KL,
        """G.adv_estimator=reinforce_plus_plus G.use_kl_in_reward=True A.ppo_mini_batch_size=1024
        A.optim.lr=3e-6 R.n=8 T.critic_warmup=0""",
    ),
    "optimal_token_baseline": _line(
        _FSDP,
        _NO_KL,
        """G.adv_estimator=optimal_token_baseline A.calculate_sum_pi_squared=True D.train_batch_size=128
        A.ppo_mini_batch_size=128 R.gpu_memory_utilization=0.75 R.n=8 T.critic_warmup=0""",
    ),
    "gdpo": _line(
        _FSDP,
        """!G.use_kl_in_reward G.adv_estimator=gdpo
        +G.gdpo_reward_keys=["accuracy_reward","format_reward"] G.kl_ctrl.kl_coef=0.001
        D.train_files=/data/rlla_4k/train.parquet D.val_files=/data/rlla_4k/test.parquet
        D.train_batch_size=128 D.max_prompt_length=2048 A.ppo_mini_batch_size=32 A.use_kl_loss=False
        A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl R.n=4
        reward.custom_reward_function.path=/code/rlla.py reward.custom_reward_function.name=compute_score
        reward.reward_manager.name=gdpo T.critic_warmup=0 T.val_before_train=False T.test_freq=10""",
    ),
    "codapo": _line(
        _FSDP,
        _NO_KL,
        """!R.log_prob_use_dynamic_bsz !R.log_prob_max_token_len_per_gpu !F.log_prob_use_dynamic_bsz
        !F.log_prob_max_token_len_per_gpu !F.fsdp_config.param_offload !T.balance_batch
        G.adv_estimator=codapo +G.codapo_top_k=4 +G.codapo_weight_offset=0.1 +G.codapo_accuracy_key=acc
        M.path=Qwen/Qwen2.5-Math-1.5B D.train_batch_size=16 D.max_response_length=3072
        A.ppo_mini_batch_size=16 A.ppo_max_token_len_per_gpu=16384 A.loss_agg_mode=token-mean
        R.tensor_model_parallel_size=1 R.temperature=1.0 R.do_sample=True R.n=8
        reward.reward_manager.name=dapo T.use_v1=True T.v1.trainer_mode=sync T.critic_warmup=0
        T.n_gpus_per_node=2 T.total_epochs=10 T.total_training_steps=1000 T.save_freq=100 T.test_freq=100""",
    ),
    "gpg_fsdp": _line(_FSDP, _NO_KL, "G.adv_estimator=gpg A.policy_loss.loss_mode=gpg T.critic_warmup=0"),
    "gpg_megatron": _line(
        _MEGATRON, _NO_KL, "G.adv_estimator=gpg A.policy_loss.loss_mode=gpg T.critic_warmup=0"
    ),
    "gmpo": _line(
        _FSDP,
        _KL_LOSS,
        """A.policy_loss.loss_mode=geo_mean A.clip_ratio_low=0.4 A.clip_ratio_high=0.4
        T.critic_warmup=0""",
    ),
    "cispo": _line(
        _FSDP,
        _KL_LOSS,
        "A.policy_loss.loss_mode=cispo A.clip_ratio_low=10 A.clip_ratio_high=0.2 T.critic_warmup=0",
    ),
    "gspo_fsdp": _line(
        _FSDP,
        _NO_KL,
        _OFFLOADED,
        """A.policy_loss.loss_mode=gspo A.loss_agg_mode=seq-mean-token-mean A.clip_ratio_low=3e-4
        A.clip_ratio_high=4e-4 A.clip_ratio_c=10.0 D.train_batch_size=512 D.max_prompt_length=2048
        D.max_response_length=8192 A.ppo_mini_batch_size=128 A.ppo_max_token_len_per_gpu=20480
        R.log_prob_max_token_len_per_gpu=20480 F.log_prob_max_token_len_per_gpu=20480 R.n=16
        T.critic_warmup=0 T.test_freq=10 T.total_epochs=10""",
    ),
    "gspo_moe_megatron": _line(
        _MOE,
        f"""A.policy_loss.loss_mode=gspo A.loss_agg_mode=seq-mean-token-mean A.clip_ratio_low=3e-4
        A.clip_ratio_high=4e-4 A.clip_ratio_c=10.0 {_OVERRIDE}.apply_rope_fusion=True R.val_kwargs.n=1
        R.val_kwargs.temperature=1.0 R.val_kwargs.top_p=0.7""",
    ),
    "dppo_moe_megatron": _line(
        _MOE,
        """G.norm_adv_by_std_in_grpo=False A.policy_loss.loss_mode=dppo_tv
        A.loss_agg_mode=seq-mean-token-sum-norm A.clip_ratio_low=0.15 A.clip_ratio_high=0.15
        A.clip_ratio_c=10000.0""",
    ),
    "cppo_moe_megatron": _line(
        _MOE,
        """G.norm_adv_by_std_in_grpo=False G.rollout_correction.bypass_mode=True
        A.policy_loss.loss_mode=cppo A.policy_loss.cppo.cppo_w_min=0.8 A.policy_loss.cppo.cppo_delta_b=0.02
        A.policy_loss.cppo.cppo_delta_b_q=0.9 A.policy_loss.cppo.cppo_delta_b_k=1.0
        A.loss_agg_mode=seq-mean-token-sum-norm A.clip_ratio=0.20 A.clip_ratio_c=20.0
        D.max_prompt_length=1024 D.max_response_length=16384 A.ppo_max_token_len_per_gpu=32768
        R.log_prob_max_token_len_per_gpu=32768 F.log_prob_max_token_len_per_gpu=32768
        A.megatron.tensor_model_parallel_size=4 F.megatron.tensor_model_parallel_size=4
        R.tensor_model_parallel_size=2 +ray_kwargs.ray_init.runtime_env.env_vars.TRANSFER_QUEUE_ENABLE=1""",
    ),
    "sapo_fsdp": _line(
        _FSDP,
        _NO_KL,
        _OFFLOADED,
        """A.policy_loss.loss_mode=sapo A.tau_pos=1.0 A.tau_neg=1.05 A.strategy=fsdp2 F.strategy=fsdp2
        D.train_batch_size=256 D.max_prompt_length=2048 D.max_response_length=8192 A.ppo_mini_batch_size=64
        A.ppo_max_token_len_per_gpu=20480 R.log_prob_max_token_len_per_gpu=20480
        F.log_prob_max_token_len_per_gpu=20480 R.gpu_memory_utilization=0.7 R.n=16 T.critic_warmup=0
        T.val_before_train=False T.save_freq=100 T.test_freq=-1 T.total_epochs=10""",
    ),
    "sapo_moe_fsdp": _line(
        _FSDP,
        _DAPO_MATH,
        _LONG,
        _NO_KL,
        _OFFLOADED,
        """A.policy_loss.loss_mode=sapo +A.policy_loss.tau_pos=1.0 +A.policy_loss.tau_neg=1.05
        M.path=Qwen/Qwen3-30B-A3B-Base A.strategy=fsdp2 F.strategy=fsdp2 A.ppo_max_token_len_per_gpu=20480
        R.log_prob_max_token_len_per_gpu=20480 F.log_prob_max_token_len_per_gpu=20480 T.critic_warmup=0""",
    ),
    "sapo_moe_megatron": _line(
        _MOE,
        _CPU_OPTIMIZER,
        f"""!A.use_dynamic_bsz !R.log_prob_use_dynamic_bsz !F.log_prob_use_dynamic_bsz !T.balance_batch
        D.train_files=/data/dapo-math-17k.parquet D.val_files=/data/aime-2024.parquet D.train_batch_size=32
        A.policy_loss.loss_mode=sapo A.tau_pos=1.0 A.tau_neg=1.05 A.ppo_micro_batch_size_per_gpu=1
        A.ppo_max_token_len_per_gpu=20480 A.megatron.tensor_model_parallel_size=4
        A.megatron.context_parallel_size=1 A.megatron.expert_model_parallel_size=4
        A.megatron.expert_tensor_parallel_size=4 {_OVERRIDE}.gradient_accumulation_fusion=True R.n=8
        R.log_prob_micro_batch_size_per_gpu=1 R.log_prob_max_token_len_per_gpu=20480
        F.log_prob_micro_batch_size_per_gpu=1 F.log_prob_max_token_len_per_gpu=20480
        F.megatron.tensor_model_parallel_size=4 F.megatron.context_parallel_size=1
        F.megatron.expert_model_parallel_size=4 F.megatron.expert_tensor_parallel_size=4
        A.checkpoint.save_contents=["model","extra"] T.device=gpu T.logger=["console"] T.test_freq=-1""",
    ),
    "router_replay": _line(
        _MEGATRON,
        _GSM8K,
        _MEGATRON_OFFLOADED,
        _RECOMPUTED,
        f"""!model_engine !T.total_epochs M.path=Qwen/Qwen3-30B-A3B M.use_fused_kernels=True
        D.train_batch_size=8 D.max_response_length=1024 A.strategy=megatron A.model_engine=megatron
        A.ppo_mini_batch_size=8 A.ppo_micro_batch_size_per_gpu=3 A.ppo_max_token_len_per_gpu=4096
        A.use_kl_loss=False A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl A.entropy_coeff=0
        A.megatron.pipeline_model_parallel_size=1 F.megatron.pipeline_model_parallel_size=1
        A.megatron.expert_model_parallel_size=8 A.megatron.expert_tensor_parallel_size=1
        F.megatron.expert_model_parallel_size=8 F.megatron.expert_tensor_parallel_size=1
        A.megatron.use_mbridge=True A.megatron.router_replay.mode=R3 {_OVERRIDE}.moe_enable_deepep=True
        {_OVERRIDE}.moe_token_dispatcher_type=flex {_OVERRIDE}.apply_rope_fusion=True
        {_OVERRIDE}.bias_activation_fusion=True {_OVERRIDE}.moe_router_dtype=fp32
        {_OVERRIDE}.gradient_accumulation_fusion=True {_OVERRIDE}.moe_permute_fusion=True R.mode=async
        R.gpu_memory_utilization=0.65 R.n=8 R.enable_chunked_prefill=True R.max_num_batched_tokens=2048
        R.log_prob_micro_batch_size_per_gpu=3 R.log_prob_max_token_len_per_gpu=4096
        R.enable_rollout_routing_replay=True F.log_prob_micro_batch_size_per_gpu=3
        F.log_prob_max_token_len_per_gpu=4096 R.calculate_log_probs=True T.critic_warmup=0 T.save_freq=-1
        T.test_freq=10 T.total_training_steps=50000 T.val_before_train=False""",
    ),
    "multi_token_prediction": _line(
        _MEGATRON,
        _DAPO_MATH,
        _NO_KL,
        _MEGATRON_OFFLOADED,
        _OVERLONG,
        """!D.filter_overlong_prompts D.train_batch_size=128 D.max_prompt_length=2048
        D.max_response_length=8192 D.truncation=left D.trust_remote_code=True M.path=XiaomiMiMo/MiMo-7B-RL
        M.trust_remote_code=True M.mtp.enable=True M.mtp.enable_train=True M.mtp.enable_rollout=False
        M.mtp.mtp_loss_scaling_factor=0.1 M.mtp.detach_encoder=True A.optim.lr_warmup_steps=10
        A.optim.weight_decay=0.1 A.optim.clip_grad=1.0 A.ppo_mini_batch_size=32
        A.ppo_max_token_len_per_gpu=20480 A.loss_agg_mode=token-mean A.clip_ratio_low=0.2
        A.clip_ratio_high=0.28 A.clip_ratio_c=10.0 A.megatron.context_parallel_size=2
        A.megatron.use_mbridge=True R.name=sglang R.tensor_model_parallel_size=4
        R.gpu_memory_utilization=0.8 R.n=16 R.log_prob_max_token_len_per_gpu=20480
        F.log_prob_max_token_len_per_gpu=20480 F.megatron.context_parallel_size=2 T.critic_warmup=0
        T.val_before_train=False T.save_freq=-1 T.test_freq=10 T.total_epochs=10 T.total_training_steps=400
        ray_kwargs.ray_init.runtime_env.py_executable=null""",
    ),
    "correction_rloo": _line(
        _CORRECTION,
        """G.adv_estimator=rloo G.rollout_correction.rollout_is=sequence
        G.rollout_correction.rollout_is_batch_normalize=true G.rollout_correction.rollout_rs=null
        G.rollout_correction.rollout_rs_threshold=null G.rollout_correction.loss_type=reinforce""",
    ),
    "correction_several_rules": _line(
        _CORRECTION,
        """G.adv_estimator=grpo G.rollout_correction.rollout_is=token
        G.rollout_correction.rollout_is_batch_normalize=false
        G.rollout_correction.rollout_rs='token_k1,seq_max_k2'
        G.rollout_correction.rollout_rs_threshold='0.6_1.6,2.5' G.rollout_correction.loss_type=ppo_clip
        A.optim.lr=3e-6 T.total_epochs=5""",
    ),
    "distillation_fsdp": _line(
        _FSDP,
        _OFFLOADED,
        _DISTILLATION,
        _ONE_TEACHER,
        """D.shuffle=False A.use_torch_compile=True distillation.distillation_loss.loss_mode=k1
        distillation.distillation_loss.use_policy_gradient=True""",
    ),
    "distillation_megatron": _line(
        _MEGATRON,
        _DISTILLATION,
        _ONE_TEACHER,
        """!F.megatron.tensor_model_parallel_size !F.megatron.pipeline_model_parallel_size
        A.megatron.pipeline_model_parallel_size=1 A.megatron.param_offload=True
        A.megatron.optimizer_offload=True distillation.distillation_loss.loss_mode=forward_kl_topk
        distillation.distillation_loss.use_policy_gradient=False""",
    ),
}
"""By what they show."""
