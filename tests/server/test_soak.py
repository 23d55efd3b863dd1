"""A short form of benchmarks/serve_soak.py."""

import asyncio

from benchmarks.serve_soak import SERVE, soak
from tests.server.process import serving


def test_who_shares_the_server_changes_nothing() -> None:
    with serving(*SERVE) as (_process, url):
        tally, left = asyncio.run(soak(url, clients=24, seconds=4.0, leaving=0.2, kinds=10))
    assert tally.wrong == []
    assert set(tally.outcomes) <= {"right", "left"}
    assert tally.outcomes["right"] > 5
    assert not any(left.values()), left
