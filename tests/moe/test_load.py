import torch

from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.moe.load import ExpertLoad
from musespark.moe.router import Router


def routers_of(decoder: Decoder) -> list[Router]:
    return [part for part in decoder.modules() if isinstance(part, Router)]


def test_every_choice_is_counted_once():
    decoder = load_decoder("spark-mini", dtype="float32")
    chosen: dict[int, list[torch.Tensor]] = {}
    routers = routers_of(decoder)
    for index, router in enumerate(routers):
        router.register_forward_hook(
            lambda _, __, routing, index=index: chosen.setdefault(index, []).append(routing.ids)
        )
    load = ExpertLoad(decoder.layers)
    for token_ids in ([1, 2, 3], list(range(40))):
        decoder.compute_logits(token_ids)
    found = load.read()
    assert found.keys() == chosen.keys()
    assert len(found) == decoder.config.num_hidden_layers
    for index, ids in chosen.items():
        expected = torch.cat(ids).flatten().bincount(minlength=decoder.config.num_local_experts)
        assert found[index] == expected.tolist()


def test_padding_is_not_counted():
    decoder = load_decoder("spark-mini", dtype="float32")
    load = ExpertLoad(decoder.layers)
    router = routers_of(decoder)[0]
    padding = torch.tensor([False, True, True])
    router(torch.randn(3, decoder.config.hidden_size), padding)
    assert sum(load.read()[0]) == decoder.config.num_experts_per_tok
