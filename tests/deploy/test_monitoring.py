"""Alerts and dashboard: they ask for metrics that exist, and are found where the compose file mounts them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_kit import client_metrics, service_metrics

Document = dict[str, Any]
METRIC = re.compile(r"\b(?:mlaprep|process)_[a-z_]+\b(?!\")")
SAMPLES = re.compile(r"_(?:total|bucket|sum|count|created)$")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture(scope="module")
def rules(folder: Path) -> list[Document]:
    (group,) = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Document:
    document: Document = json.loads((folder / "grafana" / "dashboard.json").read_text())
    return document


def queries(rules: list[Document], dashboard: Document) -> Iterator[str]:
    yield from (rule["expr"] for rule in rules)
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_metric_asked_for_exists(rules: list[Document], dashboard: Document) -> None:
    asked = {SAMPLES.sub("", name) for query in queries(rules, dashboard) for name in METRIC.findall(query)}
    of_clients = {name for name in asked if name.startswith("mlaprep_client_")}
    assert of_clients
    assert of_clients <= client_metrics()
    if served := service_metrics():
        assert asked - of_clients <= served


def test_alerts_say_what_is_wrong_and_what_to_do(rules: list[Document]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names))
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_panels_are_told_apart_and_do_not_overlap(dashboard: Document) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    used = {json.dumps(panel["datasource"]) for panel in panels if "datasource" in panel}
    assert used == {'{"type": "prometheus", "uid": "${datasource}"}'}, "whatever Prometheus a Grafana has"


def test_what_is_mounted_is_where_it_is_looked_for(folder: Path) -> None:
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounts = {
        name: dict(volume.split(":")[:2] for volume in compose[name]["volumes"]) for name in ("prometheus", "grafana")
    }
    prometheus = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert prometheus["rule_files"] == [mounts["prometheus"]["./alerts.yml"]]
    assert f"--config.file={mounts['prometheus']['./prometheus.yml']}" in compose["prometheus"]["command"]
    provisioning = folder / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "mlaprep.yaml").read_text())["providers"]
    shown = Path(mounts["grafana"]["./grafana/dashboard.json"])
    assert str(shown.parent) == provider["options"]["path"]
    assert compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(shown)
    assert mounts["grafana"]["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{compose['prometheus']['ports'][0].split(':')[-1]}"


def test_alerts_ask_about_jobs_that_are_scraped(folder: Path, rules: list[Document]) -> None:
    jobs = {job["job_name"] for job in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]}
    named = {name for rule in rules for name in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named <= jobs
    assert named
