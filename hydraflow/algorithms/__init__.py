"""The maths of training, on plain tensors: losses, advantage estimators, KL terms; one file each."""
