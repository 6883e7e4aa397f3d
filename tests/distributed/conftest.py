import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Eight ranks."""
    made = Pool(8, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture
def brief_pool(tmp_path):
    """Three ranks that wait for each other for 2 s at most, and that a test may ruin."""
    made = Pool(3, tmp_path, timeout=2.0)
    yield made
    made.close()
