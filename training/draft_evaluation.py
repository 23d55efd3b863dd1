"""How many tokens a cycle a draft gives with a greedy target, task by task.

python -m training.draft_evaluation build/spark-mini-draft/checkpoint

A cycle is one draft of N tokens and one step of the target that checks them: it yields the tokens
that are accepted and one of the target's own. What a greedy target writes does not depend on its
draft, so its replies are written first, and the draft is then asked at every token of them.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from musespark import LLM, SamplingParams
from musespark.evals.generate import NEW_QUESTIONS, evaluation_conversations
from musespark.evals.run import TASKS
from musespark.evals.wire import prompt_text
from musespark.llm.loading import load_decoder, load_draft
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.draft import DraftContext, DraftDecoder, PagedContext
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from training.tokenizer import build

BLOCK_SIZE = 16
AT_ONCE = 64
MAX_REPLY_TOKENS = 256


@dataclass(frozen=True)
class Cycles:
    """What a draft gave over some replies."""

    tokens: int
    """All but each reply's first, which comes of reading the prompt."""
    cycles: int
    accepted: tuple[int, ...]
    """By place in the draft: in how many cycles it was accepted."""
    offered: tuple[int, ...]
    """By place: in how many cycles the reply went on so far."""

    @property
    def tokens_per_cycle(self) -> float:
        """The mean."""
        return self.tokens / self.cycles

    def __add__(self, other: "Cycles") -> "Cycles":
        return Cycles(
            self.tokens + other.tokens,
            self.cycles + other.cycles,
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
            tuple(a + b for a, b in zip(self.offered, other.offered, strict=True)),
        )


def count_cycles(
    decoder: Decoder,
    draft: DraftDecoder,
    prompt: Sequence[int],
    reply: Sequence[int],
    num_tokens: int,
) -> Cycles:
    """Go through a reply that the greedy target has written, cycle by cycle."""
    ids = [*prompt, *reply]
    proposals = _propose_everywhere(decoder, draft, ids, len(prompt), num_tokens)
    anchor, cycles = len(prompt), 0
    accepted, offered = [0] * num_tokens, [0] * num_tokens
    while anchor < len(ids) - 1:
        cycles += 1
        proposed, written = proposals[anchor - len(prompt)], ids[anchor + 1 :]
        right = 0
        while right < num_tokens and right < len(written) and proposed[right] == written[right]:
            right += 1
        for place in range(num_tokens):
            accepted[place] += place < right
            offered[place] += place < len(written)
        anchor += min(right + 1, len(written))
    return Cycles(len(reply) - 1, cycles, tuple(accepted), tuple(offered))


def _propose_everywhere(
    decoder: Decoder, draft: DraftDecoder, ids: list[int], first: int, num_tokens: int
) -> list[list[int]]:
    """What the draft proposes with each token from `first` on as the anchor."""
    tokens = torch.tensor(ids)
    layers = draft.config.target_layer_ids
    _, taps = decoder.forward_with_taps(ForwardBatch.uncached(tokens), None, layers)
    blocks = -(-len(ids) // BLOCK_SIZE)
    spec = KVCacheSpec(BLOCK_SIZE, blocks, blocks)
    caches = allocate_draft_cache(
        draft.config, decoder.config, spec, dtype=draft.dtype, device=draft.device
    )
    positions = torch.arange(len(ids))
    draft.inject(draft.features(taps), positions, positions, positions, caches)
    table = torch.arange(blocks)[None]
    proposals: list[list[int]] = []
    for anchors in positions[first:].split(AT_ONCE):
        paged = PagedContext(table.expand(len(anchors), -1), torch.zeros_like(anchors))
        context = DraftContext(anchors, full=paged, sliding=paged)
        proposals += draft.propose(tokens[anchors], context, caches, num_tokens).token_ids.tolist()
    return proposals


def evaluate_draft(
    model: str | Path, draft_folder: Path, tasks: Sequence[str], samples: int, num_tokens: int
) -> dict[str, Cycles]:
    """Ask held-out questions of each task and return the cycles of the replies."""
    llm = LLM(model, device="cpu")
    decoder = load_decoder(model)
    assert decoder.embed_tokens is not None  # of one process
    embedding = decoder.embed_tokens.weight
    draft = load_draft(draft_folder, decoder.config, embedding, dtype=decoder.dtype)
    tokenizer = build()
    found = {}
    for task in tasks:
        asked = evaluation_conversations(task, NEW_QUESTIONS, samples, seed=1)
        prompts = [
            encoding.ids
            for encoding in tokenizer.encode_batch(
                [prompt_text(conversation) for conversation in asked], add_special_tokens=False
            )
        ]
        greedy = SamplingParams(temperature=0, max_tokens=MAX_REPLY_TOKENS)
        replies = [list(done.token_ids) for done in llm.generate(prompts, greedy)]
        total = Cycles(0, 0, (0,) * num_tokens, (0,) * num_tokens)
        for prompt, reply in zip(prompts, replies, strict=True):
            total += count_cycles(decoder, draft, prompt, reply, num_tokens)
        found[task] = total
    return found


def main() -> None:
    """Print tokens per cycle of each task, and write them beside the draft."""
    parser = argparse.ArgumentParser(description="Evaluate Spark-Mini's draft.")
    parser.add_argument("draft", type=Path, help="folder of the draft")
    parser.add_argument("--target", default="spark-mini")
    parser.add_argument("--samples", type=int, default=20, help="questions a task")
    parser.add_argument("--num-tokens", type=int, default=5, help="of a draft")
    arguments = parser.parse_args()
    found = evaluate_draft(
        arguments.target, arguments.draft, TASKS, arguments.samples, arguments.num_tokens
    )
    total = sum(found.values(), Cycles(0, 0, *((0,) * arguments.num_tokens,) * 2))
    for task, cycles in (found | {"all": total}).items():
        shares = (
            f"{right / there:.0%}" if there else "-"
            for right, there in zip(cycles.accepted, cycles.offered, strict=True)
        )
        print(f"{task:14} {cycles.tokens_per_cycle:.2f} tokens a cycle  {' '.join(shares)}")
    mean = sum(cycles.tokens_per_cycle for cycles in found.values()) / len(found)
    print(f"mean over tasks {mean:.2f}")
    results = {
        "num_tokens": arguments.num_tokens,
        "samples": arguments.samples,
        "tokens_per_cycle": {task: cycles.tokens_per_cycle for task, cycles in found.items()},
    }
    path = arguments.draft.parent / "tokens_per_cycle.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
