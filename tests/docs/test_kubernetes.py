"""examples/kubernetes: the schemas of Kubernetes, of the files and of what Kustomize makes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests; it comes with the development dependencies")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="it has the schemas; it comes with the development dependencies"
)

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSION = "1.32"
KUSTOMIZED = ("job", "tls", "launcher", "mesh")


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    return document["spec"].get("template", {}).get("spec")


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


PATCHES_AND_CUSTOM_RESOURCES = ("kustomization.yaml", "tls.yaml", "launcher.yaml", "jobset.yaml", "trainjob.yaml")
MANIFESTS = [
    pytest.param(document, id=f"{path.relative_to(FOLDER)}-{document['kind']}")
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.name not in PATCHES_AND_CUSTOM_RESOURCES
    for document in documents(path)
]


@pytest.mark.parametrize("document", MANIFESTS)
def test_a_manifest_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_the_schemas_find_mistakes() -> None:
    job = documents(FOLDER / "job" / "average.yaml")[1]
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["python"]  # codespell:ignore
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


@pytest.fixture(scope="module")
def kustomized() -> dict[str, list[dict[str, Any]]]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here, whose 'kustomize' puts the files together")
    made = {}
    for name in KUSTOMIZED:
        done = subprocess.run(
            ["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        made[name] = [document for document in yaml.safe_load_all(done.stdout) if document]
    return made


@pytest.mark.parametrize("name", KUSTOMIZED)
def test_what_kustomize_makes_is_valid(kustomized, name) -> None:
    assert kustomized[name]
    for document in kustomized[name]:
        validate(document)


def test_what_the_patches_change(kustomized) -> None:
    def job_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        (job,) = (document for document in kustomized[name] if document["kind"] == "Job")
        return job["spec"], job["spec"]["template"]["spec"]["containers"][0]

    _, plain = job_of("job")
    _, tls = job_of("tls")
    assert variables(tls)["RANKMESH_TLS"] == "require"
    assert variables(plain).items() <= variables(tls).items()
    spec, launcher = job_of("launcher")
    assert (spec["completions"], spec["parallelism"], variables(launcher)["WORLD_SIZE"]) == (2, 2, "2")
    assert launcher["command"][:4] == ["rankmesh", "run", "--nnodes", "auto"]
    assert "RANKMESH_TOKEN" in variables(launcher)


def test_no_pod_has_privileges() -> None:
    pods = [pod for parameter in MANIFESTS if (pod := pod_of(parameter.values[0])) is not None]
    assert len(pods) >= 4
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"]
        assert security["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"]["memory"]


def test_the_jobs_pods_are_for_each_other_alone() -> None:
    (policy,) = documents(FOLDER / "job" / "network-policy.yaml")
    assert policy["spec"]["podSelector"]["matchLabels"] == {"job-name": "average"}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


class TestCustomResources:
    """Their own schemas are the operators'; what is in them of Kubernetes itself is validated."""

    def test_the_jobset_has_the_job(self) -> None:
        (jobset,) = documents(FOLDER / "jobset.yaml")
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        (ranks,) = jobset["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": ranks["name"]}, **ranks["template"]}
        validate(job)
        expected = documents(FOLDER / "job" / "average.yaml")[1]["spec"]
        assert expected["template"]["spec"].pop("subdomain") == "average", "JobSet gives the pods its own"
        assert job["spec"] == expected

    def test_the_trainjobs_trainer(self) -> None:
        (train,) = documents(FOLDER / "trainjob.yaml")
        assert (train["apiVersion"], train["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
        trainer = train["spec"]["trainer"]
        container = {"name": "node", "resources": trainer["resourcesPerNode"]}
        container |= {key: trainer[key] for key in ("image", "command", "env")}
        pod = {"restartPolicy": "Never", "containers": [container]}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": pod})
        script = Path(trainer["command"][1]).name
        assert (FOLDER.parent / "torch" / script).exists()
