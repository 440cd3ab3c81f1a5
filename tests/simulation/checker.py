"""Holds the published invariants against the record of a life. Reads nothing but the record.

Every rule is a method named for what must hold. What a rule lets pass, because nothing on our side of the
wire could have prevented it, is counted in `Verdict.explained` under a name.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation import record as r
from tests.simulation.ends import Ends
from tests.simulation.leaving import Leaving
from tests.simulation.reading import Verdict

__all__ = ["Verdict", "check"]


def check(entries: Sequence[r.Entry]) -> Verdict:
    return _Checker(entries).check()


class _Checker(Ends, Leaving):
    """All rules."""

    def check(self) -> Verdict:
        for rule in (
            self.everything_comes_to_rest,
            self.every_call_ends_once,
            self.end_states_tell_the_truth,
            self.a_result_is_stored_before_it_is_posted,
            self.no_gated_call_runs_without_an_allow,
            self.a_known_deny_is_final,
            self.only_the_current_term_writes,
            self.every_delivery_looks_the_same,
            self.a_delivered_call_stays_with_who_got_it,
            self.a_dispatch_is_stored_before_it_leaves,
            self.an_unrepeatable_tool_is_reached_once,
            self.a_known_result_is_never_recomputed,
            self.upstream_gets_one_answer,
            self.an_answered_call_is_not_begun,
            self.a_handover_is_quiet,
            self.a_taken_report_is_not_lost,
            self.final_texts_are_canonical,
            self.no_run_ends_idle_with_an_open_call,
            self.every_decision_ends,
            self.nothing_fails_by_a_defect,
        ):
            for sentence in rule():
                self.verdict.violations.append(f"{rule.__name__}: {sentence}")
        return self.verdict
