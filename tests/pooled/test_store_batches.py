from tests.store.test_batches import *  # noqa: F403
