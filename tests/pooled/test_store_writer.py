from tests.store.test_writer import *  # noqa: F403
