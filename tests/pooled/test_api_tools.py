from tests.api.conftest import service  # noqa: F401
from tests.api.test_tools import *  # noqa: F403
