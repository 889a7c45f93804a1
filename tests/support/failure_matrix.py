"""The failure matrix: for each fault at each stage of a transfer, what each side does, when, and what the client gets.

`docs/failures.md` is drawn from this table, and `tests/fault` runs every cell of it, so neither can say what the other
doesn't. A row's cells are written as `(stages, modes, P's end, D's end)`; an end is

    CODE [@ WHEN] [/ WHEN FREED]    the engine hears of it, with this code, and has its blocks back; WHEN is since the
                                    fault, a sum of names in `CLOCK`; '0' at once
    =CODE                           the transfer counts as ended so, but the engine had left nothing to it
    had                             it had ended well before
    dead                            the process is gone
    -                               it has nothing of it, and does nothing

and after them which more metrics move: `posts` (posts that failed), `quarantine` (blocks that had to be kept).
"""

from __future__ import annotations

from failure_cells import ALL, PUSH, WHOLE, WRITES, Cell, Row, Spec
from failure_rows import CUT_S, FROZEN_S
from failure_scene import MODES, STAGES

_UNCHANGED: tuple[Spec, ...] = (
    ("before", WRITES, "ok @ comes", "ok @ comes"),
    ("before", "pull", "ok @ comes", "ok @ comes"),
    ("registered", ALL, "ok @ computed", "ok @ computed"),
    ("met flying", WHOLE, "ok @ 0", "ok @ 0"),
    ("met flying", "stream", "ok @ computed", "ok @ computed"),
    ("landed", WRITES, "had", "ok @ 0"),
    ("landed", "pull", "ok @ 0", "ok @ 0"),
    ("decoding", ALL, "had", "had"),
)
"""Nothing comes of it."""
_HAD = ("decoding", ALL, "had", "had")


def _rest(*stages: str) -> tuple[Spec, ...]:
    return tuple(spec for spec in _UNCHANGED if any(stage in stages for stage in spec[0].split()))


_P_IS_GONE: tuple[Spec, ...] = (
    ("registered", ALL, "dead", "peer_gone @ 0 / settle", "quarantine"),
    ("met flying", PUSH, "dead", "peer_gone @ 0 / settle", "quarantine"),
    ("met flying", "stream", "dead", "peer_gone @ 0 / settle", "quarantine"),
    ("met", "pull", "dead", "read_failed @ 0", "posts"),
    ("flying", "pull", "dead", "peer_gone @ 0", "posts"),
    ("landed", WRITES, "dead", "peer_gone @ 0 / settle", "quarantine"),
    ("landed", "pull", "dead", "peer_gone @ 0"),
    ("decoding", ALL, "dead", "had"),
)
_D_IS_GONE: tuple[Spec, ...] = (
    ("before", ALL, "lease_lapsed @ computed + lease_s", "dead"),
    ("registered", ALL, "peer_gone @ computed", "dead"),
    ("met", PUSH, "write_failed @ 0", "dead", "posts"),
    ("met", "stream", "write_failed @ computed", "dead", "posts"),
    ("met flying landed", "pull", "peer_gone @ 0", "dead"),
    ("flying", PUSH, "peer_gone @ 0", "dead", "posts"),
    ("flying", "stream", "peer_gone @ computed", "dead", "posts"),
    ("landed decoding", WRITES, "had", "dead"),
    ("decoding", "pull", "had", "dead"),
)
_LEGS_CLOSE: tuple[Spec, ...] = (
    ("before", ALL, "=aborted", "-"),
    ("registered", ALL, "=aborted", "cancelled @ 0"),
    ("met flying", "stream", "aborted @ 0", "cancelled @ 0"),
    ("landed", WRITES, "had", "cancelled @ 0"),
    ("landed", "pull", "ok @ 0", "cancelled @ 0"),
    _HAD,
)
_WORD_LOST: tuple[Spec, ...] = (
    ("before registered", PUSH, "transfer_timeout @ computed + transfer_timeout_s",
        "transfer_timeout @ computed + transfer_timeout_s / computed + transfer_timeout_s + settle",
        "posts quarantine"),
    ("before", "stream", "ok @ comes", "ok @ comes"),
    ("registered", "stream", "ok @ computed", "ok @ computed"),
    ("before", "pull", "cancelled @ comes + prefill_timeout_s", "transfer_timeout @ comes + prefill_timeout_s"),
    ("registered", "pull", "cancelled @ prefill_timeout_s", "transfer_timeout @ prefill_timeout_s"),
    ("met flying", PUSH, "ok @ 0", "transfer_timeout @ transfer_timeout_s"),
    ("met flying", "stream", "ok @ computed", "ok @ computed"),
    ("met flying landed", "pull", "cancelled @ lease_s", "transfer_timeout @ lease_s"),
    ("landed", WRITES, "had", "transfer_timeout @ transfer_timeout_s"),
    _HAD,
)  # fmt: skip
_KILLED = (
    "tests/fault/test_processes.py::test_killed",
    "tests/fault/test_processes.py::test_killed_in_the_middle_of_a_stream",
    "tests/fault/test_processes.py::test_killed_while_reads_are_in_flight",
    "tests/fault/test_processes.py::test_killed_in_the_middle_of_a_pull",
    "tests/fault/test_processes.py::test_killed_while_it_reads_within_the_machine",
    "tests/fault/test_engines.py::test_killed_at_each_stage",
    "tests/vllm/test_killed.py::test_each_engine_killed_with_writes_in_flight_and_started_again",
)
_ROUTER_502 = "502 `engine_error`"
_P_ANSWERED_OR_NOT = {
    "before registered": f"{_ROUTER_502} (P's leg broke)",
    "met flying:stream": f"{_ROUTER_502} (P's leg broke)",
    "met flying landed": f"502 `transfer_failed`, or {_ROUTER_502} (P's leg broke) if P had not answered",
}

MATRIX: tuple[Row, ...] = (
    Row(
        "P dies",
        "P's process ends, as by SIGKILL.",
        (("before", ALL, "dead", "peer_unreachable @ comes + connect_timeout_s"), *_P_IS_GONE),
        client=_P_ANSWERED_OR_NOT,
        more=_KILLED,
    ),
    Row(
        "D dies",
        "D's process ends, as by SIGKILL. P computes on here; the router closes its leg, which ends it sooner.",
        _D_IS_GONE,
        client={
            "before": f"{_ROUTER_502} (D's leg broke), or 503 `peer_unreachable` (D's leg is refused) if it came later",
            "registered met flying landed": f"{_ROUTER_502} (D's leg broke)",
            "decoding": f"{_ROUTER_502} (D's leg broke); if it streams, one error event and the end",
        },
        more=_KILLED,
    ),
    Row(
        "router dies",
        "Its connections close, so both engines abort what they have of the request; a decode leg that was not sent "
        "yet never comes.",
        (*_LEGS_CLOSE, ("met flying", WHOLE, "cancelled @ 0", "cancelled @ 0")),
        whatever="its connection breaks",
        more=("tests/fault/test_router.py::test_router_killed",),
    ),
    Row(
        "client leaves",
        "The router closes both legs, and tells P to let go of what D may not have fetched.",
        (*_LEGS_CLOSE, ("met flying", WHOLE, "abandoned @ 0", "cancelled @ 0")),
        whatever="is gone",
        more=(
            "tests/fault/test_router.py::test_client_leaves_at_each_stage",
            "tests/vllm/test_errors.py::test_client_leaves_while_decode_waits",
            "tests/vllm/test_router.py::test_many_clients_leave_at_random_moments",
        ),
    ),
    Row(
        "request aborted on P",
        "P's engine aborts the request. Once all its KV was handed over, it has ended there, and the abort finds "
        "nothing.",
        (
            ("before", ALL, "=aborted", "aborted @ comes"),
            ("registered", ALL, "=aborted", "aborted @ 0"),
            ("met flying", WHOLE, "ok @ 0", "ok @ 0"),
            ("met flying", "stream", "aborted @ 0", "aborted @ 0"),
            *_rest("landed", "decoding"),
        ),
        client={"before registered met flying": f"{_ROUTER_502} (P's leg says that it was aborted)"},
        more=("tests/vllm/test_stream.py::test_aborts_at_random_times_leave_nothing",),
    ),
    Row(
        "request aborted on D",
        "D's engine aborts the request. Before it has blocks, P isn't told by the engine of it; the router's word is "
        "in the row 'client leaves'.",
        (
            ("before", ALL, "lease_lapsed @ computed + lease_s", "-"),
            ("registered", ALL, "cancelled @ computed", "cancelled @ 0"),
            ("met flying", WHOLE, "cancelled @ 0", "cancelled @ 0"),
            ("met flying", "stream", "cancelled @ computed", "cancelled @ 0"),
            ("landed", WRITES, "had", "cancelled @ 0"),
            ("landed", "pull", "ok @ 0", "cancelled @ 0"),
            _HAD,
        ),
        whatever="its answer, ended by D with `abort`",
        more=("tests/vllm/test_errors.py::test_decode_queue_aborted",),
    ),
    Row(
        "request preempted on P",
        "P's engine takes the prompt's blocks back and computes it anew. Those that were handed over are fenced "
        "before: of a stream the next attempt is written over the first; a push or pull whose KV was complete ends.",
        (
            *_rest("before", "registered"),
            ("met flying", WHOLE, "aborted @ 0", "aborted @ 0"),
            ("met flying", "stream", "ok @ computed", "ok @ computed"),
            ("landed", WRITES, "had", "ok @ 0"),
            ("landed", "pull", "aborted @ 0", "aborted @ 0"),
            _HAD,
        ),
        more=(
            "tests/vllm/test_stream.py::test_a_prompt_preempted_in_its_middle_is_written_anew",
            "tests/integration/engine/test_pair.py::test_prompts_that_are_streamed_and_preempted_in_their_middle",
        ),
    ),
    Row(
        "request preempted on D",
        "D's engine takes a request's blocks back. It does so to running requests only.",
        (
            (
                "before registered met flying landed",
                "a request that waits for its KV does not run: engines preempt what runs",
            ),
            (
                "decoding",
                "the transfer is over, and the engine computes the prompt anew itself; it asks for no second one",
            ),
        ),
        more=(
            "tests/fault/test_scheduler.py::test_a_request_that_waits_for_its_kv_is_never_preempted",
            "tests/fault/test_scheduler.py::test_preempted_while_it_decodes_it_asks_for_nothing",
            "tests/vllm/test_pools.py::test_who_is_preempted_recomputes_and_both_are_right",
            "tests/integration/engine/test_pair.py::test_small_pools_preempt_and_answers_stay_right",
        ),
    ),
    Row(
        "P restarts",
        "P's process ends and another one listens at the same address, at once.",
        (
            ("before", ALL, "dead", "prefill_never_came @ comes + registration_timeout_s"),
            *_P_IS_GONE,
        ),
        client=_P_ANSWERED_OR_NOT,
        more=_KILLED,
    ),
    Row(
        "D restarts",
        "D's process ends and another one is there, at once. P computes on here, as above.",
        _D_IS_GONE,
        client={
            "before registered met flying landed": f"{_ROUTER_502} (D's leg broke)",
            "decoding": f"{_ROUTER_502} (D's leg broke); if it streams, one error event and the end",
        },
        more=_KILLED,
    ),
    Row(
        "handshake fails",
        "The connection breaks, and P answers no greeting from then on. (Where it refuses, requests fail at once with "
        "its reason.) It is greeted again every `connect_timeout_s`.",
        (
            ("before", ALL, "lease_lapsed @ computed + lease_s", "peer_unreachable @ comes + connect_timeout_s"),
            ("registered", ALL, "peer_gone @ computed", "peer_gone @ 0 / heard + settle", "quarantine"),
            ("met flying", WHOLE, "peer_gone @ 0", "peer_gone @ 0 / heard + settle", "posts quarantine"),
            ("met flying", "stream", "peer_gone @ computed", "peer_gone @ 0 / heard + settle", "posts quarantine"),
            ("landed", WRITES, "had", "peer_gone @ 0 / heard + settle", "quarantine"),
            ("landed", "pull", "peer_gone @ 0", "peer_gone @ 0"),
            _HAD,
        ),
        more=(
            "tests/fault/test_processes.py::test_a_side_channel_that_is_slow_or_blocked",
            "tests/vllm/test_errors.py::test_side_channel_accepts_and_stays_mute",
            "tests/vllm/test_errors.py::test_peer_not_reachable",
        ),
    ),
    Row(
        "connection breaks",
        "Only the side channel's, and it is made again at once. Copies that are under way can't be called back: they "
        f"go on for {CUT_S:g} s more, and P welcomes D again only when they have ended.",
        (
            *_rest("before"),
            ("registered", ALL, "peer_gone @ computed", "peer_gone @ 0 / settle", "quarantine"),
            ("met flying", PUSH, "peer_gone @ 0", "peer_gone @ 0 / over + settle", "posts quarantine"),
            ("met flying", "stream", "peer_gone @ computed", "peer_gone @ 0 / over + settle", "posts quarantine"),
            ("met flying", "pull", "peer_gone @ 0", "peer_gone @ 0 / over", "posts quarantine"),
            ("landed", WRITES, "had", "peer_gone @ 0 / settle", "quarantine"),
            ("landed", "pull", "peer_gone @ 0", "peer_gone @ 0"),
            _HAD,
        ),
        more=("tests/fault/test_processes.py::test_connection_cut_while_writes_are_in_flight",),
    ),
    Row(
        "registration lost",
        "P never hears of D's blocks, though their connection stands.",
        (
            ("before", ALL, "lease_lapsed @ computed + lease_s", "transfer_timeout @ comes + prefill_timeout_s"),
            ("registered met flying landed decoding", "P has it"),
        ),
        more=(
            "tests/vllm/test_errors.py::test_no_registration_ever_comes",
            "tests/integration/engine/test_faults.py::test_a_lost_message_ends_in_one_error",
        ),
    ),
    Row(
        "registration twice",
        "P hears of D's blocks twice; at later stages again what it heard long ago.",
        _UNCHANGED,
    ),
    Row(
        "notification lost",
        "What P (where D reads: the next of both) says next is lost, though their connection stands: `Begin`, `Seal`, "
        "`Grant`, `Landed`, `Fetched`. A lost `Begin` leaves D asleep, so over TCP the bytes don't move; a lost `Seal` "
        "changes nothing.",
        _WORD_LOST,
        more=("tests/integration/engine/test_faults.py::test_a_lost_message_ends_in_one_error",),
    ),
    Row(
        "notification late",
        "The same, and it comes 30 s later, when every limit has passed: it meets nothing.",
        _WORD_LOST,
    ),
    Row("notification twice", "The same, and it comes twice.", _UNCHANGED),
    Row(
        "notifications out of order",
        "The next two that P says change places. (Their connection keeps the order; a foreign one might not.)",
        (
            *(spec for spec in _UNCHANGED if spec[1] == WRITES and spec[0] == "before"),
            ("registered", WRITES, "ok @ computed", "ok @ computed"),
            ("met flying", "stream", "ok @ computed", "ok @ computed"),
            ("met flying landed:push pull-write", "one word is left, and nothing to change places with"),
            ("landed:stream", "one word is left, and nothing to change places with"),
            ("before registered met flying landed:pull", "each word waits for the other side's"),
            _HAD,
        ),
    ),
    Row(
        "WRITE fails",
        "The fabric says so: when the copy is posted, or while it is under way. Where D reads, it is its READ.",
        (
            ("before registered", WRITES, "write_failed @ computed", "write_failed @ computed", "posts"),
            ("before registered", "pull", "read_failed @ computed", "read_failed @ computed", "posts"),
            ("met", PUSH, "write_failed @ 0", "write_failed @ 0", "posts"),
            ("met", "stream", "write_failed @ computed", "write_failed @ 0", "posts"),
            ("flying", PUSH, "write_failed @ 0", "write_failed @ 0 / settle", "posts quarantine"),
            ("flying", "stream", "write_failed @ computed", "write_failed @ 0 / settle", "posts quarantine"),
            ("met flying", "pull", "read_failed @ 0", "read_failed @ 0", "posts"),
            ("landed decoding", "all of them have completed"),
        ),
    ),
    Row(
        "link frozen",
        f"No message and no byte passes for {FROZEN_S:g} s, longer than a lease, and no connection breaks.",
        (
            ("before", ALL, "lease_lapsed @ computed + lease_s", "peer_gone @ lease_s / thaw + settle", "quarantine"),
            ("registered", WRITES, "peer_gone @ lease_s", "peer_gone @ lease_s / thaw + settle", "posts quarantine"),
            ("registered", "pull", "peer_gone @ lease_s", "peer_gone @ lease_s / thaw + settle", "quarantine"),
            ("met flying", WRITES, "peer_gone @ lease_s", "peer_gone @ lease_s / thaw + settle", "posts quarantine"),
            ("met flying", "pull", "peer_gone @ lease_s", "peer_gone @ lease_s / thaw", "posts quarantine"),
            ("landed", WRITES, "had", "peer_gone @ lease_s / thaw", "quarantine"),
            ("landed", "pull", "peer_gone @ lease_s", "transfer_timeout @ lease_s"),
            _HAD,
        ),
        more=(
            "tests/fault/test_processes.py::test_stopped",
            "tests/fault/test_processes.py::test_a_side_channel_that_is_slow_or_blocked",
            "tests/fault/test_processes.py::test_a_stopped_writer_that_holds_too_much_is_cut_off_and_reaches_nothing",
            "tests/vllm/test_errors.py::test_stopped_prefill_engine_keeps_its_claim_on_the_blocks",
        ),
    ),
    Row(
        "link slow",
        "Every message half a second late, and one region each eighth of a second.",
        (
            ("before", ALL, "ok @ comes + slow", "ok @ comes + slow"),
            ("registered", ALL, "ok @ computed + slow", "ok @ computed + slow"),
            ("met flying", WHOLE, "ok @ slow", "ok @ slow"),
            ("met flying", "stream", "ok @ computed + slow", "ok @ computed + slow"),
            ("landed", WRITES, "had", "ok @ slow"),
            ("landed", "pull", "ok @ slow", "ok @ slow"),
            _HAD,
        ),
        more=(
            "tests/fault/test_processes.py::test_a_side_channel_that_is_slow_or_blocked",
            "tests/integration/engine/test_faults.py::test_delays_only_delay",
        ),
    ),
    Row(
        "lease lapses, P slow",
        "Prefill, or the copy, takes longer than its limit. A copy can't be called back: D's blocks wait for its end.",
        (
            ("before", ALL, "cancelled @ late", "transfer_timeout @ comes + prefill_timeout_s"),
            ("registered", ALL, "cancelled @ late", "transfer_timeout @ prefill_timeout_s"),
            (
                "met flying",
                PUSH,
                "cancelled @ transfer_timeout_s",
                "transfer_timeout @ transfer_timeout_s / thaw",
                "posts quarantine",
            ),
            (
                "met flying",
                "stream",
                "transfer_timeout @ late",
                "transfer_timeout @ transfer_timeout_s / thaw",
                "posts quarantine",
            ),
            (
                "met flying",
                "pull",
                "read_failed @ transfer_timeout_s",
                "transfer_timeout @ transfer_timeout_s / thaw",
                "posts quarantine",
            ),
            *_rest("landed", "decoding"),
        ),
        more=("tests/vllm/test_errors.py::test_prefill_never_comes",),
    ),
    Row(
        "lease lapses, D slow",
        "D comes twice as late as a lease; where it reads, it does so for longer than a lease. A D that is "
        "there has all the time of its own limits.",
        (
            ("before", ALL, "lease_lapsed @ computed + lease_s", "lease_lapsed @ comes_late"),
            ("met flying", "pull", "ok @ reads", "ok @ reads"),
            *(spec for spec in _rest("registered", "landed", "decoding")),
            ("met flying", PUSH, "ok @ 0", "ok @ 0"),
            ("met flying", "stream", "ok @ computed", "ok @ computed"),
        ),
        more=(
            "tests/integration/test_transfer_nixl.py::test_killed_d_frees_the_source_by_its_lease",
            "tests/vllm/test_errors.py::test_no_registration_ever_comes",
        ),
    ),
    Row(
        "pool of D full",
        "D's request queues for blocks for 15 s, more than two leases. D says so (`Waiting`), and P waits.",
        (
            ("before", ALL, "ok @ queue", "ok @ queue"),
            ("registered met flying landed decoding", "it has its blocks"),
        ),
    ),
    Row(
        "pool of P full",
        "P's request queues for blocks, or for the rest of them, for 15 s.",
        (
            ("before registered", ALL, "ok @ queue", "ok @ queue"),
            ("met flying", "stream", "ok @ queue", "ok @ queue"),
            ("met flying:push pull pull-write", "P has all the blocks that the prompt needs"),
            ("landed decoding", "P has all the blocks that the prompt needs"),
        ),
    ),
    Row(
        "clocks differ by an hour",
        "P's clock is an hour ahead of D's. No message says a point in time.",
        _UNCHANGED,
        more=("tests/integration/transfer/test_core.py::test_c56_clocks_that_differ_by_hours",),
    ),
    Row(
        "more requests than leases",
        "Forty more prompts are computed at that moment, and no D comes for them: each is freed at the end of its own "
        "lease, whatever this transfer does.",
        tuple((*spec[:4], "expired") for spec in _UNCHANGED),
    ),
    Row(
        "engine stalls for 5 s",
        "Neither engine loop says or hears anything for 5 s. The transfer threads go on: what needs no engine is not "
        "delayed, and the other side doesn't take it for dead.",
        (
            ("before", ALL, "ok @ comes + stall", "ok @ comes + stall"),
            ("registered", ALL, "ok @ computed + stall", "ok @ computed + stall"),
            ("met flying", WHOLE, "ok @ 0", "ok @ 0"),
            ("met flying", "stream", "ok @ computed + stall", "ok @ computed + stall"),
            *_rest("landed", "decoding"),
        ),
        more=("tests/fault/test_engines.py::test_an_engine_that_stalls",),
    ),
)


def cells() -> list[Cell]:
    return [cell for row in MATRIX for cell in row.cells()]


def missing() -> list[tuple[str, str, str]]:
    """(row, stage, mode) that no cell, or more than one, speaks of."""
    said: dict[tuple[str, str, str], int] = {}
    for cell in cells():
        for mode in cell.modes:
            key = (cell.row, cell.stage, mode)
            said[key] = said.get(key, 0) + 1
    every = [(row.name, stage, mode) for row in MATRIX for stage in STAGES for mode in MODES]
    return [key for key in every if said.get(key) != 1] + [key for key in said if key not in every]
