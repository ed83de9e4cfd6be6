{{- define "towerd.labels" -}}
app.kubernetes.io/name: towerd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
