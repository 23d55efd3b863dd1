"""The layouts over NCCL on two GPUs: what one process on a CPU gives, decoding as graphs too."""

from typing import Any

import pytest
import torch
from tests.parallel.replay import record, replay_all
from tests.parallel.test_layouts import CUT, EXPERTS, FUSED, TRAVEL, tp
from tests.parallel.workers import Workers

from musespark import LLM, SamplingParams
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.parallel import Parallelism
from musespark.llm.loading import load_decoder
from musespark.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

UNFUSED = {"fuse_all_reduce": False}
LAYOUTS = {
    "tp2": {**tp(2), **FUSED},
    "tp2-ep2": {**tp(2), **EXPERTS},
    "unfused-tp2": {**tp(2), **UNFUSED},
    "unfused-ep2": {**tp(2), **EXPERTS, **UNFUSED},
    "sp2": {**tp(2), **CUT},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2-ep2": {"data_parallel_size": 2, **TRAVEL},
}


@pytest.fixture(scope="module")
def gpus():
    pool = Workers(seconds=240, backend="nccl")  # the first calls compile kernels
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """As narrow as the Hopper experts allow on each of two ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    plain = make_checkpoint(
        folder / "bf16",
        dtype=torch.float32,
        hidden_size=256,
        head_dim=32,
        num_attention_heads=8,
        moe_hidden_size=256,
        moe_intermediate_size=256,
        num_local_experts=16,
        num_experts_per_tok=4,
    )
    quantize_checkpoint(plain, folder / "nvfp4")
    return folder


@pytest.fixture(scope="module")
def recordings(folders):
    """One whole run, and one that ends early; prompts are read while others decode."""
    made = {}
    for experts in ("bf16", "nvfp4"):
        decoder = load_decoder(folders / experts, dtype="float32")
        made[experts] = [
            record(decoder, (1, 2, 3, 30, 300), prompts=(11, 1, 40), chunk=16, max_tokens=12),
            record(decoder, (7, 2), prompts=(3,)),
        ]
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(gpus, folders, recordings, layout):
    """In float32. In bfloat16, with the kernels for NVFP4 experts, sums over ranks may flip an
    expert, and a row with it."""
    settings = LAYOUTS[layout]
    num_replicas = settings.get("data_parallel_size", 1)
    cases = [
        (str(folders / experts), made[:num_replicas], "float32", pack, "cuda")
        for experts, made in recordings.items()
        for pack in (False, True)
    ]
    decoder = load_decoder(folders / "nvfp4", dtype="bfloat16")
    rough = record(decoder, (1, 4, 300), prompts=(9, 30), chunk=16, max_tokens=8)
    cases.append((str(folders / "nvfp4"), [rough], "bfloat16", True, "cuda"))
    # One call: communicators take longer to make than all cases to run.
    for (folder, _, dtype, pack, _), found in zip(
        cases, zip(*gpus.run(2, replay_all, settings, cases), strict=True), strict=True
    ):
        answers = [each for each in found if each is not None]
        assert len(answers) == Parallelism(**settings).tensor_parallel_size * num_replicas
        for each in answers:
            if dtype == "bfloat16":
                assert each.typical <= 0.1
            else:
                assert each.flips == 0, (folder, pack)
                assert max(each.logits, each.taps) <= 1e-4, (folder, pack)


@pytest.mark.parametrize("settings", [tp(2), {**tp(2), **EXPERTS}, {"pipeline_parallel_size": 2}])
def test_engines_give_the_cpus_tokens(settings):
    """From prompts to text: steps are planned once, recorded, and run ahead over tensor ranks."""
    prompts = [list(f"What is {n} + {3 * n}?".encode()) * (n + 1) for n in range(5)]
    params = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=20, ignore_eos=True),
    ]
    where: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    alone = LLM("spark-mini", device="cpu", **where)
    with LLM("spark-mini", device="cuda", **where, **settings) as spread:
        for each in params:
            one, other = (
                [completion.token_ids for completion in llm.generate(prompts, each)]
                for llm in (alone, spread)
            )
            assert other == one
