{{/* Containers of Ray's own processes. */}}

{{- define "kunserve.rayEnv" -}}
env:
  - name: RAY_USAGE_STATS_ENABLED
    value: "0"
  # Instances run here, and some of their settings are variables.
  {{- with include "kunserve.env" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Ports instead of KubeRay's own probes, because those call wget, which the image lacks. */}}
{{- define "kunserve.rayProbes" -}}
startupProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 5
livenessProbe:
  tcpSocket:
    port: {{ . }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "kunserve.rayLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}
