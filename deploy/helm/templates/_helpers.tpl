{{- define "headway.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: headway-fleet
{{- end }}

{{- define "headway.gateway-labels" -}}
{{ include "headway.labels" (dict "name" .Values.name "component" "gateway") }}
{{- end }}

{{- define "headway.engines" -}}
{{ .Values.name }}-engines
{{- end }}

{{- define "headway.engine-labels" -}}
{{ include "headway.labels" (dict "name" (include "headway.engines" .) "component" "engine") }}
{{- end }}

{{/* The fleet file. Without keys, a gateway answers under expected names only: those of its Service. */}}
{{- define "headway.fleet" -}}
{{- if .Values.fleet -}}
{{ .Values.fleet }}
{{- else -}}
name: trial
fleet:
- name: engines
  model: {{ .Values.trial.model }}
  gpu: {{ .Values.trial.gpu }}
  engine: vllm
  replicas: {{ .Values.trial.replicas }}
  api: vllm
{{- if eq .Values.kind "picker" }}
  inference_pool:
    name: {{ include "headway.engines" . }}
    namespace: {{ .Release.Namespace }}
{{- else }}
  kubernetes:
    name: {{ include "headway.engines" . }}
    namespace: {{ .Release.Namespace }}
    port: 8000
{{- end }}
gateway:
  hosts:
{{- range list "" (printf ".%s" .Release.Namespace) (printf ".%s.svc" .Release.Namespace) (printf ".%s.svc.cluster.local" .Release.Namespace) }}
  - {{ $.Values.name }}{{ . }}
{{- end }}
{{ end -}}
{{- end }}

{{/* All pools of the fleet file, those of combos included, as {"pools": [...]}. */}}
{{- define "headway.pools" -}}
{{- $fleet := include "headway.fleet" . | fromYaml -}}
{{- if hasKey $fleet "Error" }}{{ fail (printf "fleet: not YAML: %s" (get $fleet "Error")) }}{{ end -}}
{{- $pools := list -}}
{{- range default list $fleet.fleet }}{{ $pools = append $pools . }}{{ end -}}
{{- range default list $fleet.combos -}}
{{- range list .prefill .decode }}{{ if . }}{{ $pools = append $pools . }}{{ end }}{{ end -}}
{{- end -}}
{{ dict "pools" $pools | toJson }}
{{- end }}

{{/* What the gateway may do in the cluster: rules of a Role; nothing if its fleet file asks the cluster for nothing. */}}
{{- define "headway.rules" -}}
{{- $fleet := include "headway.fleet" . | fromYaml -}}
{{- $scales := not (empty (default dict $fleet.policies).scaling) -}}
{{- $leases := eq "kubernetes" (default "" (default dict (default dict $fleet.gateway).peers).leader) -}}
{{- $workloads := dict -}}
{{- $names := list -}}
{{- range (include "headway.pools" . | fromJson).pools -}}
{{- if .kubernetes -}}
{{- $kind := printf "%ss/scale" (lower (default "Deployment" .kubernetes.kind)) -}}
{{- $_ := set $workloads $kind (append (default list (get $workloads $kind)) .kubernetes.name) -}}
{{- end -}}
{{- if .inference_pool }}{{ $names = append $names .inference_pool.name }}{{ end -}}
{{- end -}}
{{- range $kind, $of := $workloads }}
- apiGroups: [apps]
  resources: [{{ $kind }}]
  resourceNames: {{ toJson $of }}
  verbs: {{ toJson (ternary (list "get" "patch") (list "get") $scales) }}
{{- end }}
{{- if $workloads }}
- apiGroups: [""]
  resources: [pods]
  verbs: {{ toJson (ternary (list "list" "patch") (list "list") $scales) }}
{{- end }}
{{- if and $workloads $scales $leases }}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
{{- end }}
{{- if $names }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  resourceNames: {{ toJson $names }}
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{- define "headway.container-security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end }}

{{/* A pool's pod, with the cache of weights and the pull secrets of the values. */}}
{{- define "headway.engine-pod" -}}
{{- $pod := deepCopy .pod -}}
{{- with .values.imagePullSecrets }}{{ $_ := set $pod "imagePullSecrets" . }}{{ end -}}
{{- with .values.modelCache.claim -}}
{{- $container := first $pod.containers -}}
{{- $mount := dict "name" "weights" "mountPath" "/root/.cache/huggingface" -}}
{{- $_ := set $container "volumeMounts" (append (default list $container.volumeMounts) $mount) -}}
{{- $volume := dict "name" "weights" "persistentVolumeClaim" (dict "claimName" .) -}}
{{- $_ := set $pod "volumes" (append (default list $pod.volumes) $volume) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end }}
