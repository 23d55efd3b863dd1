import pytest
from tests.parallel.workers import Workers


@pytest.fixture(scope="session")
def workers():
    """Four processes for all tests of parallel layouts."""
    pool = Workers()
    yield pool
    pool.close()
