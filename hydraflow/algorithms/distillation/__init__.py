"""On-policy distillation: the pull of teachers on the policy."""
