"""Manifests: valid for Kubernetes' own models, with the fleet's options, and with the gateway's fleet file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_schemas
import serving
from headway.cli import main
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.settings import Api
from headway.serving.export.engines import drain_command

POOL = {"name": "chat", "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 3, "tp": 2}
SCALING = {"scaling": {"name": "target-utilization", "in_flight": 8}}
SHAPE = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
HANDOVER = {
    "combos": [
        {
            "name": "pair",
            "replicas": 2,
            "prefill": {**POOL, "replicas": 2, "name": ""},
            "decode": {**POOL, "replicas": 1, "tp": 4, "gpu": "h200", "name": ""},
        }
    ],
}
SGLANG = {
    "combos": [
        {
            **HANDOVER["combos"][0],
            **{part: {**HANDOVER["combos"][0][part], "engine": "sglang"} for part in ("prefill", "decode")},
        }
    ]
}


def _export(folder: Path, document: dict[str, Any], *options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All manifests, by kind and name."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["export", "kubernetes", str(path), "-o", str(folder / "out"), *options]) == 0
    names = yaml.safe_load((folder / "out" / "kustomization.yaml").read_text())["resources"]
    made = [each for name in names for each in yaml.safe_load_all((folder / "out" / name).read_text())]
    assert {path.name for path in (folder / "out").iterdir()} == {*names, "kustomization.yaml"}
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def _args(workload: dict[str, Any]) -> list[str]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def _option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_what_has_to_exist_before_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _export(tmp_path, {"fleet": [POOL]})
    assert "before:" not in capsys.readouterr().err
    _export(tmp_path, {"fleet": [POOL]}, "--namespace", "llm", "--token-secret", "hub")
    told = capsys.readouterr().err
    assert "before: kubectl create namespace llm\n" in told
    assert "before: kubectl -n llm create secret generic hub --from-literal=token=...\n" in told


EXPORTS = pytest.mark.parametrize(
    ("document", "options"),
    [
        ({"fleet": [POOL]}, ()),
        ({"fleet": [POOL], "policies": SCALING}, ("--token-secret", "hf")),
        ({"fleet": [{**POOL, "max_replicas": 5}]}, ("--autoscale", "--kind", "Deployment")),
        (HANDOVER, ()),
        (HANDOVER, ("--kind", "Deployment")),
        ({"fleet": [{**POOL, "engine": "sglang", "max_replicas": 5}]}, ("--autoscale", "--token-secret", "hf")),
        (SGLANG, ()),
    ],
)


@EXPORTS
def test_manifests_are_valid_for_kubernetes_own_models(
    tmp_path: Path, document: dict[str, Any], options: tuple[str, ...]
) -> None:
    """The models check required keys, and drop unknown ones when they serialise."""
    client = pytest.importorskip("kubernetes.client")
    api = client.ApiClient()
    groups = {"v1": "V1", "apps/v1": "V1", "rbac.authorization.k8s.io/v1": "V1", "autoscaling/v2": "V2"}
    for (kind, name), manifest in _export(tmp_path, document, *options).items():
        read = api.deserialize(json.dumps(manifest), groups[manifest["apiVersion"]] + kind, "application/json")
        assert api.sanitize_for_serialization(read) == manifest, (kind, name)


@EXPORTS
def test_manifests_have_no_key_that_a_cluster_refuses(
    tmp_path: Path, document: dict[str, Any], options: tuple[str, ...]
) -> None:
    assert list(kube_schemas.faults(_export(tmp_path, document, *options).values())) == []


def test_a_refused_key_is_found(tmp_path: Path) -> None:
    """In the depth of a pod, where Kubernetes' client says nothing; and a kind that no release has."""
    made = _export(tmp_path, {"fleet": [POOL]})
    engines, gateway = made["StatefulSet", "chat"], made["Deployment", "headway"]
    engines["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["periodSecond"] = 5
    gateway["apiVersion"] = "apps/v1beta9"
    found = list(kube_schemas.faults([engines, gateway]))
    assert len(found) == 2 * len(kube_schemas.RELEASES)
    assert any("periodSecond" in each for each in found) and any("v1beta9" in each for each in found)


def test_vllm_gets_the_options_of_the_fleet(tmp_path: Path) -> None:
    engine = {"name": "vllm-0.15", "max_num_seqs": 64, "kv_dtype_bytes": 1, "prefix_caching": False}
    pool = {**POOL, "pp": 2, "engine": engine}
    made = _export(tmp_path, {"fleet": [pool], "policies": {"ordering": "priority"}}, "--image", "mine:1")
    workload = made["StatefulSet", "chat"]
    args = _args(workload)
    expected = {
        "--model": "meta-llama/Llama-3.1-8B",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "8192",
        "--kv-cache-dtype": "fp8",
        "--scheduling-policy": "priority",
    }
    assert {name: _option(args, name) for name in expected} == expected
    assert "--no-enable-prefix-caching" in args and "--kv-transfer-config" not in args
    pod = workload["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "mine:1" and workload["spec"]["replicas"] == 3
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_several_gateways_scale_by_a_lease(tmp_path: Path) -> None:
    """Two of them, of which one leads: neither need end before another starts."""
    peers = {"store": "postgresql://headway@db/headway", "leader": "kubernetes"}
    made = _export(tmp_path, {"fleet": [POOL], "policies": SCALING, "gateway": {"peers": peers}})
    spec = made["Deployment", "headway"]["spec"]
    assert spec["replicas"] == 2 and "strategy" not in spec
    (lease,) = [rule for rule in made["Role", "headway"]["rules"] if "leases" in rule["resources"]]
    assert lease["verbs"] == ["create", "get", "update"]
    (tmp_path / "alone").mkdir()
    alone = _export(tmp_path / "alone", {"fleet": [POOL], "policies": SCALING})["Deployment", "headway"]["spec"]
    assert (alone["replicas"], alone["strategy"]) == (1, {"type": "Recreate"})


def test_an_ordering_at_the_gateway_is_not_the_engines(tmp_path: Path) -> None:
    policies = {"ordering": "priority", "ordering_at": "gateway"}
    args = _args(_export(tmp_path, {"fleet": [POOL], "policies": policies})["StatefulSet", "chat"])
    assert "--scheduling-policy" not in args


def test_the_longest_request_fits_the_kv_cache(tmp_path: Path) -> None:
    """An engine whose KV cache holds less than its longest request does not start."""
    small = _export(tmp_path, {"fleet": [{**POOL, "gpu": "l4", "tp": 1}]})["StatefulSet", "chat"]
    longest = int(_option(_args(small), "--max-model-len"))
    assert 4096 < longest < 131_072 and longest % 1024 == 0


def test_the_gateway_has_every_pod_as_an_endpoint(tmp_path: Path) -> None:
    from headway import serving

    policies = {"routing": "least-kv", "ordering": "edf", "ordering_at": "gateway"}
    made = _export(tmp_path, {"fleet": [POOL], "policies": policies}, "--namespace", "llm")
    file = tmp_path / "served.yaml"
    file.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    _, plan = serving.load(file)
    assert plan.pools[0].endpoints == tuple(f"http://chat-{i}.chat.llm.svc:8000" for i in range(3))
    assert made["Service", "chat"]["spec"]["clusterIP"] == "None"
    assert plan.settings.hosts == ("headway", "headway.llm", "headway.llm.svc", "headway.llm.svc.cluster.local")
    assert ("Role", "headway") not in made, "it asks nothing of the cluster"
    args = _args(made["Deployment", "headway"])
    mount = made["Deployment", "headway"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
    assert args[0] == f"{mount}/fleet.yaml"


def test_an_inference_pool_has_its_picker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    from headway import serving
    from headway.gateway.fleet import inference_pool
    from headway.serving import picker

    monkeypatch.setattr(inference_pool, "check", lambda how: None, raising=False)  # there is no cluster here
    options = ("--namespace", "llm", "--inference-pool")
    document = {"fleet": [POOL, {**POOL, "name": "code", "model": "qwen3-8b"}], "policies": {"preset": "headway"}}
    document["policies"] |= {"migration": None, "scaling": None}
    made = _export(tmp_path, document, *options)
    file = tmp_path / "served.yaml"
    file.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    picker.check(serving.gateway.read(file))
    read = yaml.safe_load(file.read_text())
    assert [pool["inference_pool"] for pool in read["fleet"]] == [
        {"name": "chat", "namespace": "llm"},
        {"name": "code", "namespace": "llm"},
    ]
    spec = made["InferencePool", "chat"]["spec"]
    pods = made["Deployment", "chat"]["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= pods.items() and "code" not in str(spec)
    port = made["Deployment", "chat"]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert spec["targetPorts"] == [{"number": port}]
    asked = spec["endpointPickerRef"]
    (grpc, http) = made["Service", asked["name"]]["spec"]["ports"]
    assert grpc["port"] == asked["port"]["number"] and grpc["appProtocol"] == "kubernetes.io/h2c"
    (container,) = made["Deployment", "headway"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["headway", "epp"]
    assert int(_option(container["args"], "--port")) == grpc["port"]
    assert int(_option(container["args"], "--http-port")) == http["port"]
    pools, seen = made["Role", "headway"]["rules"]
    assert pools["resourceNames"] == ["chat", "code"] and pools["verbs"] == ["get"]
    assert seen == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}


def test_a_gateway_that_scales_has_the_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    from headway import serving
    from headway.gateway.fleet import kubernetes

    monkeypatch.setattr(kubernetes, "check", lambda how: None)  # there is no cluster here
    made = _export(tmp_path, {"fleet": [POOL], "policies": SCALING}, "--namespace", "llm")
    file = tmp_path / "served.yaml"
    file.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    _, plan = serving.load(file)
    assert plan.policies.scaler is not None
    start = plan.pools[0].start
    assert (start.name, start.kind, start.namespace, start.port) == ("chat", "Deployment", "llm", 8000)  # type: ignore[union-attr]
    scale, pod = made["Role", "headway"]["rules"]
    assert scale["resources"] == ["deployments/scale"] and scale["verbs"] == ["get", "patch"]
    assert pod["verbs"] == ["list", "patch"]


def test_combos_transfer_kv_caches_and_are_served(tmp_path: Path) -> None:
    from headway import serving
    from headway.gateway.fleet.combos import in_order

    made = _export(tmp_path, HANDOVER)
    replicas = {}
    for name in ("pair-prefill", "pair-decode"):
        workload = made["StatefulSet", name]
        config = json.loads(_option(_args(workload), "--kv-transfer-config"))
        assert config == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        replicas[name] = workload["spec"]["replicas"]
        role = name.removeprefix("pair-")
        assert workload["spec"]["template"]["metadata"]["labels"]["headway/role"] == role
    assert replicas == {"pair-prefill": 4, "pair-decode": 2}
    file = tmp_path / "served.yaml"
    file.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    _, plan = serving.load(file)
    assert [url.split(".")[0] for _, url in in_order(plan.pools)] == [
        "http://pair-prefill-0",
        "http://pair-prefill-1",
        "http://pair-decode-0",
        "http://pair-prefill-2",
        "http://pair-prefill-3",
        "http://pair-decode-1",
    ]


@pytest.mark.parametrize("engine", ["vllm-0.15", "sglang"])
def test_combos_that_scale_are_workloads_of_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    pytest.importorskip("kubernetes")
    from headway import serving
    from headway.gateway.fleet import kubernetes

    monkeypatch.setattr(kubernetes, "check", lambda how: None)  # there is no cluster here
    combo = HANDOVER["combos"][0]
    sides = {part: {**combo[part], "engine": engine} for part in ("prefill", "decode")}
    scaling = {"name": "combos", "local_window_s": 1, "global_window_s": 600}
    policies = {"routing": {"name": "cauchy", "within": "strict"}, "scaling": scaling}
    made = _export(tmp_path, {"combos": [{**combo, **sides, "goodput_rps": 2.0}], "policies": policies})
    assert {made["Deployment", f"pair-{part}"]["spec"]["replicas"] for part in ("prefill", "decode")} == {4, 2}
    file = tmp_path / "served.yaml"
    file.write_text(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    _, plan = serving.load(file)
    assert [served.start.name for served in plan.pools] == ["pair-prefill", "pair-decode"]  # type: ignore[union-attr]
    assert {served.combo.replicas for served in plan.pools if served.combo is not None} == {2}
    scale, _ = made["Role", "headway"]["rules"]
    assert scale["resourceNames"] == ["pair-prefill", "pair-decode"] and "patch" in scale["verbs"]


def test_nothing_is_deployed_for_a_hosted_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosted = {
        "name": "hosted",
        "model": "gpt-x",
        "hosted": {},
        "endpoints": ["https://api.example.com/v1"],
        "api_key": "${SERVICE_KEY}",
    }
    own = {**POOL, "fallback": ["hosted"], "api_key": "${VLLM_KEY}"}
    made = _export(tmp_path, {"fleet": [own, hosted]}, "--kind", "Deployment")
    assert not any(name == "hosted" for _, name in made) and ("Deployment", "chat") in made
    document = yaml.safe_load(made["ConfigMap", "headway"]["data"]["fleet.yaml"])
    assert document["fleet"][1] == hosted and document["fleet"][0]["fallback"] == ["hosted"]
    (container,) = made["Deployment", "headway"]["spec"]["template"]["spec"]["containers"]
    keys = [(each["name"], each["valueFrom"]["secretKeyRef"]) for each in container["env"]]
    assert keys == [(name, {"name": "headway-keys", "key": name}) for name in ("SERVICE_KEY", "VLLM_KEY")]
    assert made["Role", "headway"]["rules"][0]["resourceNames"] == ["chat"]
    output = capsys.readouterr().err
    assert "create secret generic headway-keys --from-literal=SERVICE_KEY=... --from-literal=VLLM_KEY=..." in output


def test_pods_have_time_to_drain(tmp_path: Path) -> None:
    made = _export(tmp_path, {"fleet": [POOL], "gateway": {"drain_s": 90}})
    for kind, name in (("Deployment", "headway"), ("StatefulSet", "chat")):
        pod = made[kind, name]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 5 + 90 + 15
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][0] == "python3"


@pytest.mark.parametrize(("api", "surface"), [("vllm", "vllm-0.15"), ("sglang", "sglang")])
def test_an_engines_pod_stops_when_its_requests_have_ended(api: Api, surface: str) -> None:
    engine = serving.emulator("--engine", surface, "--output-tokens", "200", "--speed", "2")
    with serving.closing(engine):
        command = drain_command(api, drain_s=3600, notice_s=0, port=engine.port)
        reply = serving.chat(engine, stream=True, max_tokens=200, ignore_eos=True)
        events = reply.events()
        next(events)
        before = subprocess.Popen([sys.executable, *command[1:]])
        assert list(events)[-1] == "[DONE]"
        assert before.wait(serving.PATIENCE_S) == 0
        subprocess.run(
            [sys.executable, *command[1:]], check=True, timeout=serving.PATIENCE_S
        )  # idle: not after drain_s


def test_sglang_gets_its_phase(tmp_path: Path) -> None:
    made = _export(tmp_path, SGLANG)
    for part in ("prefill", "decode"):
        workload = made["StatefulSet", f"pair-{part}"]
        args, pod = _args(workload), workload["spec"]["template"]
        options = {name: _option(args, f"--disaggregation-{name}") for name in ("mode", "transfer-backend")}
        assert options == {"mode": part, "transfer-backend": "nixl"}
        assert pod["metadata"]["labels"]["headway/combo"] == "pair"
        (container,) = pod["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {"http": 8000, **({"bootstrap": 8998} if part == "prefill" else {})}
        assert ("--disaggregation-bootstrap-port" in args) == (part == "prefill")
        assert container["command"][-1] == "sglang.launch_server" and _option(args, "--port") == "8000"


def test_export_is_deterministic_and_a_changed_fleet_restarts_the_gateway(tmp_path: Path) -> None:
    def made(**changes: Any) -> dict[str, str]:
        _export(tmp_path, {"fleet": [{**POOL, **changes}]})
        return {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}

    first, again, other = made(), made(), made(replicas=2)
    assert first == again
    assert "&id" not in "".join(first.values())
    sums = [text["gateway.yaml"].split("fleet-sha256: ")[1].split("\n")[0] for text in (first, other)]
    assert sums[0] != sums[1]


def test_autoscalers_are_optional(tmp_path: Path) -> None:
    document = {"fleet": [{**POOL, "max_replicas": 5, "min_replicas": 2}]}
    assert not any(kind == "HorizontalPodAutoscaler" for kind, _ in _export(tmp_path, document))
    spec = _export(tmp_path, document, "--autoscale")["HorizontalPodAutoscaler", "chat"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["scaleTargetRef"]["kind"] == "Deployment"


@pytest.mark.parametrize("kind", [(), ("--kind", "Deployment"), ("--kind", "StatefulSet")])
def test_the_gateway_finds_the_pods_that_an_autoscaler_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...]
) -> None:
    pytest.importorskip("kubernetes")
    from headway.gateway.fleet import kubernetes

    monkeypatch.setattr(kubernetes, "check", lambda how: None)  # there is no cluster here
    made = _export(tmp_path, {"fleet": [{**POOL, "max_replicas": 5}]}, "--autoscale", *kind)
    scaled = made["HorizontalPodAutoscaler", "chat"]["spec"]["scaleTargetRef"]["kind"]
    assert scaled == (kind[1] if kind else "Deployment")
    plan = _served(tmp_path, made)
    assert plan.pools[0].endpoints == () and plan.pools[0].start.name == "chat"  # type: ignore[union-attr]
    assert made["Role", "headway"]["rules"][1] == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}


def _served(folder: Path, made: dict[tuple[str, str], dict[str, Any]]) -> ServingPlan:
    """What the gateway reads from its ConfigMap."""
    from headway import serving

    for name, text in made["ConfigMap", "headway"]["data"].items():
        (folder / f"served-{name}" if name == "fleet.yaml" else folder / name).write_text(text)
    return serving.load(folder / "served-fleet.yaml")[1]


@pytest.mark.parametrize(
    ("written", "deployed"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_the_model_that_was_named_is_deployed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, deployed: str
) -> None:
    made = _export(tmp_path, {"fleet": [{**POOL, "model": written}]})
    args = _args(made["StatefulSet", "chat"])
    assert _option(args, "--model") == _option(args, "--served-model-name") == deployed
    assert f"chat: deploys {deployed}; simulated as llama-3.1-8b" in capsys.readouterr().err
    assert deployed in _served(tmp_path, made).names["llama-3.1-8b"]


def test_a_pool_has_its_own_weights_name_image_and_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--max-num-seqs", "32", "--no-enable-prefix-caching", "--enforce-eager"]
    pool = {**POOL, "hf_id": "acme/support-8b", "served_name": "support", "image": "acme/vllm:1", "engine_args": own}
    made = _export(tmp_path, {"fleet": [pool]}, "--image", "other:1")
    (container,) = made["StatefulSet", "chat"]["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    assert container["image"] == "acme/vllm:1" and _option(args, "--model") == "acme/support-8b"
    names = args.index("--served-model-name")
    assert args[names + 1 : names + 4] == ["support", "acme/support-8b", "llama-3.1-8b"]
    assert args[-4:] == own and args.count("--max-num-seqs") == 1 and "--enable-prefix-caching" not in args
    output = capsys.readouterr().err
    assert "deploys acme/support-8b (asked for as support); simulated as llama-3.1-8b" in output
    assert "engine_args replace what the simulation uses for --max-num-seqs, --no-enable-prefix-caching" in output
    assert {"support", "acme/support-8b", "llama-3.1-8b"} <= set(_served(tmp_path, made).names["llama-3.1-8b"])
    sglang = _export(tmp_path, {"fleet": [{**pool, "engine": "sglang", "engine_args": []}]})["StatefulSet", "chat"]
    assert _option(_args(sglang), "--model-path") == "acme/support-8b"
    assert _option(_args(sglang), "--served-model-name") == "support"


def test_pools_without_an_engine_are_deployed_with_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan's pools have no engine: the catalog's default is for simulations."""
    fleet = tmp_path / "plan.yaml"
    pool = {"model": "llama-3.1-8b", "gpu": "h100"}
    combo = {"name": "pair", "prefill": pool, "decode": {**pool, "engine": "vllm-0.15"}}
    fleet.write_text(yaml.safe_dump({"fleet": [{**pool, "name": "planned"}], "combos": [combo]}))
    assert main(["export", "kubernetes", str(fleet), "--out", str(tmp_path / "out")]) == 0
    notes = capsys.readouterr().err
    assert "planned: deployed with vllm, as it has no `engine`" in notes
    assert "combos[0].prefill: deployed with vllm" in notes and "combos[0].decode: deployed" not in notes
    assert "vllm/vllm-openai" in (tmp_path / "out" / "planned.yaml").read_text()


def test_a_model_by_its_config_is_deployed_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    pool = {**POOL, "model": {"config": "config.json"}}
    made = _export(tmp_path, {"fleet": [{**pool, "hf_id": "acme/new-8b"}]})
    assert _option(_args(made["StatefulSet", "chat"]), "--model") == "acme/new-8b"
    other = tmp_path / "gateway"
    other.mkdir()
    (served,) = _served(other, made).pools
    assert served.pool.model.hf_id == "acme/new-8b" and served.pool.model.num_layers == 32


@pytest.mark.parametrize(
    "model", ["own", "some/own", {"config": "own", "assume": True}, {"config": "some/own", "assume": True}]
)
def test_a_model_that_the_catalog_lacks_is_exported_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: object
) -> None:
    odd = {"kv_compression": 3} if isinstance(model, dict) else {}
    snapshot = tmp_path / "hub" / "models--some--own" / "snapshots" / "1"
    for folder in (tmp_path / "own", snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**SHAPE, **odd}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    made = _export(tmp_path, {"fleet": [{**POOL, "model": model, "hf_id": "acme/new-8b"}]})
    other = tmp_path / "gateway"
    other.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(other))
    (served,) = _served(other, made).pools
    assert served.pool.model.hf_id == "acme/new-8b" and served.pool.model.num_layers == 32


def test_weights_of_one_shape_are_different_models(tmp_path: Path) -> None:
    """Clients of the one never get the other."""
    names = "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"
    made = _export(tmp_path, {"fleet": [{**POOL, "name": f"pool-{i}", "model": name} for i, name in enumerate(names)]})
    served = _served(tmp_path, made).names
    assert list(served) == list(names) and "meta-llama/Llama-3.1-8B" in served["llama-3.1-8b"]
    assert not set(served[names[0]]) & set(served[names[1]])


@pytest.mark.parametrize(
    ("document", "options", "words"),
    [
        ({"fleet": [{**POOL, "model": {"config": "shape.json"}}]}, (), "fleet[0]: model shape: `hf_id` is missing"),
        ({"fleet": [{**POOL, "engine_args": ["-tp", "2"]}]}, (), "engine_args: --tp: expected `tp` in its place"),
        ({"fleet": [{**POOL, "engine_args": ["--port=1"]}]}, (), "engine_args: --port: the manifests set it"),
        ({"fleet": [{**POOL, "engine_args": ["--model", "x"]}]}, (), "--model: expected `hf_id` in its place"),
        ({"fleet": [{**POOL, "engine": "llama.cpp"}]}, (), "engine llama.cpp: there are manifests for vLLM and SGLang"),
        ({"fleet": [{**POOL, "gpu": "mi300x"}]}, (), "GPU mi300x: there are manifests for NVIDIA's only"),
        ({"fleet": [{**POOL, "pp": 8}]}, (), "16 GPUs of a replica; expected at most the 8 of a node"),
        ({"fleet": [{**POOL, "name": "Chat_1"}]}, (), "name 'Chat_1': expected small letters"),
        ({"fleet": [POOL], "policies": SCALING}, ("--autoscale",), "the gateway scales by this policy already"),
        ({"fleet": [POOL], "gateway": {"batches": {}}}, (), "the gateway's pod has no disk"),
        (HANDOVER, ("--inference-pool",), "an InferencePool has replicas of one role"),
        ({"fleet": [POOL], "policies": SCALING}, ("--inference-pool",), "are scaled by Kubernetes"),
        ({"fleet": [POOL], "gateway": {"pace_s": 0.1}}, ("--inference-pool",), "gateway.pace_s: an endpoint picker"),
        ({"fleet": [POOL]}, ("--gpu-product", "h100"), "expected GPU=LABEL"),
        ({"fleet": [POOL]}, ("--namespace", "My_NS"), "--namespace 'My_NS': expected small letters"),
        ({"fleet": [POOL]}, ("--gpu-product", "h1=X"), "GPU 'h1'"),
    ],
)
def test_unsupported_fleets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any], options: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    (tmp_path / "shape.json").write_text(json.dumps({**SHAPE, "_name_or_path": "shape"}))
    assert main(["export", "kubernetes", str(path), "-o", str(tmp_path / "out"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


DRAFTS = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": 0.6, "model": "acme/head"}


@pytest.mark.parametrize(
    ("setting", "vllm", "sglang"),
    [
        (
            DRAFTS,
            {"method": "eagle3", "num_speculative_tokens": 3, "model": "acme/head"},
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path acme/head --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ),
        (
            {
                "method": "draft_model",
                "model": "meta-llama/Llama-3.2-3B-Instruct",
                "num_speculative_tokens": 2,
                "acceptance": 1,
            },
            {"method": "draft_model", "num_speculative_tokens": 2, "model": "meta-llama/Llama-3.2-3B-Instruct"},
            "--speculative-algorithm STANDALONE --speculative-draft-model-path meta-llama/Llama-3.2-3B-Instruct "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.6, "prompt_lookup_max": 5},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5},
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
        ),
    ],
    ids=["eagle3", "draft_model", "ngram"],
)
def test_engines_speculate_as_the_fleet_does(
    tmp_path: Path, setting: dict[str, Any], vllm: dict[str, Any], sglang: str
) -> None:
    pool = {**POOL, "speculative": setting}
    args = _args(_export(tmp_path, {"fleet": [pool]})["StatefulSet", "chat"])
    assert json.loads(_option(args, "--speculative-config")) == vllm
    args = _args(_export(tmp_path, {"fleet": [{**pool, "engine": "sglang"}]})["StatefulSet", "chat"])
    assert sglang in " ".join(args)
