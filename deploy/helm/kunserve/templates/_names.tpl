{{/* Names, labels, and the flags of the server. */}}

{{- define "kunserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kunserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Pods of the release: all of them. KubeRay gives its pods a label, and names of its own. */}}
{{- define "kunserve.pods" -}}
{{- if eq .Values.mode "ray" -}}
ray.io/cluster: {{ include "kunserve.name" . }}
{{- else -}}
{{ include "kunserve.selector" . }}
{{- end -}}
{{- end -}}

{{/* Pods that answer clients. */}}
{{- define "kunserve.fronts" -}}
{{ include "kunserve.pods" . }}
{{- if eq .Values.mode "ray" }}
ray.io/node-type: head
{{- end -}}
{{- end -}}

{{- define "kunserve.labels" -}}
{{ include "kunserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kunserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kunserve.args" -}}
- {{ .Values.model | quote }}
- --num-instances={{ .Values.instances.count }}
{{- with .Values.instances.memoryMiB }}
- --instance-memory={{ . }}MiB
{{- end }}
- --num-threads={{ .Values.instances.threads }}
{{- if .Values.instances.gpus }}
- --device=cuda
{{- end }}
- --start-timeout={{ .Values.startTimeoutSeconds }}
- --shutdown-timeout={{ .Values.drain.timeoutSeconds }}
{{- if .Values.apiKeys.secret }}
- --api-key-file=/etc/kunserve/keys/{{ .Values.apiKeys.entry }}
{{- end }}
{{- if .Values.tls.secret }}
- --ssl-certfile=/etc/kunserve/tls/tls.crt
- --ssl-keyfile=/etc/kunserve/tls/tls.key
{{- end }}
{{- if eq .Values.mode "ray" }}
# Of the Ray in this pod, whose files lie in the /tmp that both containers share.
- --cluster=ray
{{- if .Values.ray.autoscaling.enabled }}
- --ray-autoscaling
- --max-instances={{ mul .Values.ray.autoscaling.maxPods .Values.ray.instancesPerPod }}
{{- end }}
{{- end }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}
