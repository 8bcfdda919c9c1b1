"""Every number of a training run: model sizes, step counts, batch shapes, seeds. FULL makes the bundled checkpoints.

Step counts, never time budgets, so that a run can be repeated. MICRO is a smoke run for a CPU in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

END_OF_TEXT, IM_START, IM_END, MASK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense Qwen3, and the part of it that the drafter shares."""

    vocab: int = 3072
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_theta: float = 10000.0
    eps: float = 1e-6
    max_positions: int = 4096


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    steps: int
    rows: int = 32  # rows per step
    row_tokens: int = 2048
    library_rows: int = 3  # of `rows`, the ones that hold standard library text
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 60
    decay_share: float = 0.6  # the rate falls linearly to 0 over this last part of the steps


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    name: str
    block: int
    gamma: float  # loss weight of slot k is exp(-(k - 1) / gamma)
    steps: int
    anchors: int  # per row
    rows: int = 32
    layers: int = 2
    target_layers: tuple[int, ...] = (1, 4, 6)  # 0-based layer outputs
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 40
    decay_share: float = 0.6


@dataclass(frozen=True, slots=True)
class GenerationRecipe:
    """On-policy data for the drafters. `batches` maps a total length to the sequences generated at once."""

    chats: int
    library_prompts: int
    batches: tuple[tuple[int, int], ...] = ((256, 4096), (512, 4096), (1024, 2048), (2048, 768))
    greedy_share: float = 0.75
    temperature: float = 0.8
    short_kept: float = 0.3  # share kept of the chats whose answer is under 10 tokens
    row_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Recipe:
    target: TargetRecipe
    generation: GenerationRecipe
    drafters: tuple[DrafterRecipe, ...]
    shape: ModelShape = field(default_factory=ModelShape)
    seed: int = 1
    tokenizer_examples: int = 40_000
    shard_rows: int = 64
    evaluation_tasks: int = 250  # per category
    acceptance_prompts: int = 40  # per category
    library_files: int | None = None  # None: all


FULL = Recipe(
    target=TargetRecipe(steps=9000),
    generation=GenerationRecipe(chats=60_000, library_prompts=10_000),
    drafters=(
        DrafterRecipe("drafter-b16", block=16, gamma=7.0, steps=3400, anchors=64),
        DrafterRecipe("drafter-b8", block=8, gamma=4.0, steps=2400, anchors=128),
    ),
)
MICRO = Recipe(
    shape=ModelShape(vocab=512, hidden=32, layers=4, heads=2, kv_heads=1, head_dim=16, intermediate=64),
    target=TargetRecipe(steps=2, rows=3, row_tokens=768, library_rows=1, warmup=1),
    generation=GenerationRecipe(chats=10, library_prompts=2, batches=((256, 24), (768, 8)), row_tokens=768, short_kept=1.0),
    drafters=(
        DrafterRecipe("drafter-b16", block=16, gamma=7.0, steps=2, anchors=4, rows=2, target_layers=(0, 1, 2)),
        DrafterRecipe("drafter-b8", block=8, gamma=4.0, steps=2, anchors=4, rows=2, target_layers=(0, 1, 2)),
    ),
    tokenizer_examples=60,
    shard_rows=2,
    evaluation_tasks=1,
    acceptance_prompts=1,
    library_files=6,
)
