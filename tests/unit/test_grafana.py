"""docs/grafana.json asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvferry.observe.metrics import RouterMetrics
from kvferry.observe.transfers import DEFINITIONS

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = [one["query"]["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
METRIC = re.compile(r"\b(?:kvferry_router_|vllm:|kvferry:)\w+")
ENGINES = {"model_name", "engine"}
"""Labels of every metric of an engine."""


def known() -> dict[str, set[str]]:
    """Names as they are asked for -> their labels."""
    kinds = {one.name: (one.kind, {*one.labels, *ENGINES}) for one in DEFINITIONS}
    for collector in RouterMetrics().registry._collector_to_names:
        (family,) = collector.describe()
        kinds[family.name] = (family.type, set(collector._labelnames))  # type: ignore[attr-defined]
    names: dict[str, set[str]] = {}
    for name, (kind, labels) in kinds.items():
        if kind == "histogram":
            names |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
        else:
            names[name + ("_total" if kind == "counter" else "")] = labels
    return names


NAMES = known()


@pytest.mark.parametrize(
    ("title", "query", "legend"), QUERIES, ids=[f"{title}-{n}" for n, (title, *_) in enumerate(QUERIES)]
)
def test_every_query_names_what_there_is(title: str, query: str, legend: str) -> None:
    metrics = METRIC.findall(query)
    assert metrics, query
    asked = set(re.findall(r"(\w+)\s*=~?", query))
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        asked |= {label.strip() for label in group.split(",")}
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    page = (DOCS / "metrics.md").read_text()
    for metric in metrics:
        assert metric in NAMES, f"{title}: {metric}"
        assert asked | shown <= NAMES[metric], f"{title}: {metric} has no {(asked | shown) - NAMES[metric]}"
        assert f"`{re.sub('_(sum|count|bucket)$', '', metric)}`" in page
    if " by (" in query:
        grouped = {
            label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.replace(" ", "").split(",")
        }
        assert shown <= grouped, "a label that the sum has dropped"


def test_variables_too() -> None:
    for query in VARIABLES:
        assert all(metric in NAMES for metric in METRIC.findall(query)) and METRIC.search(query)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == {one["name"] for one in BOARD["templating"]["list"]}


def test_the_panels_that_users_look_for() -> None:
    asked = " ".join(query for _, query, _ in QUERIES)
    for name in (
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
        *("requests_total", "pd_outcomes_total", "worker_health", "engine_open_transfers", "pd_handover_seconds"),
        *("vllm:nixl_bytes_transferred", "cb_state", "retries_total", "flow_control_queue_size"),
    ):
        assert name in asked
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
