from tests.store.test_runs import *  # noqa: F403
