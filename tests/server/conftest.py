"""Ends the servers that the tests of this folder have left for each other."""

from collections.abc import Iterator

import pytest
from tests.server.live import stop_idle_servers


@pytest.fixture(scope="session", autouse=True)
def _no_server_outlives_the_tests() -> Iterator[None]:
    yield
    stop_idle_servers()
