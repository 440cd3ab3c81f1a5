from tests.store.test_wakeups import *  # noqa: F403
