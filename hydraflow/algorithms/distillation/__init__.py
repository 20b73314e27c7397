"""On-policy distillation: teachers score the policy's own samples token by token."""
