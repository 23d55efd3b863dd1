"""The model in training computes what transformers computes from its export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training.config import RECIPE, SPARK_MINI
from training.export import KEPT_IN_FLOAT32, export, load_exported
from training.generation import Generator
from training.model import Decoder, Masks
from training.train import Trainer
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

TINY = replace(
    SPARK_MINI,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_hidden_size=16,
    moe_intermediate_size=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
)
PREFIX = "model.language_model."
LENGTH = 24


@pytest.fixture
def model() -> Decoder:
    """A tiny model with every parameter away from its neutral start."""
    torch.manual_seed(0)
    made = Decoder(TINY, RECIPE)
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            scale = 0.02 if "bias" in name else 0.3 if tensor.ndim == 1 else 0.0
            tensor.add_(scale * torch.randn_like(tensor))
    return made.eval()


def causal_masks(length: int, window: int) -> Masks:
    positions = torch.arange(length)
    document = torch.ones(1, length, dtype=torch.long)
    return Masks.within_documents(document, document, positions, positions, window)


@torch.no_grad()
def logits_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    masks = causal_masks(ids.shape[1], TINY.sliding_window)
    return model(ids, masks, torch.arange(ids.shape[1]))[0]


@torch.no_grad()
def peer_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    config = MuseSparkTextConfig(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = "eager"
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    head = weights.pop("lm_head.weight")
    peer = MuseSparkTextModel(config).float().eval()
    peer.load_state_dict({k.removeprefix(PREFIX): w for k, w in weights.items()}, strict=True)
    z = peer(input_ids=ids).last_hidden_state @ head.T * config.output_multiplier
    cap = config.final_logit_softcapping
    return cap * torch.tanh(z / cap)


def test_the_export_gives_transformers_the_same_logits(model, tmp_path):
    export(model, tmp_path)
    load_exported(model, tmp_path)
    ids = torch.randint(0, 256, (1, LENGTH))
    ours, theirs = logits_of(model, ids), peer_logits(tmp_path, ids)
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_export_keeps_router_and_gates_in_float32(model, tmp_path):
    export(model, tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        kept = any(part in name for part in KEPT_IN_FLOAT32)
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_both_spellings_of_the_rope_angle_base_agree(model, tmp_path):
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    thetas = {theta for theta in config["layer_rope_theta"] if theta}
    assert thetas == {config["rope_parameters"]["rope_theta"]}


def test_documents_of_a_row_do_not_see_each_other(model):
    ids = torch.randint(0, 256, (1, LENGTH))
    document = torch.ones(1, LENGTH, dtype=torch.long)
    document[:, 10:] = 2
    positions = torch.arange(LENGTH)
    masks = Masks.within_documents(document, document, positions, positions, TINY.sliding_window)
    with torch.no_grad():
        packed = model(ids, masks, positions)[0][:, 10:]
    torch.testing.assert_close(packed, logits_of(model, ids[:, 10:]), atol=1e-4, rtol=1e-4)


def test_additive_masks_say_the_same(model):
    ids = torch.randint(0, 256, (1, LENGTH))
    masks = causal_masks(LENGTH, TINY.sliding_window).additive(torch.float32)
    with torch.no_grad():
        logits = model(ids, masks, torch.arange(LENGTH))[0]
    torch.testing.assert_close(logits, logits_of(model, ids))


def test_generation_over_the_cache_equals_recomputation(model):
    prompts = [[65, 66, 67] * 9, [70] * 5]
    for prompt, new in zip(prompts, Generator(model, 260)(prompts, 12, [259]), strict=True):
        sequence = list(prompt)
        for token in new:
            assert int(logits_of(model, torch.tensor([sequence]))[0, -1].argmax()) == token
            sequence.append(token)


def test_windowed_generation_cannot_see_past_the_window(model):
    far_apart = [[65, *[66] * 60], [90, *[66] * 60]]
    one, other = Generator(model, 260, windowed=True)(far_apart, 4, [259])
    assert one == other


def test_training_lowers_the_loss_moves_the_bias_and_resumes_exactly(tmp_path):
    recipe = replace(RECIPE, warmup_steps=2, steps=40)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    trained = torch.ones_like(ids, dtype=torch.bool)
    document = torch.ones_like(ids)

    def steps(trainer: Trainer, count: int) -> list[float]:
        return [trainer.train_step(ids, trained, document).loss.item() for _ in range(count)]

    whole = Trainer(recipe, torch.device("cpu"))
    losses = steps(whole, 6)
    assert losses[-1] < losses[0] - 0.5
    bias = whole.model.routers()[0].e_score_correction_bias
    assert bias.abs().max() > 0

    first = Trainer(recipe, torch.device("cpu"))
    steps(first, 3)
    first.save(tmp_path / "state.pt")
    second = Trainer(recipe, torch.device("cpu"))
    second.load_from(tmp_path / "state.pt")
    assert second.step == 3
    assert steps(second, 3) == losses[3:]


def test_another_recipe_is_not_resumed(tmp_path):
    trainer = Trainer(RECIPE, torch.device("cpu"))
    trainer.save(tmp_path / "state.pt")
    other = Trainer(replace(RECIPE, seed=1), torch.device("cpu"))
    with pytest.raises(SystemExit, match="another recipe"):
        other.load_from(tmp_path / "state.pt")


def test_the_rate_rises_stays_and_falls():
    assert RECIPE.rate(0) < 0.01
    assert RECIPE.rate(RECIPE.warmup_steps) == 1.0
    assert RECIPE.rate(RECIPE.steps // 3) == 1.0
    assert 0 < RECIPE.rate(RECIPE.steps - 1) < 0.001
