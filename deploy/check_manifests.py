"""Holds the manifests in deploy/kubernetes against Kubernetes' own schemas, strictly: `make check-deploy`.

Needs the packages kubernetes-validate and pyyaml, which are too large for every run of the tests.
"""

import sys
from pathlib import Path

import kubernetes_validate
import yaml

FOLDER = Path(__file__).resolve().parent / "kubernetes"
VERSIONS = ("1.29", "1.32", "1.35", "1.37")


def main() -> int:
    faults = checked = 0
    for file in sorted(FOLDER.glob("*.yaml")):
        if file.name == "kustomization.yaml":  # is of kustomize, not of the cluster
            continue
        for document in yaml.safe_load_all(file.read_text()):
            name = f"{file.name}: {document['kind']} {document['metadata']['name']}"
            for version in VERSIONS:
                checked += 1
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    faults += 1
                    print(f"{name}, Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}")
    print(f"{checked} checks, {faults} faults (Kubernetes {', '.join(VERSIONS)})")
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
