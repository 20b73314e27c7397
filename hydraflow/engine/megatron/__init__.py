"""Megatron-Core as a training engine. Nothing above this folder knows of it."""

import logging

from hydraflow.engine.megatron import without_cuda

# for each model it lists every parameter and the whole configuration
logging.getLogger("megatron.core").setLevel(logging.WARNING)
without_cuda.install()
