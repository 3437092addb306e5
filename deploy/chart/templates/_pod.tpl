{{- /*
The pod of one role: `root` has the chart's values, `suffix` is the role's, `joins` says whether it gives its GPUs to the
engine of its group's leader (`openinfer rank`) instead of serving.
*/}}
{{- define "openinfer.pod" -}}
{{- $values := .root.Values -}}
{{- $apart := $values.apart -}}
{{- $isGroup := gt (int $values.multiNode.nodes) 1 -}}
terminationGracePeriodSeconds: {{ add $values.drainSeconds 20 }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
containers:
  - name: openinfer
    image: {{ $values.image | quote }}
    {{- if .joins }}
    args:
      - rank
      - --join
      - {{ printf "$(LWS_LEADER_ADDRESS):%d" (int $values.multiNode.port) | quote }}
      - --token-file
      - /etc/openinfer-ranks/token
      - --ranks
      - {{ max 1 (int $values.gpus) | quote }}
      - --node
      - $(POD_NAME)
      - --wait-s
      - {{ $values.startSeconds | quote }}
    {{- else }}
    args:
      - serve
      - --model
      - {{ $values.model | quote }}
      - --device
      - {{ $values.device | quote }}
      - --tensor-parallel-size
      - {{ mul (max 1 (int $values.gpus)) (int $values.multiNode.nodes) | quote }}
      - --drain-deadline-s
      - {{ $values.drainSeconds | quote }}
      - --host
      - 0.0.0.0
      - --port
      - "8000"
      {{- if $isGroup }}
      - --rank-host
      - {{ printf "join=$(POD_IP):%d,token-file=/etc/openinfer-ranks/token,local=%d,wait-s=%d" (int $values.multiNode.port) (max 1 (int $values.gpus)) (int $values.startSeconds) | quote }}
      {{- end }}
      {{- if $values.keysSecret }}
      - --api-keys-file
      - /etc/openinfer/keys.toml
      {{- end }}
      - --metrics-names
      - {{ $values.metricsNames | quote }}
      {{- if $apart.tier }}
      - --kv-tier
      - {{ $apart.tier | quote }}
      - --kv-transfer
      - {{ index (splitList "=" $apart.tier) 0 | quote }}
      - --kv-key-file
      - /etc/openinfer-kv/kv.key
      {{- end }}
      {{- range $values.args }}
      - {{ . | quote }}
      {{- end }}
    ports:
      - name: http
        containerPort: 8000
    startupProbe:
      httpGet:
        path: /ready
        port: http
      periodSeconds: 5
      failureThreshold: {{ div $values.startSeconds 5 }}
    readinessProbe:
      httpGet:
        path: /ready
        port: http
      periodSeconds: 5
      timeoutSeconds: 2
    livenessProbe:
      httpGet:
        path: /health
        port: http
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 3
    lifecycle:
      preStop:
        sleep:
          seconds: 5
    {{- end }}
    resources:
      requests:
        {{- toYaml $values.resources.requests | nindent 8 }}
      limits:
        {{- toYaml $values.resources.limits | nindent 8 }}
        {{- if $values.gpus }}
        nvidia.com/gpu: {{ $values.gpus }}
        {{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: ["ALL"]
    env:
      - name: HOME
        value: /tmp
      {{- if $isGroup }}
      - name: POD_IP
        valueFrom:
          fieldRef:
            fieldPath: status.podIP
      - name: POD_NAME
        valueFrom:
          fieldRef:
            fieldPath: metadata.name
      {{- end }}
    volumeMounts:
      - name: models
        mountPath: /models
      - name: tmp
        mountPath: /tmp
      - name: shm
        mountPath: /dev/shm
      {{- if $isGroup }}
      - name: ranks
        mountPath: /etc/openinfer-ranks
        readOnly: true
      {{- end }}
      {{- if $values.keysSecret }}
      - name: keys
        mountPath: /etc/openinfer
        readOnly: true
      {{- end }}
      {{- if $apart.tier }}
      - name: kv-key
        mountPath: /etc/openinfer-kv
        readOnly: true
      {{- end }}
volumes:
  - name: models
    persistentVolumeClaim:
      claimName: {{ $values.models.claim | default (printf "%s-models" .root.Release.Name) }}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: 1Gi
  {{- if $isGroup }}
  - name: ranks
    secret:
      secretName: {{ $values.multiNode.tokenSecret }}
      defaultMode: 288
  {{- end }}
  {{- if $values.keysSecret }}
  - name: keys
    secret:
      secretName: {{ $values.keysSecret }}
      defaultMode: 288
  {{- end }}
  {{- if $apart.tier }}
  - name: kv-key
    secret:
      secretName: {{ $apart.keySecret }}
      defaultMode: 288
  {{- end }}
{{- end }}
{{- define "openinfer.leaderMetadata" -}}
labels:
  app.kubernetes.io/name: openinfer
  app.kubernetes.io/instance: {{ .root.Release.Name }}{{ .suffix }}
  llm-d.ai/role: {{ if .suffix }}prefill{{ else if .root.Values.apart.prefill }}decode{{ else }}both{{ end }}
annotations:
  prometheus.io/scrape: "true"
  prometheus.io/port: "8000"
{{- end }}
