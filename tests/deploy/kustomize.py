"""What ``kubectl apply -k`` would send, for the part of kustomize that ``deploy/kubernetes`` uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

__all__ = ["render"]

Resource = dict[str, Any]

KNOWN = {"apiVersion", "kind", "resources", "labels", "configMapGenerator", "images"}


def render(folder: Path) -> list[Resource]:
    """The resources of a kustomization and all that it builds on."""
    described = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert described.keys() <= KNOWN, f"{folder}: this renders {KNOWN} only"
    resources = [resource for name in described["resources"] for resource in _resources(folder / name)]
    names: dict[str, str] = {}
    for generator in described.get("configMapGenerator", ()):
        made = _config_map(folder, generator)
        names[generator["name"]] = made["metadata"]["name"]
        resources.append(made)
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in described.get("images", ())}
    for resource in resources:
        for labels in described.get("labels", ()):
            resource["metadata"].setdefault("labels", {}).update(labels["pairs"])
        _replace(resource, "image", lambda image: images.get(image, image))
        _replace(resource, "configMap", lambda reference: {**reference, "name": _renamed(reference, names)})
    return resources


def _renamed(reference: Resource, names: dict[str, str]) -> str:
    name: str = reference["name"]
    return names.get(name, name)


def _resources(path: Path) -> list[Resource]:
    return render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def _config_map(folder: Path, generator: Resource) -> Resource:
    """Its name ends in a digest, so that what refers to it changes with what it holds."""
    data = {name: (folder / name).read_text() for name in generator["files"]}
    digest = sha256(repr(data).encode()).hexdigest()[:10]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{generator['name']}-{digest}"},
        "data": data,
    }


def _replace(found: Any, key: str, change: Callable[[Any], Any]) -> None:
    """Change every value of ``key``, at any depth."""
    for inner in _mappings(found):
        if key in inner:
            inner[key] = change(inner[key])


def _mappings(found: Any) -> Iterator[Resource]:
    if isinstance(found, dict):
        yield found
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _mappings(inner)
