from tests.store.test_leases import *  # noqa: F403
