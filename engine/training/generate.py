"""Batched generation with static shapes: one step is one CUDA graph, so that it costs memory traffic and no launches.

Every sequence has its own position; finished ones stand still. For making training data and for evaluation; the
engine has its own decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.model import Target, rotate
from training.recipe import END_OF_TEXT, IM_END

CHECK_EVERY = 16  # steps between looks at whether everything has finished
PREFILL_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    total: int  # prompt and answer may have this many tokens together
    temperature: float = 0.0


class BatchGenerator:
    """Buffers for `size` sequences of up to `length` tokens."""

    def __init__(self, model: Target, size: int, length: int) -> None:
        self.model, self.size, self.length = model, size, length
        device = model.cos.device
        s = model.shape
        dtype = model.model.embed_tokens.weight.dtype
        cache = (s.layers, size, s.kv_heads, length, s.head_dim)
        self.keys, self.values = torch.zeros(cache, dtype=dtype, device=device), torch.zeros(cache, dtype=dtype, device=device)
        self.ids = torch.zeros(size, length, dtype=torch.long, device=device)
        self.position = torch.zeros(size, dtype=torch.long, device=device)
        self.limit = torch.zeros(size, dtype=torch.long, device=device)
        self.temperature = torch.zeros(size, 1, device=device)
        self.done = torch.zeros(size, dtype=torch.bool, device=device)
        self.slots = torch.arange(length, device=device)
        self.rows = torch.arange(size, device=device)
        self.advance: Callable[[], None] = self._captured() if device.type == "cuda" else self._step

    @torch.no_grad()
    def run(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The prompts with their continuations; a continuation ends with <|im_end|>, <|endoftext|> or the limit."""
        self._prefill(prompts)
        for step in range(self.length):
            self.advance()
            if step % CHECK_EVERY == CHECK_EVERY - 1 and bool(self.done.all()):
                break
        ends = (self.position + 1).tolist()
        return [row[:end] for row, end in zip(self.ids[: len(prompts)].tolist(), ends, strict=False)]

    def _prefill(self, prompts: Sequence[Prompt]) -> None:
        padded = torch.zeros(self.ids.shape, dtype=torch.long)
        for row, p in enumerate(prompts):
            padded[row, : len(p.ids)] = torch.tensor(p.ids)
        self.ids.copy_(padded)
        device = self.ids.device
        missing = self.size - len(prompts)
        lengths = torch.tensor([len(p.ids) for p in prompts] + [1] * missing, device=device)
        totals = torch.tensor([min(p.total, self.length) for p in prompts] + [2] * missing, device=device)
        self.position.copy_(lengths - 1)
        self.limit.copy_(totals - 1)
        self.temperature[:, 0] = torch.tensor([p.temperature for p in prompts] + [0.0] * missing, device=device)
        self.done.copy_(self.position >= self.limit)
        widest = int(lengths.max())
        for part in torch.arange(self.size).split(max(1, PREFILL_TOKENS // widest)):
            self._fill_cache(part.to(device), widest)

    def _fill_cache(self, rows: Tensor, width: int) -> None:
        """Keys and values of the first `width` slots; those past a prompt are overwritten before they are seen."""
        m = self.model
        cos, sin = m.cos[None, :width, None], m.sin[None, :width, None]
        x = m.model.embed_tokens(self.ids[rows, :width])
        for index, layer in enumerate(m.model.layers):
            h = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(h, cos, sin)
            self.keys[index, rows, :, :width], self.values[index, rows, :, :width] = k, v
            x = x + layer.self_attn.attend(layer.self_attn.queries(h, cos, sin), k, v, None)
            x = layer.feed_forward(x)

    def _step(self) -> None:
        """One token for every sequence that is not done, at its own position."""
        m, s = self.model, self.model.shape
        token = self.ids.gather(1, self.position[:, None])
        cos, sin = m.cos[self.position][:, None, None], m.sin[self.position][:, None, None]
        hidden_slots = self.slots[None, None, None, :] > self.position[:, None, None, None]
        x = m.model.embed_tokens(token)
        for index, layer in enumerate(m.model.layers):
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            k, v = attention.keys_values(h, cos, sin)
            self.keys[index, self.rows, :, self.position] = k[:, :, 0]
            self.values[index, self.rows, :, self.position] = v[:, :, 0]
            q = rotate(attention.q_norm(attention.q_proj(h).unflatten(-1, (s.heads, s.head_dim))), cos, sin)
            q = q.view(self.size, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            scores = (q @ self.keys[index].mT).float() * s.head_dim**-0.5
            weights = scores.masked_fill(hidden_slots, -1e9).softmax(-1).to(q.dtype)
            out = (weights @ self.values[index]).reshape(self.size, 1, s.heads * s.head_dim)
            x = layer.feed_forward(x + attention.o_proj(out))
        logits = m.logits(m.model.norm(x[:, 0])).float()
        # argmax(logits + T * Gumbel noise) is a sample at temperature T, and the argmax at T = 0.
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        chosen = (logits + self.temperature * noise).argmax(-1)
        following = torch.minimum(self.position + 1, self.limit)
        kept = self.ids.gather(1, following[:, None])[:, 0]
        self.ids.scatter_(1, following[:, None], torch.where(self.done, kept, chosen)[:, None])
        ended = (chosen == IM_END) | (chosen == END_OF_TEXT) | (following >= self.limit)
        self.position.copy_(torch.where(self.done, self.position, following))
        self.done.logical_or_(ended)

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            self._step()
        return graph.replay


def generate_all(model: Target, prompts: Sequence[Prompt], buckets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Generates for every prompt in the smallest bucket (length, sequences at once) that holds its total."""
    results: list[list[int]] = [[] for _ in prompts]
    left = list(range(len(prompts)))
    for length, size in buckets:
        last = length == buckets[-1][0]
        mine = [i for i in left if prompts[i].total <= length or last]
        left = [i for i in left if prompts[i].total > length and not last]
        if not mine:
            continue
        generator = BatchGenerator(model, min(size, len(mine)), length)
        for start in range(0, len(mine), generator.size):
            chunk = mine[start : start + generator.size]
            for i, out in zip(chunk, generator.run([prompts[i] for i in chunk]), strict=True):
                results[i] = out
        del generator
    return results
