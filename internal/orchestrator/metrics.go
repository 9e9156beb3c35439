package orchestrator

import (
	"net/http"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

var messageLabels = []string{"procedure", "direction", "event"}

// metrics are the Prometheus metrics of an orchestrator.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.CounterVec
	dropped  *prometheus.CounterVec
	messages *prometheus.CounterVec
	bytes    *prometheus.CounterVec
	refused  *prometheus.CounterVec
	offloads *prometheus.CounterVec
}

func newMetrics(version string) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pilaster_orchestrator_calls_total", Help: "Calls and streams that ended, by procedure and code.",
		}, []string{"procedure", "code"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pilaster_orchestrator_streams_ended_total", Help: "Streams of nodes that the orchestrator ended, " +
				"by reason.",
		}, []string{"reason"}),
		messages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pilaster_orchestrator_messages_total", Help: "Messages of calls and streams, by procedure, " +
				"direction, and on streams by event.",
		}, messageLabels),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pilaster_orchestrator_message_bytes_total", Help: "Bytes of these messages, without framing, " +
				"headers and TLS.",
		}, messageLabels),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pilaster_orchestrator_refused_total", Help: "Connections and calls refused because of a limit, by " +
				"limit.",
		}, []string{"limit"}),
	}
	m.offloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "pilaster_orchestrator_offload_changes_total", Help: "Changes of offloads by this orchestrator.",
	}, []string{"change"})
	for _, kind := range offload.Kinds {
		m.offloads.WithLabelValues(string(kind))
	}
	for _, limit := range admission.LimitWords {
		m.refused.WithLabelValues(limit)
	}
	for _, event := range []string{rpc.EventSnapshot, rpc.EventDelta, rpc.EventHeartbeat} {
		// Exported from the start, with value 0.
		m.countMessages(pilasterv1connect.NodeServiceFollowProcedure, rpc.Sent, event, 0, 0)
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "pilaster_build_info", Help: "1, labelled by the version of this orchestrator.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	})
	build.Set(1)
	m.registry.MustRegister(
		build,
		m.calls,
		m.dropped,
		m.messages,
		m.bytes,
		m.refused,
		m.offloads,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

func (m *metrics) countCall(procedure, code string) { m.calls.WithLabelValues(procedure, code).Inc() }
func (m *metrics) countDropped(reason string)       { m.dropped.WithLabelValues(reason).Inc() }

func (m *metrics) countRefused(limit string) { m.refused.WithLabelValues(limit).Inc() }

func (m *metrics) countOffload(kind offload.Kind) { m.offloads.WithLabelValues(string(kind)).Inc() }

func (m *metrics) countMessage(procedure, direction, event string, bytes int) {
	m.countMessages(procedure, direction, event, 1, bytes)
}

func (m *metrics) countMessages(procedure, direction, event string, n, bytes int) {
	m.messages.WithLabelValues(procedure, direction, event).Add(float64(n))
	m.bytes.WithLabelValues(procedure, direction, event).Add(float64(bytes))
}

// observe adds gauges that are read from the cache and the store on demand.
func (m *metrics) observe(model *cache.Cache, s *store.Store) {
	gauge := func(name, help string, value func(cache.Counts) int64) {
		m.registry.MustRegister(
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "pilaster_orchestrator_" + name, Help: help},
				func() float64 { return float64(value(model.Size())) }),
		)
	}
	gauge("nodes", "Registered nodes.", func(s cache.Counts) int64 { return int64(s.Nodes) })
	gauge(
		"nodes_connected",
		"Nodes with a stream to this orchestrator.",
		func(s cache.Counts) int64 { return int64(s.Streams) },
	)
	gauge(
		"nodes_unreachable",
		"Dead nodes, whose endpoints of services get no new connections.",
		func(s cache.Counts) int64 { return int64(s.Unreachable) },
	)
	gauge("tenants", "Tenants.", func(s cache.Counts) int64 { return int64(s.Tenants) })
	gauge("apps", "Apps of all tenants.", func(s cache.Counts) int64 { return int64(s.Apps) })
	gauge("apps_most", "Apps of the tenant that has most.", func(s cache.Counts) int64 { return int64(s.MostApps) })
	gauge("apps_max", "Apps that a tenant may have.", func(cache.Counts) int64 { return int64(s.MaxApps()) })
	gauge(
		"apps_retiring",
		"Apps in retirement rounds, of all tenants.",
		func(s cache.Counts) int64 { return int64(s.RetiringApps) },
	)
	gauge(
		"app_ids_quarantined",
		"Quarantined ids of ended apps, of all tenants.",
		func(s cache.Counts) int64 { return int64(s.QuarantinedApps) },
	)
	gauge("policies", "Policies of all tenants.", func(s cache.Counts) int64 { return int64(s.Policies) })
	gauge(
		"mapping_subscriptions",
		"Subscriptions of nodes to single mappings, on streams to this orchestrator.",
		func(s cache.Counts) int64 { return int64(s.Subscriptions) },
	)
	gauge(
		"revision",
		"Revision of the store that this orchestrator has read.",
		func(s cache.Counts) int64 { return s.Revision },
	)
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pilaster_orchestrator_store_queue_length", Help: "Changes that wait for the store.",
	}, func() float64 { return float64(s.Waiting()) }))
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "pilaster_orchestrator_store_conflicts_total", Help: "Changes retried because another orchestrator " +
			"committed first.",
	}, func() float64 { return float64(s.Conflicts()) }))
}

// observeOffloads adds gauges of the offloads.
func (m *metrics) observeOffloads(o *offloads) {
	for _, phase := range tenant.OffloadPhases[1:] {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "pilaster_orchestrator_offloads", Help: "Offloads, by phase.",
			ConstLabels: prometheus.Labels{"phase": string(phase)},
		}, func() float64 { return float64(o.phases()[phase]) }))
	}
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pilaster_orchestrator_offloads_in_doubt", Help: "1 while backends report more than half of all " +
			"frontends as lost, so that none is removed.",
	}, func() float64 {
		if o.inDoubt() {
			return 1
		}
		return 0
	}))
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}
