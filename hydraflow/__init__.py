"""Reinforcement learning for language models: one Ray controller, worker groups on FSDP2 or Megatron-Core."""
