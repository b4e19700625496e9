"""The model: a Llama-style decoder, and nothing about parallelism, optimizers or processes.

Pre-norm blocks with RMSNorm (1910.07467), rotary positions (2104.09864, the half-split form),
grouped-query attention (2305.13245) and SwiGLU (2002.05202). Module names are those of Hugging
Face's ``LlamaForCausalLM`` without its ``model.`` prefix, so that an export is a rename. Parts of
a :class:`Decoder` may be set to ``None`` to make one stage of a pipeline, and head counts are read
off the projections' outputs, so that tensor parallelism needs no change here. Attention over tokens
that lie elsewhere replaces :attr:`Attention.attend` (and :attr:`Decoder.mask_of`, for packed
documents that are apart), and says by ``positions`` which ones are here.

Sizes in trailing comments: B sequences, T tokens, D = d_model, H query heads, G key/value heads,
E = head size, F = d_ff, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from blake3 import blake3
from torch import Tensor, nn

from bootstrap.manifest import Model
from node.trainer.model_moe import MixtureOfExperts


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square taken in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        # mixed types would keep torch from its fused kernel
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rope_tables(positions: Tensor, head_size: int, theta: float) -> Tensor:
    """Cosines and sines of the rotary angles at ``positions`` [T], fp32 [2, T, E], halves alike."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device)
    angles = torch.outer(positions.float(), 1.0 / theta ** (exponent / head_size))  # [T, E/2]
    angles = torch.cat((angles, angles), dim=-1)  # [T, E]
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+E/2}) of every head by its position's angle, in fp32."""
    low, high = x.chunk(2, dim=-1)  # [B, H, T, E/2] each
    return (x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]).to(x.dtype)


# queries [B, H, T, E], keys and values [B, G, T, E], and what Decoder.mask_of made of documents
# that are apart -> [B, H, T, E]
Attend = Callable[..., Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Each token attends to itself and those before it; H / G query heads share a key head.

    Or to those that ``mask``, bool [B, 1, T, T], lets it see.
    """
    # On a GPU fused kernels take grouped heads only in half precision without a mask; else torch
    # takes one that keeps all scores: for heads [4, 32, 4096, 128] and 8 key heads in fp32, forward
    # and backward, 34 GiB on an H200; with key heads repeated 2 GiB, in half of the time. (On a
    # CPU repeating takes a tenth longer.) The values' type counts: autocast casts the others to it.
    grouped = q.device.type == "cpu" or (mask is None and v.dtype != torch.float32)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and not grouped:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def document_numbers(tokens: Tensor, document_end: int) -> Tensor:
    """Which of the documents packed in its row each token is of, int64 [B, T] as the tokens."""
    ends = tokens == document_end
    return ends.cumsum(dim=1) - ends.long()  # the end is part of what it ends


def documents_apart(documents: Tensor) -> Tensor:
    """Which token may see which: bool [B, 1, T, T] of document numbers [B, T].

    A token sees those before it in its own document, and itself.
    """
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


class Attention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attend: Attend = causal_attention
        self.head_size = config.d_model // config.n_heads
        kv_size = config.n_kv_heads * self.head_size
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_size, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_size, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rope: Tensor, *mask: Tensor) -> Tensor:
        """[B, T, D] with the rotary tables [2, T, E], and a mask where documents are apart."""
        heads = (*x.shape[:2], -1, self.head_size)
        q = self.q_proj(x).view(heads).transpose(1, 2)  # [B, H, T, E]
        k = self.k_proj(x).view(heads).transpose(1, 2)  # [B, G, T, E]
        v = self.v_proj(x).view(heads).transpose(1, 2)  # [B, G, T, E]
        q, k = rotate(q, rope), rotate(k, rope)
        out = self.attend(q, k, v, *mask)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # [B, T, F] inside


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normed input and added back."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MixtureOfExperts(config) if config.experts else FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor, *mask: Tensor) -> Tensor:  # [B, T, D] -> the same
        x = x + self.self_attn(self.input_layernorm(x), rope, *mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Tokens to logits. Built on the ``meta`` device it allocates nothing.

    ``embed_tokens``, ``norm`` and ``lm_head`` may be ``None`` and ``layers`` may lack keys: that
    is a pipeline stage, which takes or returns hidden states [B, T, D] in place of tokens or
    logits. ``layers`` is a dictionary so that a stage keeps the whole model's parameter names.
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.mask_of: Callable[[Tensor], Tensor] = documents_apart
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie()

    @property
    def width(self) -> int:
        """Elements of a token's hidden state."""
        return self.config.d_model

    @property
    def tied(self) -> str:
        """The name of the embedding that the head is one tensor with; empty where it is not."""
        return "embed_tokens.weight" if self.config.tied_embeddings else ""

    def tie(self) -> None:
        """Make head and embedding one tensor where the configuration says so.

        To be called again after ``to_empty``, which makes two tensors of one.
        """
        if self.config.tied_embeddings and self.lm_head and self.embed_tokens:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """[B, T] tokens at ``positions`` [T] of their sequence (all of it) -> [B, T, V] logits.

        ``documents``: the document number of every token of the whole sequences, [B, whole]; given
        where documents are apart and ``x`` has only some of the tokens.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        mask: tuple[Tensor, ...] = ()
        if self.config.attention == "document":
            if documents is None:
                documents = document_numbers(x, self.config.document_end)
            mask = (self.mask_of(documents),)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)  # [B, T, D]
        head_size = self.config.d_model // self.config.n_heads
        rope = rope_tables(positions, head_size, self.config.rope_theta)
        for layer in self.layers.values():
            x = layer(x, rope, *mask)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def initial_value(config: Model, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The seeded initial fp32 value of one parameter, the same bits on every machine.

    Each tensor has a generator of its own, keyed by seed and name, so that a rank can make just
    its own. Matrices are uniform with standard deviation columns^-1/2, which is fan_in^-1/2
    for projections, and for a tied embedding makes logits of unit variance (0.02, as is usual in
    large models, needs twice the steps at d_model 64); those that write to the residual stream
    are smaller by (2 n_layers)^-1/2, as in GPT-2.
    Uniform rather than normal: the generator's integers become floats exactly, while a normal's
    logarithm and cosine differ in the last bit from one instruction set to another.
    """
    if len(shape) < 2:
        return torch.ones(shape, device="cpu")
    key = blake3(f"{seed}/{name}".encode()).digest(8)
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    std = shape[-1] ** -0.5
    if "o_proj" in name or "down_proj" in name:
        std /= math.sqrt(2 * config.n_layers)
    uniform = torch.rand(shape, generator=generator, device="cpu")
    return uniform.mul_(2).sub_(1).mul_(std * math.sqrt(3))


def skeleton(config: Model) -> Decoder:
    """The model that ``config`` describes, on the default device; see ``torch.device("meta")``."""
    if config.kind == "hf":
        from node.trainer.hf import ForeignDecoder

        return ForeignDecoder(config)
    return Decoder(config)


def build(config: Model, seed: int) -> Decoder:
    """A model on the CPU in fp32 with its seeded initial parameters."""
    if config.kind == "hf":
        from node.trainer.hf import build_foreign

        return build_foreign(config, seed)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(config, name, parameter.shape, seed))
    return model
