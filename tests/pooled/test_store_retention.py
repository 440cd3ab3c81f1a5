from tests.store.test_retention import *  # noqa: F403
