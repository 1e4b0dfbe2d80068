"""What ``deploy/kubernetes`` sends to a cluster: valid in its last three versions, consistent, and confined."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from packhorse_service.commands import app
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.config.yaml_check import checked
from packhorse_service.server.authentication import ALL
from packhorse_service.server.bind_policy import is_private
from packhorse_service.server.key_generation import make_client, make_server
from tests.deploy.corpus import write_corpus
from tests.deploy.kustomize import Resource, render
from tests.deploy.tools import DEPLOY, missing, run

KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATIONS = {path.parent.name: path.parent for path in sorted(KUBERNETES.rglob("kustomization.yaml"))}
VERSIONS = 3
OF_OTHERS = {"ServiceMonitor"}  # kinds that are no part of Kubernetes


@pytest.fixture(params=list(KUSTOMIZATIONS.values()), ids=list(KUSTOMIZATIONS))
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return render(request.param)


def of_kind(resources: list[Resource], kind: str) -> Resource:
    (found,) = (resource for resource in resources if resource["kind"] == kind)
    return found


def pod_of(resources: list[Resource]) -> Resource:
    """What the template of the one workload says of its pods."""
    (workload,) = (resource for resource in resources if resource["kind"] in ("StatefulSet", "Job"))
    pod: Resource = workload["spec"]["template"]["spec"]
    return pod


def containers(pod: Resource) -> Iterator[Resource]:
    yield from (*pod["initContainers"], *pod["containers"])


def latest_versions() -> list[str]:
    """The last versions of Kubernetes whose schemas the validator holds."""
    package = find_spec("kubernetes_validate")
    if package is None or package.origin is None:
        missing("kubernetes-validate")
        return []
    schemas = (Path(package.origin).parent / "kubernetes-json-schema").glob("v*-local-strict")
    versions = sorted(tuple(map(int, path.name[1:].split("-")[0].split("."))) for path in schemas)
    return [".".join(map(str, version)) for version in versions[-VERSIONS:]]


def test_every_resource_is_valid_in_the_last_versions_of_kubernetes(resources: list[Resource], tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump_all(found for found in resources if found["kind"] not in OF_OTHERS))
    versions = latest_versions()
    assert len(versions) == VERSIONS
    for version in versions:
        run(["kubernetes-validate", "--strict", "--kubernetes-version", version, rendered])


def test_the_containers_are_confined_as_the_restricted_pod_standard_asks(resources: list[Resource]) -> None:
    pod = pod_of(resources)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in containers(pod):
        confined = container["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_names_within_a_pod_lead_somewhere(resources: list[Resource]) -> None:
    pod = pod_of(resources)
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in containers(pod):
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
        ports = {port["name"] for port in container.get("ports", ())}
        probes = (container[name]["httpGet"] for name in container if name.endswith("Probe"))
        assert {(probe["port"], probe["path"]) for probe in probes} <= {(p, f"/{z}z") for p in ports for z in ZS}
        assert ":" in container["image"], "an image of a kustomization has a version"
    maps = {resource["metadata"]["name"] for resource in resources if resource["kind"] == "ConfigMap"}
    mounted = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert mounted - maps <= {"packhorse-clients"}, "keygen's list of clients is no part of the repository"


ZS = ("health", "ready")


def test_what_selects_the_server_selects_its_pods() -> None:
    resources = render(KUBERNETES / "overlays" / "prometheus")
    labels = of_kind(resources, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    service = of_kind(resources, "Service")
    assert service["spec"]["selector"].items() <= labels
    assert of_kind(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert of_kind(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["clusterIP"] == "None"
    assert of_kind(resources, "StatefulSet")["spec"]["serviceName"] == service["metadata"]["name"]


def test_the_monitor_is_scraped_where_the_service_has_it() -> None:
    """The operator's own schema is not at hand: these are the fields that it documents."""
    resources = render(KUBERNETES / "overlays" / "prometheus")
    monitor, service = of_kind(resources, "ServiceMonitor"), of_kind(resources, "Service")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint.keys() <= {"port", "path", "interval", "scrapeTimeout"}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def feed_of(resources: list[Resource]) -> ServeConfig:
    text = of_kind(resources, "ConfigMap")["data"]["feed.yaml"]
    return checked(ServeConfig, yaml.safe_load(text), "feed.yaml")


def test_the_feed_holds_its_contract(resources: list[Resource], tmp_path: Path) -> None:
    make_server(tmp_path / "keys")
    make_client(tmp_path / "keys", "trainers", ALL)
    text = of_kind(resources, "ConfigMap")["data"]["feed.yaml"]
    for place, here in (("/data/", ""), ("/keys/", "keys/"), ("/clients/", "keys/")):
        text = text.replace(place, here)
    config = tmp_path / "feed.yaml"
    config.write_text(text)
    write_corpus(config)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(config)])
    assert done.exit_code == 0, done.output


def test_a_server_on_the_network_has_keys_that_it_alone_can_read() -> None:
    resources = render(KUSTOMIZATIONS["base"])
    feed, pod = feed_of(resources), pod_of(resources)
    assert feed.curve is not None
    folders = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    (copy,) = (container for container in pod["initContainers"] if container["name"] == "key")
    assert copy["command"] == ["install", "-m", "0400", "/secret/server.key", feed.curve.key_file]
    assert volume(pod, folders["/keys"])["emptyDir"]["medium"] == "Memory"
    assert "secret" not in folders.values(), "the server reads the copy"


def test_the_sidecar_listens_in_a_folder_of_its_own_without_a_network() -> None:
    resources = render(KUSTOMIZATIONS["sidecar"])
    feed, pod = feed_of(resources), pod_of(resources)
    folder, server = pod["initContainers"]
    assert is_private(feed.listen)
    assert feed.listen == f"ipc://{folder['command'][-1]}/feed.sock"
    assert folder["command"][:-1] == ["mkdir", "-p", "-m", "0700"]
    assert server["restartPolicy"] == "Always", "a native sidecar"
    assert pod["containers"][0]["env"] == [{"name": "PACKHORSE_ENDPOINT", "value": feed.listen}]


def volume(pod: Resource, name: str) -> dict[str, Any]:
    (found,) = (found for found in pod["volumes"] if found["name"] == name)
    return dict(found)
