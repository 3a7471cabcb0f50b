"""Judges Kubernetes documents by the schemas of Kubernetes, KEDA and the Prometheus operator; JSON in, problems out.

Runs in an environment of its own (`test_kubernetes.py`): one of these packages would plug itself into every pytest run.
"""

import json
import sys
from typing import Any

import kubernetes_validate
from cloudcoil.models.keda.v1alpha1 import ScaledObject, TriggerAuthentication
from cloudcoil.models.prometheus_operator.v1 import PodMonitor
from pydantic import ValidationError


def main() -> None:
    """One line for each document that does not fit."""
    custom: dict[str, Any] = {
        "ScaledObject": ScaledObject,
        "TriggerAuthentication": TriggerAuthentication,
        "PodMonitor": PodMonitor,
    }
    for document in json.load(sys.stdin):
        kind = document["kind"]
        try:
            if kind not in custom:
                kubernetes_validate.validate(document, "1.33", strict=True)
                continue
            model = custom[kind].model_validate(document)
            if model.model_dump(by_alias=True, exclude_unset=True, mode="json") != document:
                sys.stdout.write(f"{kind}: fields that its schema does not know\n")
        except (kubernetes_validate.ValidationError, ValidationError) as error:
            sys.stdout.write(f"{kind}: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    main()
