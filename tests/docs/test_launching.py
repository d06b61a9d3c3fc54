"""docs/launching.md: its examples are the files, and the manifest works as far as that shows without a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankmesh_agent.config.launchers import FIRST_PORT, PORTS
from rankmesh_agent.config.settings import Settings

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest; it comes with the development dependencies")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text()
KUBERNETES = ROOT / "examples" / "kubernetes"
MANIFEST = KUBERNETES / "job" / "average.yaml"


@pytest.fixture
def job():
    return list(yaml.safe_load_all(MANIFEST.read_text()))[1]


@pytest.mark.parametrize("kind", ["bash", "yaml", "python"])
def test_what_it_shows_is_in_the_examples(kind) -> None:
    folder = ROOT / "examples"
    files = [folder / "average.py", folder / "slurm" / "average.sbatch", MANIFEST, *KUBERNETES.glob("*/*.yaml")]
    texts = [re.sub(r"^ {4}", "", path.read_text(), flags=re.MULTILINE) for path in files]
    texts += [path.read_text() for path in files]
    shown = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    for text in shown:
        assert any(text in there for there in texts), text


def test_files_and_pages_that_it_names_are_there() -> None:
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path


def test_the_ports_that_it_tells() -> None:
    assert f"between {FIRST_PORT} and {FIRST_PORT + PORTS - 1}" in PAGE


def test_the_service_names_the_jobs_pods(job) -> None:
    service = next(yaml.safe_load_all(MANIFEST.read_text()))
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_each_pod_is_a_rank(job) -> None:
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "secret") for entry in container["env"]}
    assert int(variables["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    for index in range(spec["completions"]):
        settings = Settings.from_env({**variables, "JOB_COMPLETION_INDEX": str(index)})
        assert settings.launcher.kind.name == "Kubernetes"
        assert (settings.rank, settings.world_size, settings.local_rank) == (index, 4, 0)
        assert settings.token == "secret"


def test_what_it_mounts_is_what_the_page_makes(job) -> None:
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = pod["volumes"]
    folder = container["volumeMounts"][0]["mountPath"]
    script = Path(container["command"][1])
    assert str(script.parent) == folder
    assert f"kubectl create configmap {volume['configMap']['name']} --from-file=examples/{script.name}\n" in PAGE
    secret = next(entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry)
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE
    assert f"-t {container['image']} ." in PAGE
