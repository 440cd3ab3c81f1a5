"""The doctor looks through a pooler, and knows one that was not declared."""

from __future__ import annotations

import pytest

from tests.doctor.conftest import Examine, examined, upstream

__all__ = ["examined", "upstream"]

pytestmark = pytest.mark.anyio


async def test_a_set_up_behind_a_pooler_is_right_with_a_direct_url(
    examined: Examine, pooled_url: str, migrated_url: str
) -> None:
    found = await examined(BASCULE_DATABASE_URL=pooled_url, BASCULE_DATABASE_DIRECT_URL=migrated_url)
    assert {one.status for findings in found.values() for one in findings} == {"ok"}


async def test_a_pooler_without_a_direct_url_fails_and_names_the_setting(
    examined: Examine, pooled_url: str
) -> None:
    answered, failed = (await examined(BASCULE_DATABASE_URL=pooled_url))["database"]
    assert (answered.status, failed.status) == ("ok", "failed")
    assert failed.detail.startswith("It answered, and then failed: unsupported startup parameter")
    assert "BASCULE_DATABASE_DIRECT_URL" in str(failed.remedy)
