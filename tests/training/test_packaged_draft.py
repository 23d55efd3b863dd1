"""The draft that comes with Spark-Mini belongs to it, and helps."""

import pytest
from training.draft_evaluation import Cycles, evaluate_draft

from musespark.checkpoint.source import packaged_draft, resolve_checkpoint
from musespark.config.draft import DraftConfig
from musespark.config.model import DecoderConfig

NUM_TOKENS = 5
TASKS = ("addition", "sorting", "json", "talk")


@pytest.fixture(scope="module")
def folder():
    name = packaged_draft("spark-mini")
    assert name == packaged_draft("spark-mini-nvfp4") == "spark-mini-draft"
    return resolve_checkpoint(name)


def test_it_is_small_and_made_for_spark_mini(folder):
    config = DraftConfig.from_folder(folder)
    config.check_target(DecoderConfig.from_folder(resolve_checkpoint("spark-mini")))
    config.check_num_tokens(NUM_TOKENS)
    assert config.num_hidden_layers == 2
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    assert "tokens a cycle" in (folder / "README.md").read_text()


def test_most_of_its_guesses_are_right(folder):
    """3 tokens a cycle is far above chance, and below what it reaches (see its README.md)."""
    found = evaluate_draft("spark-mini", folder, TASKS, 2, NUM_TOKENS)
    total = sum(found.values(), Cycles(0, 0, (0,) * NUM_TOKENS, (0,) * NUM_TOKENS))
    assert total.tokens_per_cycle > 3
    assert total.accepted[0] > 0.7 * total.offered[0]
