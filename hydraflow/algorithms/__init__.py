"""The maths of training on tensors alone: losses, advantage estimators, KL terms; a file for each."""
