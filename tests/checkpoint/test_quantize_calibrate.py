import pytest
import torch

from musespark.checkpoint.calibrate import calibrate
from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.checkpoint.shards import CheckpointReader
from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.errors import CheckpointError, RequestError
from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.ops.nvfp4 import LARGEST
from musespark.parallel.layout import Layout
from musespark.testing import make_checkpoint

W4A4 = Layout(Parallelism(moe_backend="w4a4"))
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [100, 90, 80], []]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", mlp_layer_types=KINDS)


KINDS = ["sparse", "dense", "sparse", "sparse", "sparse", "sparse"]


def test_scales_are_the_largest_magnitudes(source):
    """Against a run of its own, layer by layer, route by route."""
    seen: dict[tuple[int, int], tuple[float, float]] = {}
    decoder = load_decoder(source)

    def hook(index):
        def record(module, args, _):
            h, routing = args
            for token, experts in enumerate(routing.ids.tolist()):
                for expert in experts:
                    gate, up = (module.gate_up_proj[expert].float() @ h[token].float()).chunk(2)
                    inner = gate * gate.sigmoid() * up
                    old = seen.get((index, expert), (0.0, 0.0))
                    new = float(h[token].abs().max()), float(inner.abs().max())
                    seen[index, expert] = max(old[0], new[0]), max(old[1], new[1])

        return record

    for index, kind in enumerate(KINDS):
        if kind == "sparse":
            experts = decoder.get_submodule(f"layers.{index}.mlp.experts")
            assert isinstance(experts, GroupedExperts)
            experts.register_forward_hook(hook(index))
    for sequence in SEQUENCES[:2]:
        decoder.compute_logits(sequence)

    scales = calibrate(source, SEQUENCES)
    assert sorted(scales) == [0, 2, 3, 4, 5]
    for index, of_layer in scales.items():
        assert torch.equal(of_layer.gate_up[:, 0], of_layer.gate_up[:, 1])
        largest = [seen.get((index, expert), (0.0, 0.0)) for expert in range(8)]
        for expert, (outer, inner) in enumerate(largest):
            # An expert nobody chose takes the layer's largest.
            outer = outer or max(outer for outer, _ in largest)
            inner = inner or max(inner for _, inner in largest)
            assert of_layer.gate_up[expert, 0].item() == pytest.approx(outer / LARGEST)
            assert of_layer.down[expert].item() == pytest.approx(inner / LARGEST, rel=2e-2)


def test_calibrated_scales_reach_w4a4(source, tmp_path):
    scales = calibrate(source, SEQUENCES)
    quantize_checkpoint(source, tmp_path / "target", input_scales=scales)
    quantize_checkpoint(source, tmp_path / "uncalibrated")
    ids = SEQUENCES[0]
    exact = load_decoder(source, dtype="float32").compute_logits(ids)
    for name in ("target", "uncalibrated"):
        decoder = load_w4a4(tmp_path / name)
        experts = decoder.get_submodule("layers.2.mlp.experts")
        assert isinstance(experts, NVFP4W4A4Experts)
        if name == "target":
            assert experts.input_scale is not None
            assert experts.inner_scale is not None
            assert experts.input_scale.item() == scales[2].gate_up.max().item()
            assert experts.inner_scale.item() == scales[2].down.max().item()
        else:
            assert experts.input_scale is None
        logits = decoder.compute_logits(ids)
        assert (logits - exact).norm() / exact.norm() < 0.4


def load_w4a4(folder):
    decoder = Decoder(DecoderConfig.from_folder(folder), dtype=torch.float32, layout=W4A4)
    with CheckpointReader.open(folder) as reader:
        load_weights(decoder.weight_slots(find_prefix(reader), reader.__contains__), reader)
    decoder.finish_loading()
    decoder.pack()
    return decoder


def test_progress_counts_tokens(source):
    seen: list[int] = []
    calibrate(source, SEQUENCES, progress=seen.append)
    assert seen == [7, 10, 10]


def test_no_text(source):
    with pytest.raises(RequestError, match="the text is empty"):
        calibrate(source, [[]])


@pytest.mark.parametrize("ids", [[3, 128], [-1]])
def test_foreign_token_ids(source, ids):
    with pytest.raises(RequestError, match="token ids must be from 0 to 127"):
        calibrate(source, [ids])


def test_a_quantized_checkpoint(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "target")
    with pytest.raises(CheckpointError, match="is quantized already"):
        calibrate(tmp_path / "target", SEQUENCES)
