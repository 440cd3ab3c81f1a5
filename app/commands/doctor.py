"""`bascule doctor`: checks the set-up of this machine, from its environment."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Final

import msgspec
import typer

from app.commands.printing import print_json, say
from app.doctor.findings import Finding

_WIDTH: Final = 12


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, at the end.")] = False,
) -> None:
    """Check settings, database, upstream, clock and webhooks, and say what to do about what is wrong.

    Ends with 1 if a check failed; warnings end with 0. Run it where the service runs, with its environment.
    """
    from app.doctor.examination import examine

    found: list[Finding] = []

    def report(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            say(f"{finding.status.ljust(_WIDTH)}{finding.check.ljust(_WIDTH)}{finding.detail}")
            if finding.remedy is not None:
                say(f"{' ' * 2 * _WIDTH}→ {finding.remedy}")

    examine(os.environ, report, time.time)
    counts = Counter(finding.status for finding in found)
    if as_json:
        status = "failed" if counts["failed"] else "warning" if counts["warning"] else "ok"
        body = {"status": status, "checks": [asdict(finding) for finding in found]}
        print_json(msgspec.json.encode(body))
    else:
        counted = ", ".join(f"{counts[one]} {one}" for one in ("failed", "warning", "unchecked", "ok"))
        say(f"\n{counted}")
    if counts["failed"]:
        raise typer.Exit(1)
