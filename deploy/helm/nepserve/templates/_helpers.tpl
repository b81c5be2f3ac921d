{{- define "nepserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "nepserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nepserve.labels" -}}
{{ include "nepserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The secret with the keys; empty where a single server makes its own. */ -}}
{{- define "nepserve.keys" -}}
{{- if .Values.keys.secret -}}{{ .Values.keys.secret }}
{{- else if .Values.keys.lines -}}{{ include "nepserve.name" . }}-keys
{{- else if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) -}}
{{- fail "several servers need common keys: give keys.secret or keys.lines" -}}
{{- end -}}
{{- end -}}
