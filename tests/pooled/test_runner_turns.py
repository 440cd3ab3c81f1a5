from tests.runner.conftest import service  # noqa: F401
from tests.runner.test_turns import *  # noqa: F403
