"""Memory of a forward and a backward pass besides weights: activations of layers, and logits.

In: a `ModelShape`, the tokens of one micro-batch, bytes per number. Out: bytes. The terms are those of
transformers' decoder layers as `models/attention.py` calls them and of `models/fused_head.py`; tests compare
them with what autograd really saves.

Legend: U devices that share the tokens of a row (Ulysses, or Megatron's context-parallel ranks), N tokens
that layers compute, T tokens that attention sees, K response tokens that the head sees, V vocabulary, h
hidden, q and kv widths of all query and key heads, I width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hydraflow.batch_plan.parts import MicroPlan
from hydraflow.memory.shape import ModelShape
from hydraflow.models.chunks import block_tokens, head_chunk


@dataclass(frozen=True)
class MicroBatchTokens:
    """The tokens of one micro-batch on one device, every row at its longest."""

    line: int
    """N: when packed, a prompt shared by neighbouring rows counts once, and a response's last token is
    dropped."""
    attended: int
    """T: attention sees whole rows."""
    asked: int
    """K: response tokens."""
    ulysses: int = 1
    """U, which divides the other numbers; attention sees U times as many tokens, with fewer heads."""


@dataclass(frozen=True)
class RowSizes:
    """Tokens of a run's longest rows, and how rows are laid out."""

    prompt: int
    response: int
    samples: int
    """Neighbouring rows that share a prompt."""
    packed: bool


def tokens_of(micro: MicroPlan, rows: RowSizes, *, most_rows: int, ulysses: int = 1) -> MicroBatchTokens:
    """Tokens of one micro-batch when every row is at its longest.

    `most_rows`: rows of a data rank. A token budget is filled with rows of maximum length, and of different
    prompts unless groups stay whole. `ulysses` devices share each row's tokens; all tokens of one device's
    slice may be asked tokens.

    >>> tokens_of(MicroPlan(rows=4, max_tokens=None), RowSizes(10, 6, samples=2, packed=True), most_rows=8)
    MicroBatchTokens(line=40, attended=60, asked=24, ulysses=1)
    >>> budget = MicroPlan(rows=None, max_tokens=64, whole_groups=True)
    >>> tokens_of(budget, RowSizes(10, 6, samples=2, packed=True), most_rows=8)
    MicroBatchTokens(line=40, attended=60, asked=24, ulysses=1)
    """
    longest = rows.prompt + rows.response
    count = micro.rows if micro.rows is not None else max(1, (micro.max_tokens or 0) // longest)
    count = min(count, most_rows)
    if not rows.packed:
        line = attended = count * longest
    else:
        apart = micro.rows is None and not micro.whole_groups
        prompts = count if apart else _prompts(count, rows.samples)
        line, attended = prompts * rows.prompt + count * (rows.response - 1), count * (longest - 1)
    asked = count * rows.response
    if ulysses == 1:
        return MicroBatchTokens(line, attended, asked)
    line, attended = -(-line // ulysses), -(-attended // ulysses)
    # the last token of a shared prompt predicts the first token of several responses
    several = count if rows.packed else 0
    return MicroBatchTokens(line, attended, min(asked, line + several), ulysses)


def _prompts(rows: int, samples: int) -> int:
    """The largest number of prompts of `rows` neighbouring rows, whose groups have `samples` rows each; a
    micro-batch begins within a group if the sizes do not divide.

    >>> _prompts(4, 2), _prompts(2, 8), _prompts(4, 5), _prompts(1, 5)
    (2, 1, 2, 1)
    """
    if rows % samples == 0 or samples % rows == 0:
        return -(-rows // samples)
    return min(rows, -(-(rows - 1) // samples) + 1)


@dataclass(frozen=True)
class LayerCosts:
    """Bytes that one decoder layer holds for a micro-batch."""

    entry: int
    """Its input: all that gradient checkpointing keeps."""
    saved: int
    """Tensors that autograd saves for the backward pass."""
    forward: int
    """Peak inside a forward pass that saves nothing."""
    backward: int
    """Peak that its backward pass adds to the saved tensors: gradients passing through the MLP."""


def layer_costs(
    shape: ModelShape,
    tokens: MicroBatchTokens,
    number: int,
    *,
    tensor: int = 1,
    outside: int = 1,
    mlp_saved: int = 4,
    mlp_peak: int = 3,
) -> LayerCosts:
    """The costs of the most expensive kind of layer. `number`: bytes per number. `tensor` devices share each
    matrix; `outside` devices share what is between matrices (norms and residuals). `mlp_saved`: intermediates
    that a gated MLP saves (gate, its activation, up, their product); `mlp_peak`: those at the peak of a pass
    that saves none."""
    mlp_wide = shape.intermediate * number if shape.dense_layers else 0
    saved_in_mlp = mlp_saved * mlp_wide
    if shape.experts:
        saved_in_mlp, mlp_wide = max((saved_in_mlp, mlp_wide), _experts(shape, number, mlp_saved))
    h = shape.hidden * number
    entry = tokens.line * h // outside
    saved = 2 * tokens.line * _norm(shape, number) // outside + tokens.line * saved_in_mlp // tensor
    saved += _attention(shape, tokens, number, tensor) // tensor
    heads = 4 * shape.q_width
    if tokens.ulysses > 1:
        # queries, keys and values exist three times: before the exchange, as sent, and as received
        heads = 3 * (shape.q_width + 2 * shape.kv_width * _repeats(shape, tokens, tensor))
    forward = tokens.line * (2 * h // outside + max(mlp_peak * mlp_wide, heads * number) // tensor)
    return LayerCosts(entry, saved, forward, tokens.line * (2 * h // outside + 2 * mlp_wide // tensor))


def around_layers(shape: ModelShape, tokens: MicroBatchTokens, number: int) -> int:
    """Bytes outside the layers: embedded tokens, rotary tables, last norm, hidden states of asked tokens."""
    rotary = 2 * shape.head_dim * number
    each = shape.hidden * number + _norm(shape, number) + rotary
    return tokens.line * each + tokens.asked * shape.hidden * number


def _norm(shape: ModelShape, number: int) -> int:
    """Bytes per token that a norm saves: its input, the normalised input, the output, 1 / rms."""
    return shape.hidden * (_norms_input(shape, number) + number + number) + max(4, number)


def _norms_input(shape: ModelShape, number: int) -> int:
    """Bytes that a norm saves per number of its input: 0 with `models/norms.py`, else float32 or wider."""
    return 0 if shape.usual_norms and number < 8 else max(4, number)


def _attention(shape: ModelShape, tokens: MicroBatchTokens, number: int, tensor: int) -> int:
    """Saved bytes: rotated queries and keys, values, the result, of whole rows; and what query and key norms
    save. With Ulysses only this device's heads count; key-value heads may be repeated."""
    wide = max(4, number)
    kv_width = shape.kv_width * _repeats(shape, tokens, tensor)
    rows = (2 * shape.q_width + 2 * kv_width) * number + shape.heads * wide
    line = 0
    if shape.qk_norm:
        line = (shape.q_width + shape.kv_width) * (number + _norms_input(shape, number))
        line += (shape.heads + shape.kv_heads) * wide
    if tokens.attended != tokens.line or tokens.ulysses > 1:  # the result is selected or sent; both copy
        line += shape.q_width * number
    return tokens.attended * rows + tokens.line * line


def _repeats(shape: ModelShape, tokens: MicroBatchTokens, tensor: int) -> int:
    """Copies of a key-value head on the devices that share a row (`engine/token_exchange.py`) and divide the
    heads of one tensor-parallel rank."""
    return tokens.ulysses // gcd(tokens.ulysses, max(1, shape.kv_heads // tensor))


def _experts(shape: ModelShape, number: int, widths: int) -> tuple[int, int]:
    """Bytes per token of experts: saved, and one intermediate. Each token is copied to its experts' inputs
    and outputs; 24 bytes are indices."""
    chosen = shape.experts_per_token
    per_expert = (widths * shape.expert_intermediate + 2 * shape.hidden + 1) * number + 24
    saved = chosen * per_expert + 4 * shape.experts + widths * shape.shared_intermediate * number
    return saved, (chosen * (shape.expert_intermediate + shape.hidden) + shape.shared_intermediate) * number


def head_forward(
    vocabulary: int, asked: int, chunk: int, number: int, *, device_type: str, post: int = 0
) -> int:
    """Bytes of a chunk's logits, and of a block's log-probabilities in float32 or wider, computed by one
    thread. A narrower type adds a block of wider logits, and post-processing that and `post` copies."""
    wide, tokens = max(4, number), min(asked, head_chunk(chunk, vocabulary, number))
    block = min(tokens, block_tokens(vocabulary, wide, device_type))
    computed = wide * (2 if number < wide or post else 1) + post * number
    return (number * tokens + computed * block) * vocabulary


def head_backward(
    vocabulary: int,
    asked: int,
    chunk: int,
    number: int,
    *,
    device_type: str,
    trained_entropy: bool,
    post: int = 0,
) -> int:
    """Bytes of the head's backward pass with entropies. It turns logits into their gradient in place; only
    the copies that post-processing makes need separate gradients. If all tokens fit into one chunk, without
    post-processing, the forward pass keeps probabilities, which on a CPU become the gradient if they have its
    type; for a trained entropy it keeps their logarithms, and needs one more block."""
    if post or asked > head_chunk(chunk, vocabulary, number):
        return head_forward(vocabulary, asked, chunk, number, device_type=device_type, post=2 * post)
    wide = max(4, number)
    if number == wide and not trained_entropy and device_type == "cpu":
        return number * asked * vocabulary
    block = min(asked, block_tokens(vocabulary, wide, device_type))
    return ((number + wide) * asked + wide * block * ((number < wide) + trained_entropy)) * vocabulary
