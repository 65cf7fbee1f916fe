{{/* What pods of both modes have. */}}

{{- define "kunserve.pod" -}}
# A service called kunserve would set KUNSERVE_PORT, which is a setting of ours.
enableServiceLinks: false
# The delay, the drain, then the end of the instances.
terminationGracePeriodSeconds: {{ add .Values.drain.delaySeconds .Values.drain.timeoutSeconds 10 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # A large cache is not walked through at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kunserve.container" -}}
image: {{ include "kunserve.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "kunserve.env" -}}
{{- with .Values.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hub.tokenEntry }}
{{- end }}
{{- if .Values.hub.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Who answers clients: its port, its probes, its end. */}}
{{- define "kunserve.front" -}}
args:
  {{- include "kunserve.args" . | nindent 2 }}
{{- with include "kunserve.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
ports:
  - name: http
    containerPort: 8000
# Loading may take minutes: nothing else is asked before this has answered once.
startupProbe:
  httpGet:
    path: /health
    port: http
    {{- include "kunserve.scheme" . | nindent 4 }}
  periodSeconds: 2
  timeoutSeconds: 5
  # Beyond --start-timeout, so that the server says itself what was too slow.
  failureThreshold: {{ div (add .Values.startTimeoutSeconds 60) 2 }}
# 503 while it drains, while no instance serves, and when work does not move on.
readinessProbe:
  httpGet:
    path: /health/ready
    port: http
    {{- include "kunserve.scheme" . | nindent 4 }}
  periodSeconds: 5
  timeoutSeconds: 3
# Only whether the front answers: it replaces instances itself, however long they load.
livenessProbe:
  httpGet:
    path: /livez
    port: http
    {{- include "kunserve.scheme" . | nindent 4 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    # Until every node has heard that this pod takes no more requests.
    exec:
      command: [sleep, {{ .Values.drain.delaySeconds | quote }}]
{{- end -}}

{{- define "kunserve.scheme" -}}
scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.tls.secret "") }}
{{- end -}}

{{- define "kunserve.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: models
  mountPath: /models
{{- if .Values.apiKeys.secret }}
- name: keys
  mountPath: /etc/kunserve/keys
  readOnly: true
{{- end }}
{{- if .Values.tls.secret }}
- name: tls
  mountPath: /etc/kunserve/tls
  readOnly: true
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kunserve.volumes" -}}
- name: tmp
  emptyDir: {}
- name: models
  {{- if .Values.persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ .Values.persistence.existingClaim | default (printf "%s-models" (include "kunserve.name" .)) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- with .Values.apiKeys.secret }}
- name: keys
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources of a pod with so many instances and so many MiB beside them: what the values say,
     and what follows from the instances where they say nothing. */}}
{{- define "kunserve.resources" -}}
{{- $v := .root.Values -}}
{{- $requests := deepCopy $v.resources.requests -}}
{{- $limits := deepCopy $v.resources.limits -}}
{{- if $v.instances.memoryMiB -}}
{{- $each := add (int $v.instances.memoryMiB) (int $v.overhead.instanceMiB) -}}
{{- $memory := printf "%dMi" (add (mul .instances $each) (int .besideMiB)) -}}
{{- $limits = merge $limits (dict "memory" $memory) -}}
{{- else if not $limits.memory -}}
{{- fail "instances.memoryMiB is null: give resources.limits.memory" -}}
{{- end -}}
{{- if $v.instances.gpus -}}
{{- $limits = merge $limits (dict "nvidia.com/gpu" (mul .instances $v.instances.gpus)) -}}
{{- end -}}
{{- $cpus := mul .instances $v.instances.threads | toString -}}
{{- $requests = merge $requests (dict "cpu" $cpus "memory" $limits.memory) -}}
requests:
  {{- toYaml $requests | nindent 2 }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end -}}

{{- define "kunserve.fixed" -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
limits:
  memory: {{ .memory }}
{{- end -}}

{{- define "kunserve.annotations" -}}
prometheus.io/scrape: "true"
prometheus.io/port: "8000"
prometheus.io/path: /metrics
{{- if .Values.tls.secret }}
prometheus.io/scheme: https
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}
