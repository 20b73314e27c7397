"""Megatron-Core as a training engine. No other folder imports Megatron-Core."""

import logging

from hydraflow.engine.megatron import without_cuda

# at INFO it lists every parameter and the whole configuration of each model
logging.getLogger("megatron.core").setLevel(logging.WARNING)
without_cuda.install()
