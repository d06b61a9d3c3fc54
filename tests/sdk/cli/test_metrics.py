"""``rankmesh metrics``: the dashboard and the alert rules fit what a gateway and an agent answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as read_text
from support.command import Job, here

NAME = re.compile(r"\b(?:rankmesh|process|python)_\w+")
LABELS = re.compile(r"\b(?:by|on|group_left) \(([^)]+)\)|(\w+)=~?\"|\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
OF_PROMETHEUS = {"instance", "le"}


def dashboard() -> Iterator[tuple[str, str]]:
    """Yield the expressions of the dashboard, each with what else names labels."""
    document = json.loads(here("metrics", "--grafana").stdout)
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    for panel in document["panels"]:
        yield from ((target["expr"], target["legendFormat"]) for target in panel["targets"])
    yield from ((each["query"], "") for each in document["templating"]["list"] if each["type"] == "query")


def rules() -> Iterator[tuple[str, str]]:
    (group,) = yaml.safe_load(here("metrics", "--alerts").stdout)["groups"]
    return ((rule["expr"], " ".join(rule["annotations"].values())) for rule in group["rules"])


@pytest.mark.processes
def test_there_is_each_metric_and_label(job: Job):
    job.here("store", "set", "key", "value")
    agent = job.all_alive()[0]["member"]["http"]
    pages = [job.here("get", url).stdout for url in ("/metrics", f"{agent}/metrics")]
    samples = [each for page in pages for family in read_text(page) for each in family.samples]
    names = {each.name for each in samples}
    # Prometheus has the name of the scrape job as job, and RankMesh's as exported_job.
    labels = {"exported_job" if name == "job" else name for each in samples for name in each.labels} | OF_PROMETHEUS
    expressions = [*dashboard(), *rules()]
    assert len(expressions) > 15
    for expression, text in expressions:
        assert NAME.findall(expression), expression
        assert set(NAME.findall(expression)) <= names, expression
        used = {name.strip() for each in LABELS.findall(f"{expression} {text}") for name in ",".join(each).split(",")}
        assert used - {""} <= labels, expression


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus has it")
def test_prometheus_takes_the_rules_and_the_expressions(tmp_path: Path):
    path = tmp_path / "rules.yaml"
    records = [
        {"record": f"panel:{number}", "expr": expr.replace("$job", "a")} for number, (expr, _) in enumerate(dashboard())
    ]
    panels = {"name": "panels", "rules": [each for each in records if "label_values" not in each["expr"]]}
    path.write_text(yaml.safe_dump({"groups": [*yaml.safe_load(here("metrics", "--alerts").stdout)["groups"], panels]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "SUCCESS" in done.stdout) == (0, True), done.stdout + done.stderr


def test_one_of_the_two():
    done = here("metrics")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("rankmesh: give one of --grafana and --alerts")
