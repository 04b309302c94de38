"""deploy/kubernetes: manifests that agree with each other, with the image, the routes, the settings and the CLI."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_kit import IMAGE_USER, accepts, parses, routes, setting_names

from mlaprep.templates.plans import parse_plan

Document = dict[str, Any]
SECRETS = {"MLAPREP_REDIS_URL": "rediss://:a-password@redis:6379/0"}
"""What a secret may hold, where not anything."""


@dataclass(frozen=True)
class Pod:
    """A pod's template and where it comes from."""

    owner: str
    labels: dict[str, str]
    spec: Document
    serves: bool

    @property
    def containers(self) -> list[Document]:
        containers: list[Document] = self.spec["containers"]
        return containers


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def documents(folder: Path) -> list[Document]:
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [document for name in listed for document in yaml.safe_load_all((folder / name).read_text())]


@pytest.fixture(scope="module")
def pods(documents: list[Document]) -> list[Pod]:
    return list(_pods(documents))


def _pods(documents: list[Document]) -> Iterator[Pod]:
    for document in documents:
        spec = document.get("spec", {})
        template = spec.get("jobTemplate", {"spec": spec})["spec"].get("template")
        if template:
            owner = f"{document['kind']} {document['metadata']['name']}"
            yield Pod(owner, template["metadata"]["labels"], template["spec"], document["kind"] == "Deployment")


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def config(documents: list[Document]) -> dict[str, str]:
    data: dict[str, str] = of_kind(documents, "ConfigMap")["mlaprep"]["data"]
    return data


def test_every_file_is_applied_and_every_kind_is_there(folder: Path, documents: list[Document]) -> None:
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(file.name for file in folder.iterdir())
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names))
    assert {kind for kind, _ in names} == {
        "ServiceAccount", "ConfigMap", "Service", "Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget",
        "NetworkPolicy", "Job", "CronJob",
    }  # fmt: skip


def test_pods_may_do_nothing_that_they_need_not(pods: list[Pod], documents: list[Document]) -> None:
    for pod in pods:
        spec = pod.spec
        account = of_kind(documents, "ServiceAccount")[spec["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is spec["automountServiceAccountToken"] is False, pod.owner
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"]) == IMAGE_USER
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} == set(container["resources"]["requests"]) == set(container["resources"]["limits"])
            assert container["image"] == "mlaprep"


def test_no_service_is_mistaken_for_a_setting(pods: list[Pod], documents: list[Document]) -> None:
    """Kubernetes describes each Service in variables of every pod, and one called mlaprep sets MLAPREP_PORT."""
    assert "mlaprep" in of_kind(documents, "Service")
    assert not accepts({"MLAPREP_PORT": "tcp://10.0.0.1:8400", "MLAPREP_TOKEN": "t"}, [])
    assert all(pod.spec["enableServiceLinks"] is False for pod in pods)


def test_probes_ask_routes_that_exist(pods: list[Pod]) -> None:
    probed = set()
    for pod in pods:
        for container in pod.containers:
            ports = {port["name"] for port in container.get("ports", ())}
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                if probe := container.get(kind):
                    assert probe["httpGet"]["port"] in ports
                    assert ("GET", probe["httpGet"]["path"]) in routes()
                    probed.add((kind, probe["httpGet"]["path"]))
    assert probed == {("livenessProbe", "/healthz"), ("readinessProbe", "/readyz"), ("startupProbe", "/healthz")}


def test_variables_are_settings_with_values_that_hold(pods: list[Pod], documents: list[Document]) -> None:
    for pod in pods:
        for container in pod.containers:
            variables = {e["name"]: e.get("value", SECRETS.get(e["name"], "x")) for e in container.get("env", ())}
            for source in container.get("envFrom", ()):
                variables |= of_kind(documents, "ConfigMap")[source["configMapRef"]["name"]]["data"]
            assert set(variables) <= setting_names(), pod.owner
            if container["args"][0] == "serve":
                assert accepts(variables, container["args"]), pod.owner


def test_commands_are_those_of_the_command_line(pods: list[Pod]) -> None:
    commands = {container["args"][0] for pod in pods for container in pod.containers if parses(container["args"])}
    assert {"serve", "warmup"} <= commands


def test_the_plan_is_one(pods: list[Pod], documents: list[Document]) -> None:
    (text,) = of_kind(documents, "ConfigMap")["mlaprep-warmup"]["data"].values()
    plan = parse_plan(yaml.safe_load(text), lambda most: [])
    assert len(plan.targets) >= 20
    for pod in pods:
        for container in pod.containers:
            if "--file" in container["args"]:
                file = container["args"][container["args"].index("--file") + 1]
                assert {mount["mountPath"] for mount in container["volumeMounts"]} == {str(Path(file).parent)}


def test_volumes_and_what_they_are_made_of_exist(pods: list[Pod], documents: list[Document], root: Path) -> None:
    maps = of_kind(documents, "ConfigMap")
    cache = re.search(r"MLAPREP_CACHE_DIR=(\S+)", (root / "Dockerfile").read_text())
    assert cache
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert set(mounts) == set(volumes), pod.owner
            for name, volume in volumes.items():
                assert ("emptyDir" in volume) is not mounts[name].get("readOnly", False), "what can be written to"
            if pod.serves:
                assert str(Path(cache[1]).parent) in {mount["mountPath"] for mount in mounts.values()}
        assert all(v["configMap"]["name"] in maps for v in volumes.values() if "configMap" in v)


def test_secrets_are_named_where_people_look_for_them(folder: Path, pods: list[Pod]) -> None:
    used = set()
    for pod in pods:
        used |= {(v["secret"]["secretName"], "tokens") for v in pod.spec["volumes"] if "secret" in v}
        for container in pod.containers:
            for entry in container.get("env", ()):
                if key := entry.get("valueFrom", {}).get("secretKeyRef"):
                    used.add((key["name"], key["key"]))
    head = (folder / "kustomization.yaml").read_text()
    assert used == set(re.findall(r"^#   (mlaprep-[a-z]+) +([a-z]+) ", head, re.MULTILINE))


def test_selectors_select(pods: list[Pod], documents: list[Document]) -> None:
    def selected(labels: dict[str, str]) -> list[Pod]:
        return [pod for pod in pods if labels.items() <= pod.labels.items()]

    deployments = of_kind(documents, "Deployment")
    for name, document in deployments.items():
        assert [p.owner for p in selected(document["spec"]["selector"]["matchLabels"])] == [f"Deployment {name}"]
    for service in of_kind(documents, "Service").values():
        (pod,) = selected(service["spec"]["selector"])
        ports = {port["name"]: port["containerPort"] for c in pod.containers for port in c["ports"]}
        assert all(port["port"] == ports[port["targetPort"]] for port in service["spec"]["ports"])
    for budget in of_kind(documents, "PodDisruptionBudget").values():
        assert len(selected(budget["spec"]["selector"]["matchLabels"])) == 1
    for scaler in of_kind(documents, "HorizontalPodAutoscaler").values():
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "two would decide"
        assert scaler["spec"]["minReplicas"] >= 2
    # A policy of its own for every pod, in both directions.
    held = []
    for policy in of_kind(documents, "NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        held += selected(policy["spec"]["podSelector"]["matchLabels"])
    assert sorted(pod.owner for pod in held) == sorted(pod.owner for pod in pods)


def test_a_drain_is_given_its_time(documents: list[Document], pods: list[Pod]) -> None:
    grace = int(config(documents)["MLAPREP_SHUTDOWN_GRACE_S"])
    for pod in pods:
        if pod.serves:
            waits = [int(c["lifecycle"]["preStop"]["exec"]["command"][1]) for c in pod.containers if "lifecycle" in c]
            assert pod.spec["terminationGracePeriodSeconds"] > grace + sum(waits), pod.owner
