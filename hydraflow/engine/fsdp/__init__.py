"""FSDP2 as a training engine: sharding, hybrid sharding, Ulysses sequence parallelism, LoRA."""
