from tests.store.test_retention_bounds import *  # noqa: F403
