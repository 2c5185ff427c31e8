"""Kubernetes manifests: a workload and a Service for every pool, and the gateway with its fleet file.

With `inference_pool`, each pool is an InferencePool of the Gateway API, and an endpoint picker takes the gateway's
place.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.catalog.hf import whole_config
from headway.config.placeholders import variables_of
from headway.config.scenario import Scenario
from headway.config.spec import ModelFile
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu, Pool
from headway.gateway.upstream.dialects import api_of
from headway.scenario.policies import policies_of
from headway.serving import picker
from headway.serving.export.engines import CONTAINERS, PORT, drain_command, option_of, with_own_arguments
from headway.serving.pools import DeclaredPool, declared_pools, uses_engine_priority

Manifest = dict[str, Any]
Kind = Literal["Deployment", "StatefulSet"]
GATEWAY, GATEWAY_PORT = "headway", 8080
PICKER_PORT, PICKER_HTTP_PORT = 9002, 9090
SECRET = "headway-keys"
_CONFIG_AT = "/etc/headway"
_LONGEST_START_S = 1800
"""Longest start of an engine: enough time to download the weights."""
_PERIOD_S = 10
_NOTICE_S = 5
"""Time after which the cluster sends no more connections to an ending pod, and the gateway sends it no more
requests."""
_GRACE_S = 15
"""Time for a process to end, in addition to the drain of its streams."""
_SERVING_KEYS = ("name", "seed", "policies", "cascade", "pacer", "slo", "network", "gpu_limits", "gateway", "roles")
_DROPPED_POOL_KEYS = (
    "endpoints",
    "endpoints_file",
    "processes",
    "kubernetes",
    "inference_pool",
    "coefficients",
    "image",
    "engine_args",
)
"""Keys of a pool that the exported file must not have: the pool's old location, settings for engines alone, and files
that the gateway's pod lacks."""
_OWN_OPTIONS = {
    "model": "hf_id",
    "model-path": "hf_id",
    "served-model-name": "served_name",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
    "pipeline-parallel-size": "pp",
    "pp-size": "pp",
    "data-parallel-size": "dp",
    "dp-size": "dp",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
}
"""Engine options that a key of the pool sets, because the simulation and the gateway need the value, too."""
_FIXED_OPTIONS = ("port", "host")


class ExportOptions(Struct, frozen=True):
    """Export settings that a fleet file does not contain."""

    namespace: str = "default"
    image: str = ""
    """The engines' image. Empty: the version that the engine's profile was measured with."""
    gateway_image: str = "headway:latest"
    """The gateway's image, which must have the command `headway`."""
    kind: Kind | None = None
    """The kind of workload; None: a StatefulSet, whose pods have names, or a Deployment if the gateway or an autoscaler
    scales it."""
    products: dict[str, str] = {}
    """The node label `nvidia.com/gpu.product` by GPU, if it differs from NVIDIA's name."""
    token_secret: str = ""
    """A Secret that holds Hugging Face's token under the key `token`."""
    connector: str = "NixlConnector"
    """vLLM's connector that transfers KV caches."""
    autoscale: bool = False
    """Add a HorizontalPodAutoscaler for every pool with `max_replicas`."""
    inference_pool: bool = False
    """Make every pool an InferencePool; `headway epp` picks its endpoints for a gateway of the Gateway API."""
    waiting_target: str = "5"
    """The autoscaler's target: mean number of waiting requests per engine."""


DEPLOYED_ENGINE = "vllm"
"""The engine of pools without an engine. The catalog's default is for simulations only."""


class _Dumper(yaml.SafeDumper):
    """Writes embedded files as block text, and writes no YAML references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def with_engines(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A scenario's document in which every pool has an engine, and the names of the pools that had no engine."""
    changed: list[str] = []

    def filled(pool: Any, name: str) -> Any:
        is_without = isinstance(pool, Mapping) and "model" in pool and not {"engine", "hosted"} & pool.keys()
        if is_without:
            changed.append(str(pool.get("name") or name))
        return {**pool, "engine": DEPLOYED_ENGINE} if is_without else pool

    sections = dict(document)
    if isinstance(pools := document.get("fleet"), list):
        sections["fleet"] = [filled(pool, f"fleet[{i}]") for i, pool in enumerate(pools)]
    if isinstance(combos := document.get("combos"), list):
        sections["combos"] = [
            {key: filled(part, f"combos[{i}].{key}") for key, part in combo.items()}
            if isinstance(combo, Mapping)
            else combo
            for i, combo in enumerate(combos)
        ]
    return sections, changed


def _checked_kind(scenario: Scenario, options: ExportOptions) -> Kind:
    """The kind of the pools' workloads. Raises HeadwayError for a fleet that Kubernetes cannot run with these
    options."""
    scales = scenario.spec.policies.scaling is not None
    if options.autoscale and scales:
        what = "the gateway scales by this policy already; drop the policy, or --autoscale"
        raise scenario.places.error(("policies", "scaling"), what)
    kind: Kind = options.kind or (
        "Deployment" if scales or options.autoscale or options.inference_pool else "StatefulSet"
    )
    policies_of(scenario)  # raises for a scenario with variants
    if options.inference_pool:
        _check_inference_pools(scenario, scales)
    return kind


def manifests(scenario: Scenario, options: ExportOptions) -> dict[str, str]:
    """The YAML files by name. Raises HeadwayError for a pool that Kubernetes cannot run."""
    kind = _checked_kind(scenario, options)
    by_priority, drain_s = uses_engine_priority(scenario.spec), scenario.spec.gateway.drain_s
    files: dict[str, list[Manifest]] = {}
    for each in _pools(scenario):
        with scenario.places.at(*each.at):
            _check(each)
            files[f"{each.pool.name}.yaml"] = _of_pool(each, kind, by_priority, drain_s, options)
            if options.inference_pool:
                files[f"{each.pool.name}.yaml"].append(_inference_pool(each.pool.name))
    files["gateway.yaml"] = _gateway(scenario, kind, options)
    files["kustomization.yaml"] = [
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": options.namespace,
            "resources": list(files),
        }
    ]
    return {name: _text(documents) for name, documents in files.items()}


def chart_values(scenario: Scenario, options: ExportOptions) -> str:
    """Values for the Helm chart that create the objects of `manifests` in the release's namespace.

    Raises HeadwayError for a pool that Kubernetes cannot run.
    """
    kind = _checked_kind(scenario, options)
    by_priority, drain_s = uses_engine_priority(scenario.spec), scenario.spec.gateway.drain_s
    engines = []
    for each in _pools(scenario):
        with scenario.places.at(*each.at):
            _check(each)
            pool, engine = each.pool, {"name": each.pool.name, "kind": kind, "replicas": each.pool.replicas}
            if each.combo is not None:
                engine["labels"] = {"headway/combo": each.combo.name, "headway/role": pool.role}
            engine["pod"] = _pod(each, by_priority, drain_s, options)
            if options.autoscale and pool.max_replicas is not None:
                engine["autoscaler"] = _autoscaler(pool, kind, options)["spec"]
            engines.append(engine)
    values: Manifest = {
        "kind": "picker" if options.inference_pool else "gateway",
        "image": options.gateway_image,
        "fleet": _fleet_file(scenario, kind, options, _watches_cluster(scenario, kind, options)),
    }
    if files := _model_configs(scenario):
        values["files"] = files
    return _text([values | {"engines": engines}])


def _text(documents: list[Manifest]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def _watches_cluster(scenario: Scenario, kind: Kind, options: ExportOptions) -> bool:
    """Whether the gateway reads pods from the cluster: only the cluster knows the pods of a Deployment or an
    autoscaler."""
    scales = scenario.spec.policies.scaling is not None
    return kind == "Deployment" or scales or options.autoscale or options.inference_pool


def deployed_models(scenario: Scenario) -> list[str]:
    """For each pool: the deployed model, the shape with which Headway simulates the model, and settings that only
    engines have."""
    lines = []
    for each in _pools(scenario):
        model, shown = each.pool.model, each.spec.model
        shape = (
            f"the shape of {shown.config}"
            if not isinstance(shown, str)
            else catalog.find_model(shown, scenario.base_dir).name
        )
        served = f" (asked for as {each.spec.served_name})" if each.spec.served_name else ""
        lines.append(f"{each.pool.name}: deploys {model.hf_id}{served}; simulated as {shape}")
        engine = CONTAINERS[api_of(each.pool.engine.name)]
        made = {option_of(word) for word in engine.arguments(each.pool, "", False, "")} - {""}
        again = [word for word in each.spec.engine_args if option_of(word) in made]
        if again:
            what = f"engine_args replace what the simulation uses for {', '.join(again)}; `engine` sets both"
            lines.append(f"{each.pool.name}: {what}")
    return lines


def _pools(scenario: Scenario) -> list[DeclaredPool]:
    """Every deployed pool, with the total of its replicas. Hosted pools run elsewhere."""
    return [
        each
        if each.combo is None
        else replace(each, pool=replace(each.pool, replicas=each.pool.replicas * each.combo.replicas))
        for each in declared_pools(scenario)
        if each.pool.hosted is None
    ]


def secrets(scenario: Scenario) -> list[str]:
    """Variables that the fleet file names. The gateway's pod gets them from the Secret `SECRET`."""
    return variables_of([scenario.document.get(key) for key in ("fleet", "combos", "gateway")])


def _check(each: DeclaredPool) -> None:
    """Raises HeadwayError for an unknown engine or model, a replica larger than a node, or an invalid name."""
    pool, name = each.pool, each.pool.name
    if api_of(pool.engine.name) not in CONTAINERS:
        what = "there are manifests for vLLM and SGLang only; expected engine: vllm, or sglang"
        raise HeadwayError(f"engine {pool.engine.name}: {what}")
    if not pool.model.hf_id:
        what = "`hf_id` is missing; expected what engines load, a Hugging Face repository or a path in the image"
        raise HeadwayError(f"model {pool.model.name}: {what}")
    for option in filter(None, map(option_of, each.spec.engine_args)):
        if option in _OWN_OPTIONS:
            raise HeadwayError(f"engine_args: --{option}: expected `{_OWN_OPTIONS[option]}` in its place")
        if option in _FIXED_OPTIONS:
            raise HeadwayError(f"engine_args: --{option}: the manifests set it")
    if pool.parallel.num_gpus > pool.gpu.gpus_per_node:
        most = f"at most the {pool.gpu.gpus_per_node} of a node of {pool.gpu.name}, as a pod runs on one node"
        raise HeadwayError(f"{pool.parallel.num_gpus} GPUs of a replica; expected {most}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", name) or name == GATEWAY:
        what = f"expected small letters, digits and dashes, 53 at most, and not {GATEWAY}, the gateway's Service"
        raise HeadwayError(f"name {name!r}: {what}")


def _check_inference_pools(scenario: Scenario, scales: bool) -> None:
    """Raises HeadwayError for settings that a picker of InferencePools cannot support."""
    picker.check(scenario)
    if scenario.fleet.combos:
        what = "an InferencePool has replicas of one role; expected pools in `fleet`, or no --inference-pool"
        raise scenario.places.error(("combos",), what)
    if scales:
        what = "the pods of an InferencePool are scaled by Kubernetes; drop the policy, and use --autoscale"
        raise scenario.places.error(("policies", "scaling"), what)


# Pools.


def _of_pool(
    each: DeclaredPool, kind: Kind, by_priority: bool, drain_s: float, options: ExportOptions
) -> list[Manifest]:
    pool, labels = each.pool, _labels(each.pool.name)
    if each.combo is not None:
        labels |= {"headway/combo": each.combo.name, "headway/role": pool.role}
    selector = {"matchLabels": _labels(pool.name)}
    template = {"metadata": {"labels": labels}, "spec": _pod(each, by_priority, drain_s, options)}
    spec: Manifest = {"replicas": pool.replicas, "selector": selector, "template": template}
    if kind == "StatefulSet":
        spec = {"serviceName": pool.name, "podManagementPolicy": "Parallel", **spec}
    documents = [
        _manifest("apps/v1", kind, pool.name, spec),
        _service(pool.name, {"http": PORT}, kind == "StatefulSet"),
    ]
    if options.autoscale and pool.max_replicas is not None:
        documents.append(_autoscaler(pool, kind, options))
    return documents


def _pod(each: DeclaredPool, by_priority: bool, drain_s: float, options: ExportOptions) -> Manifest:
    pool = each.pool
    args = CONTAINERS[api_of(pool.engine.name)].arguments(pool, each.spec.served_name, by_priority, options.connector)
    gpus, engine = {"nvidia.com/gpu": str(pool.parallel.num_gpus)}, CONTAINERS[api_of(pool.engine.name)]
    ports = {"http": PORT, **engine.ports(pool)}
    environment = engine.environment(pool, options.connector)
    if options.token_secret:
        secret = {"name": options.token_secret, "key": "token"}
        environment = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}, *environment]
    container: Manifest = {
        "name": engine.name,
        "image": each.spec.image or options.image or engine.image(pool.engine.version),
        "command": ["python3", "-m", engine.module],
        "args": with_own_arguments(args, each.spec.engine_args),
        **({"env": environment} if environment else {}),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": {"limits": gpus, "requests": gpus},
        "startupProbe": {**_probe(), "failureThreshold": _LONGEST_START_S // _PERIOD_S},
        "readinessProbe": _probe(),
        "livenessProbe": {**_probe(), "timeoutSeconds": 5},
        "lifecycle": _before_stop(drain_command(api_of(pool.engine.name), drain_s + _NOTICE_S, _NOTICE_S)),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "automountServiceAccountToken": False,
        "nodeSelector": {"nvidia.com/gpu.product": _product(pool.gpu, options.products)},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": _grace_s(drain_s),
        "containers": [container],
        # The ranks of a replica share memory; a container has only 64 MiB of it by default.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _product(gpu: Gpu, products: dict[str, str]) -> str:
    """The label of NVIDIA's GPU feature discovery: the product's name with dashes in place of spaces."""
    if gpu.name in products:
        return products[gpu.name]
    for name in gpu.aliases:
        if name.startswith("NVIDIA "):
            return name.replace(" ", "-")
    raise HeadwayError(f"GPU {gpu.name}: there are manifests for NVIDIA's only")


def _autoscaler(pool: Pool, kind: Kind, options: ExportOptions) -> Manifest:
    target = {"type": "AverageValue", "averageValue": options.waiting_target}
    metric = {"metric": {"name": CONTAINERS[api_of(pool.engine.name)].waiting_metric}, "target": target}
    return _manifest(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        pool.name,
        {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": pool.name},
            "minReplicas": max(pool.min_replicas, 1),
            "maxReplicas": pool.max_replicas,
            "metrics": [{"type": "Pods", "pods": metric}],
        },
    )


def _inference_pool(name: str) -> Manifest:
    """The Kubernetes objects of one pool: its pods, and the picker that a gateway asks to choose a pod."""
    picker = {"kind": "Service", "name": GATEWAY, "port": {"number": PICKER_PORT}, "failureMode": "FailClose"}
    return _manifest(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        name,
        {
            "selector": {"matchLabels": _labels(name)},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": picker,
        },
    )


# The gateway.


def _gateway(scenario: Scenario, kind: Kind, options: ExportOptions) -> list[Manifest]:
    scales = scenario.spec.policies.scaling is not None
    watches = _watches_cluster(scenario, kind, options)
    text, configs = _fleet_file(scenario, kind, options, watches), _model_configs(scenario)
    environment = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}} for name in secrets(scenario)
    ]
    config = _manifest("v1", "ConfigMap", GATEWAY, None) | {"data": {"fleet.yaml": text, **configs}}
    account = _manifest("v1", "ServiceAccount", GATEWAY, None)
    rights = _rights(scenario, kind, scales, options) if watches else []
    ports, arguments = {"http": GATEWAY_PORT}, ["--port", str(GATEWAY_PORT)]
    if options.inference_pool:
        ports = {"grpc": PICKER_PORT, "http": PICKER_HTTP_PORT}
        arguments = ["--port", str(PICKER_PORT), "--http-port", str(PICKER_HTTP_PORT)]
    pod = {
        "serviceAccountName": GATEWAY,
        "automountServiceAccountToken": watches,
        "terminationGracePeriodSeconds": _grace_s(scenario.spec.gateway.drain_s),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "containers": [
            {
                "name": GATEWAY,
                "image": options.gateway_image,
                "command": ["headway", "epp" if options.inference_pool else "serve"],
                "args": [f"{_CONFIG_AT}/fleet.yaml", "--host", "0.0.0.0", *arguments],
                **({"env": environment} if environment else {}),
                "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "readinessProbe": _probe(),
                "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": _PERIOD_S},
                "lifecycle": _before_stop(["python3", "-c", f"import time; time.sleep({_NOTICE_S})"]),
                "volumeMounts": [
                    {"name": "fleet", "mountPath": _CONFIG_AT, "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        # The processes of a gateway communicate through sockets in /tmp. They write to no other folder.
        "volumes": [{"name": "fleet", "configMap": {"name": GATEWAY}}, {"name": "tmp", "emptyDir": {}}],
    }
    # The hash changes the template with the fleet file, so that Kubernetes restarts the gateway.
    annotations = {"headway/fleet-sha256": hashlib.sha256("".join([text, *configs.values()]).encode()).hexdigest()}
    template = {"metadata": {"labels": _labels(GATEWAY), "annotations": annotations}, "spec": pod}
    # Recreate: two gateways that scale at the same time undo each other's changes, unless one of them leads.
    peers = scenario.spec.gateway.peers
    spec = {
        "replicas": 1 if peers is None else 2,
        **({"strategy": {"type": "Recreate"}} if scales and peers is None else {}),
        "selector": {"matchLabels": _labels(GATEWAY)},
        "template": template,
    }
    gateway = _manifest("apps/v1", "Deployment", GATEWAY, spec)
    return [config, account, *rights, gateway, _service(GATEWAY, ports, headless=False)]


def _fleet_file(scenario: Scenario, kind: str, options: ExportOptions, watches_cluster: bool) -> str:
    """The fleet file's text. Pools name the endpoints of their pods or, with `watches_cluster`, their Kubernetes
    objects.

    Raises HeadwayError if the gateway needs a disk, which its pod does not have.
    """
    namespace = options.namespace
    for name in ("batches", "key_store", "peers"):
        setting = getattr(scenario.spec.gateway, name)
        if setting is not None and "://" not in setting.store:
            what = f"{setting.store!r} is a file, and the gateway's pod has no disk"
            what += "; expected postgresql://host/database" + (" or redis://host/0" if name != "batches" else "")
            raise scenario.places.error(("gateway", name, "store"), what)

    def section(entry: dict[str, Any], pool: Pool, num: int) -> dict[str, Any]:
        if pool.hosted is not None:
            return entry
        kept = {key: value for key, value in entry.items() if key not in _DROPPED_POOL_KEYS}
        kept |= {"name": pool.name, "replicas": pool.replicas, "api": api_of(pool.engine.name)}
        stated = kept["model"] if isinstance(kept["model"], dict) else {}
        if stated or catalog.config_of(kept["model"], scenario.base_dir) is not None:
            kept |= {"model": {**stated, "config": _config_name(pool)}, "hf_id": pool.model.hf_id}
        if options.inference_pool:
            return kept | {"inference_pool": {"name": pool.name, "namespace": namespace}}
        if watches_cluster:
            return kept | {"kubernetes": {"name": pool.name, "kind": kind, "namespace": namespace, "port": PORT}}
        host = f"{pool.name}.{namespace}.svc"
        return kept | {"endpoints": [f"http://{pool.name}-{i}.{host}:{PORT}" for i in range(num)]}

    document = {key: scenario.document[key] for key in _SERVING_KEYS if key in scenario.document}
    entries = zip(scenario.document.get("fleet", ()), scenario.fleet.pools, strict=True)
    if pools := [section(entry, pool, pool.replicas) for entry, pool in entries]:
        document["fleet"] = pools
    combos = []
    for i, (entry, combo) in enumerate(zip(scenario.document.get("combos", ()), scenario.fleet.combos, strict=True)):
        parts = zip(scenario.spec.combos[i].parts, combo.parts, strict=True)
        combos.append(entry | {key: section(entry[key], part, part.replicas * combo.replicas) for key, part in parts})
    if combos:
        document["combos"] = combos
    gateway = document.get("gateway", {})
    if (
        not gateway.get("api_keys") and "key_store" not in gateway
    ):  # without keys, the gateway serves only expected hosts, such as its Service
        hosts = [GATEWAY, *(f"{GATEWAY}.{namespace}{suffix}" for suffix in ("", ".svc", ".svc.cluster.local"))]
        document["gateway"] = gateway | {"hosts": [*gateway.get("hosts", ()), *hosts]}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _config_name(pool: Pool) -> str:
    return f"{pool.name}.config.json"


def _model_configs(scenario: Scenario) -> dict[str, str]:
    """The config files of models that are not in the catalog, by their names beside the fleet file."""
    return {
        _config_name(each.pool): whole_config(config)
        for each in declared_pools(scenario)
        if (config := _config_path(each.spec.model, scenario.base_dir)) is not None
    }


def _config_path(model: str | ModelFile, base_dir: Path) -> Path | None:
    """The path of a model's config if the model is not in the catalog."""
    if isinstance(model, str):
        return catalog.config_of(model, base_dir)
    return base_dir / model.config if (base_dir / model.config).exists() else catalog.config_of(model.config, base_dir)


def _rights(scenario: Scenario, kind: Kind, scales: bool, options: ExportOptions) -> list[Manifest]:
    """Rights to read pods and, if the gateway scales, to set their number and mark pods for deletion."""
    names = [pool.name for pool in scenario.fleet.all_pools if pool.hosted is None]
    if options.inference_pool:
        pools = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "resourceNames": names}
        pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
        return _bound_role([{**pools, "verbs": ["get"]}, pods], options)
    resource = f"{kind.lower()}s/scale"
    verbs = ["get", "patch"] if scales else ["get"]
    rules = [
        {"apiGroups": ["apps"], "resources": [resource], "resourceNames": names, "verbs": verbs},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"] if scales else ["list"]},
    ]
    peers = scenario.spec.gateway.peers
    if scales and peers is not None and peers.leader == "kubernetes":
        verbs = ["create", "get", "update"]
        rules.append({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": verbs})
    return _bound_role(rules, options)


def _bound_role(rules: list[Manifest], options: ExportOptions) -> list[Manifest]:
    role = _manifest("rbac.authorization.k8s.io/v1", "Role", GATEWAY, None) | {"rules": rules}
    binding = _manifest("rbac.authorization.k8s.io/v1", "RoleBinding", GATEWAY, None) | {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": GATEWAY},
        "subjects": [{"kind": "ServiceAccount", "name": GATEWAY, "namespace": options.namespace}],
    }
    return [role, binding]


# Pools and gateway.


def _manifest(version: str, kind: str, name: str, spec: Manifest | None) -> Manifest:
    manifest: Manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(name)}}
    return manifest if spec is None else {**manifest, "spec": spec}


def _labels(name: str) -> dict[str, str]:
    component = "gateway" if name == GATEWAY else "engine"
    labels = {"name": name, "component": component, "part-of": "headway-fleet"}
    return {f"app.kubernetes.io/{key}": value for key, value in labels.items()}


def _service(name: str, ports: dict[str, int], headless: bool) -> Manifest:
    """A Service. In a headless Service every pod has its own name, even before it is ready."""
    protocols = {"grpc": {"appProtocol": "kubernetes.io/h2c"}}
    listed = [
        {"name": each, "port": port, "targetPort": each, **protocols.get(each, {})} for each, port in ports.items()
    ]
    own = {"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {}
    return _manifest("v1", "Service", name, {**own, "selector": _labels(name), "ports": listed})


def _grace_s(drain_s: float) -> int:
    """Time from the beginning of a pod's end until it is killed: notice, drain, and the end of its process."""
    return _NOTICE_S + math.ceil(drain_s) + _GRACE_S


def _before_stop(command: list[str]) -> Manifest:
    return {"preStop": {"exec": {"command": command}}}


def _probe() -> Manifest:
    return {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PERIOD_S}
