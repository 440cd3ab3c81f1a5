from tests.api.conftest import service  # noqa: F401
from tests.api.test_idempotency import *  # noqa: F403
