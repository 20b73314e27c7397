"""The trained model: a Hugging Face backbone with a head that is applied to response tokens only.

In: a `PackedBatch`. Out: log-probabilities (and entropies) of its K asked tokens, or one value for each.
The head runs here and not in the model's own forward, so that logits exist only for response tokens and only
for a chunk of them at a time (`fused_head.py`).
Left out on purpose: loading (`loading.py`), sharding (`engine/`), losses (`algorithms/`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hydraflow.models.ask import LOG_PROBS, Ask
from hydraflow.models.attention import pick
from hydraflow.models.chunks import POST_PROCESSING, head_chunk
from hydraflow.models.config_keys import read
from hydraflow.models.fused_head import FusedHead, HeadWork, several
from hydraflow.models.kernel_head import KernelHead, suits
from hydraflow.models.linear import is_plain
from hydraflow.models.packing import PackedBatch


class PolicyModel(nn.Module):
    """A causal language model that gives log-probabilities instead of logits."""

    prefix = "lm."
    """Prefix of parameter names before their Hugging Face names."""

    def __init__(self, lm: Any, *, chunk_tokens: int):
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens

    @property
    def hf(self) -> Any:
        """The Hugging Face model whose layers are sharded."""
        return self.lm

    def forward(self, batch: PackedBatch, ask: Ask) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities of the asked tokens, (K,) or (K, M), and, on request, entropies or another column
        (K,), see `Ask`. At least float32, whatever the model's dtype."""
        head = self.lm.get_output_embeddings()
        ask.require_vocabulary(len(head.weight))
        hidden = asked_hidden_states(backbone_of(self.lm)[1], batch, head.weight.dtype)
        chunk = head_chunk(self.chunk_tokens, len(head.weight), hidden.element_size())
        if not is_plain(head):
            return self._by_module(hidden, batch.targets, ask, chunk)
        process = partial(shape_logits, config=self.lm.config)
        work = HeadWork(ask, process, chunk, trains=torch.is_grad_enabled())
        function = KernelHead if suits(hidden, batch.targets, work) else FusedHead
        return function.apply(hidden, head.weight, head.bias, batch.targets, work)

    def _by_module(
        self, hidden: torch.Tensor, targets: torch.Tensor, ask: Ask, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same through the head's own forward, for heads that are not plain linear layers."""
        if len(hidden) <= chunk:
            return self._score(hidden, targets, ask)
        chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        pieces = [checkpoint(self._score, h, t, ask, use_reentrant=False) for h, t in chunks]
        more = torch.cat([piece[1] for piece in pieces]) if ask.more else None
        return torch.cat([piece[0] for piece in pieces]), more

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, ask: Ask
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = shape_logits(self.lm.get_output_embeddings()(hidden), self.lm.config)  # (K, V)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if ask.temperature != 1.0:
            logits = logits / ask.temperature
        if ask.likeliest:
            top = logits.log_softmax(-1)[:, : ask.among].topk(ask.likeliest)
            return top.values.detach(), top.indices
        if ask.entropy or targets.ndim > 1:
            everything = logits.log_softmax(-1)
            log_probs = everything.gather(1, several(targets)).view(targets.shape)
            if ask.entropy:
                return log_probs, -(everything.exp() * everything).sum(-1)
        else:
            log_probs = -F.cross_entropy(logits, targets, reduction="none")
        more = None
        if ask.greedy_match:
            more = (logits.argmax(-1) == several(targets)[:, 0]).to(logits.dtype)
        elif ask.sum_pi_squared:
            more = logits.detach().softmax(-1).square().sum(-1)
        return log_probs, more


class ValueModel(nn.Module):
    """A backbone with one linear output: the expected return, predicted at the token before each response
    token. Parameter names are those of Hugging Face's token and sequence classification (`model.*`,
    `score.weight`)."""

    prefix = ""

    def __init__(self, backbone: Any, *, name: str = "model"):
        super().__init__()
        self.backbone_name = name
        self.add_module(name, backbone)
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, 1, bias=False, dtype=backbone.dtype, device=backbone.device)

    @property
    def hf(self) -> Any:
        """The Hugging Face model whose layers are sharded."""
        return getattr(self, self.backbone_name)

    def forward(self, batch: PackedBatch, ask: Ask = LOG_PROBS) -> tuple[torch.Tensor, None]:
        """(K,) values of the asked tokens, at least float32. `ask` is ignored."""
        weight = self.score.weight[0]
        values = torch.mv(asked_hidden_states(self.hf, batch, weight.dtype), weight)
        return values if values.dtype == torch.float64 else values.float(), None


def backbone_of(lm: Any) -> tuple[str, Any]:
    """Name and module of the backbone below the head; transformers' base model is the whole of some models
    (Llama 4)."""
    if lm.base_model is not lm:
        return lm.base_model_prefix, lm.base_model
    parts = ((name, child) for name, child in lm.named_children() if hasattr(child, "base_model"))
    return next(parts, (lm.base_model_prefix, lm))


def shared_vocabulary(module: PolicyModel | ValueModel) -> int:
    """Vocabulary size that both embeddings and head cover."""
    try:
        embedded = int(module.hf.get_input_embeddings().num_embeddings)
    except NotImplementedError:  # decoders of translation models, among others
        return int(module.hf.config.get_text_config().vocab_size)
    head = module.hf.get_output_embeddings()
    return min(embedded, head.out_features) if isinstance(head, nn.Linear) else embedded


def shape_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Post-processing of logits: Granite divides, Cohere, Falcon-H1 and HyperCLOVA X multiply, Gemma
    and RecurrentGemma soft-cap."""
    config = config.get_text_config()
    for key in POST_PROCESSING:
        if (value := read(config, key)) is None:
            continue
        if key in ("final_logit_softcapping", "logits_soft_cap"):
            logits = torch.tanh(logits / value) * value
        elif key == "logits_scaling" and config.model_type != "hyperclovax":
            logits = logits / value
        else:
            logits = logits * value
    return logits


def asked_hidden_states(backbone: Any, batch: PackedBatch, dtype: torch.dtype) -> torch.Tensor:
    """(K, hidden) last hidden states at the positions that predict the asked tokens. dtype: of the head;
    Mamba's residual stream is float32 in bf16 models too."""
    extra = {} if batch.plan is None else {"row_plan": batch.plan}
    out = backbone(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra)
    hidden = out.last_hidden_state  # (1, N, hidden) or (B, T, hidden)
    distinct = batch.plan is None or batch.plan.shared is None
    return pick(hidden.reshape(-1, hidden.shape[-1]), batch.predicts_at, distinct=distinct).to(dtype)
