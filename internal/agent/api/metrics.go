package api

import (
	"context"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// metric describes one metric; values are read at each scrape.
func metric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("pilaster_"+name, help, labels, nil)
}

// collector exports the service's status as metrics.
type collector struct {
	service                                         *Service
	ready, tenants, connected, rev                  *prometheus.Desc
	health, first, build                            *prometheus.Desc
	entries, capacity, largest, drops               *prometheus.Desc
	policed, rules, denied                          *prometheus.Desc
	sessions, room, most, mostOfTenant, sessionEnds *prometheus.Desc
	subscriptions, misses                           *prometheus.Desc
	offloads                                        offloadMetrics
	egress                                          egressMetrics
	services                                        serviceMetrics
}

func newCollector(s *Service) *collector {
	return &collector{
		service:  s,
		offloads: newOffloadMetrics(),
		egress:   newEgressMetrics(),
		services: newServiceMetrics(),
		build: metric(
			"build_info",
			"1, labelled with the versions of this agent and of the attached programs.",
			"version",
			"programs",
			"goversion",
		),
		ready:     metric("agent_ready", "1 if an ADD would be accepted now."),
		tenants:   metric("tenants_hosted", "Tenants with endpoints on this node."),
		connected: metric("orchestrator_connected", "1 while the stream from the orchestrator is open."),
		rev:       metric("orchestrator_revision", "Revision of the last event from the orchestrator."),
		health:    metric("datapath_healthy", "1 while every program is attached in its place."),
		first:     metric("datapath_tcx_first", "1 while our programs are the first on the uplink."),
		entries: metric(
			"table_entries",
			"Used entries: endpoints and tenant-ids, which limit ADDs, and tables of the packet path.",
			"table",
		),
		capacity: metric("table_capacity", "Entries a table can hold.", "table"),
		largest: metric(
			"table_largest_tenant_entries",
			"Entries of the tenant with the most entries in a table.",
			"table",
			"tenant",
		),
		drops:   metric("datapath_drops_total", "Packets dropped, by reason.", "reason"),
		policed: metric("policy_tenants", "Tenants with endpoints on this node and policies in the packet path."),
		rules:   metric("policy_rules", "Rules of policies in the packet path."),
		denied: metric(
			"policy_denied_packets_total",
			"Packets that policies denied on this node; mode audit: packets that passed and would have been denied.",
			"tenant",
			"policy",
			"mode",
		),
		sessions: metric(
			"sessions",
			"Tracked sessions, by state; half-open ones are evicted when others need room.",
			"state",
		),
		room: metric("sessions_capacity", "Capacity of the session table."),
		most: metric("sessions_largest_endpoint", "Sessions of the endpoint with the most sessions.", "endpoint",
			"name"),
		mostOfTenant: metric("sessions_largest_tenant", "Sessions of the tenant with the most sessions.", "tenant"),
		subscriptions: metric(
			"mapping_subscriptions",
			"Subscriptions of a node that pulls mappings, by state: known, or unknown without a mapping.",
			"network",
			"state",
		),
		misses: metric(
			"mapping_misses_total",
			"Cache misses of mappings that the programs reported, by what followed: a subscription was begun, they "+
				"were ignored because there is one, or refused because there was no room.",
			"network",
			"event",
		),
		sessionEnds: metric(
			"sessions_total",
			"Sessions by event: begun, evicted while half open, refused because the table was full.",
			"event",
		),
	}
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	s := c.service.status(context.Background())
	gauge(c.build, 1, s.Version, s.Datapath.GetPrograms(), runtime.Version())
	gauge(c.ready, number(s.Ready))
	gauge(c.tenants, float64(s.Tenants))
	gauge(c.connected, number(s.Orchestrator.Connected))
	gauge(c.rev, float64(s.Orchestrator.Revision))
	gauge(c.health, number(s.Datapath.GetHealthy()))
	gauge(c.first, number(s.Datapath.GetFirstInChain()))
	for _, l := range s.Limits {
		gauge(c.entries, float64(l.Used), l.Name)
		gauge(c.capacity, float64(l.Capacity), l.Name)
		if l.LargestTenant != "" {
			gauge(c.largest, float64(l.LargestUsed), l.Name, l.LargestTenant)
		}
	}
	for _, e := range s.Datapath.GetEntries() {
		if !e.Cache { // a full cache refuses nothing
			gauge(c.entries, float64(e.Used), e.Table)
			if e.Capacity > 0 { // others grow on demand
				gauge(c.capacity, float64(e.Capacity), e.Table)
			}
		}
	}
	for _, p := range s.Pulls {
		gauge(c.subscriptions, float64(p.Subscriptions-p.Unknown), p.Network, "known")
		gauge(c.subscriptions, float64(p.Unknown), p.Network, "unknown")
		for event, n := range map[string]uint64{"begun": p.Begun, "ignored": p.Ignored, "refused": p.Refused} {
			ch <- prometheus.MustNewConstMetric(c.misses, prometheus.CounterValue, float64(n), p.Network, event)
		}
	}
	c.policies(ch, s.Policies)
	c.offloads.collect(ch, s)
	c.egress.collect(ch, s)
	if core := c.service.core.Load(); core != nil {
		c.services.collect(ch, core.Core)
		for _, times := range core.PolicyTimes() {
			times.Collect(ch)
		}
	}
	for _, d := range s.Drops {
		ch <- prometheus.MustNewConstMetric(c.drops, prometheus.CounterValue, float64(d.Packets), d.Reason)
	}
}

func (c *collector) policies(ch chan<- prometheus.Metric, p *pilasterv1.Policies) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	send(c.policed, prometheus.GaugeValue, float64(p.GetTenants()))
	send(c.rules, prometheus.GaugeValue, float64(p.GetRules()))
	for _, e := range p.GetEntries() {
		send(c.entries, prometheus.GaugeValue, float64(e.Used), e.Table)
		send(c.capacity, prometheus.GaugeValue, float64(e.Capacity), e.Table)
	}
	denied := map[[3]string]uint64{}
	for _, h := range p.GetHits() {
		denied[[3]string{h.Tenant, h.Rule.GetPolicy(), policyMode(h.Rule.GetAudit())}] += h.Packets
	}
	for of, packets := range denied {
		send(c.denied, prometheus.CounterValue, float64(packets), of[0], of[1], of[2])
	}
	s := p.GetSessions()
	if s == nil {
		return
	}
	send(c.room, prometheus.GaugeValue, float64(s.Capacity))
	send(c.sessions, prometheus.GaugeValue, float64(s.HalfOpen), "half-open")
	send(c.sessions, prometheus.GaugeValue, float64(s.Used-s.HalfOpen), "established")
	if s.LargestEndpoint != 0 {
		send(
			c.most,
			prometheus.GaugeValue,
			float64(s.LargestUsed),
			strconv.FormatUint(uint64(s.LargestEndpoint), 10),
			s.Largest,
		)
	}
	if s.LargestTenant != "" {
		send(c.mostOfTenant, prometheus.GaugeValue, float64(s.LargestTenantUsed), s.LargestTenant)
	}
	for event, n := range map[string]uint64{"begun": s.Begun, "evicted": s.Evicted, "refused": s.Refused} {
		send(c.sessionEnds, prometheus.CounterValue, float64(n), event)
	}
}

func policyMode(audit bool) string {
	if audit {
		return "audit"
	}
	return "enforce"
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// ObserveHandler serves /metrics, /healthz (the agent runs) and /readyz (an ADD would be accepted now; otherwise 503
// with the reasons).
func (s *Service) ObserveHandler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(s.config.Metrics...)
	registry.MustRegister(
		newCollector(s),
		s.calls,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok\n")) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		status := s.status(r.Context())
		if !status.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		for _, p := range status.Problems {
			w.Write([]byte(p + "\n"))
		}
		if status.Ready {
			w.Write([]byte("ok\n"))
		}
	})
	return mux
}

func newCalls() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "pilaster_agent_call_duration_seconds",
		Help:    "Calls of the CNI plugin and of operators, by procedure and code.",
		Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
	}, []string{"procedure", "code"})
}

// Timed measures unary calls; the duration of a stream is up to its client.
func (s *Service) Timed() connect.Interceptor {
	return connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			start, code := time.Now(), "ok"
			resp, err := next(ctx, req)
			if err != nil {
				code = connect.CodeOf(err).String()
			}
			s.calls.WithLabelValues(req.Spec().Procedure, code).Observe(time.Since(start).Seconds())
			return resp, err
		}
	})
}

// timedCNI measures a call of the CNI plugin.
func (s *Service) timedCNI(verb string, refused uint, took time.Duration) {
	code := "ok"
	if refused != 0 {
		code = strconv.FormatUint(uint64(refused), 10)
	}
	s.calls.WithLabelValues("cni/"+verb, code).Observe(took.Seconds())
}
