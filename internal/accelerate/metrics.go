package accelerate

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// collector exports the status as metrics.
type collector struct {
	status                          func() (Status, error)
	hits, misses, learnt, notLearnt *prometheus.Desc
	evictions, evicted, entries     *prometheus.Desc
	containers, excluded, active    *prometheus.Desc
}

func newCollector(status func() (Status, error)) collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("pilaster_accelerate_"+name, help, labels, nil)
	}
	return collector{
		status:     status,
		hits:       desc("hits_total", "Packets that the cache forwarded.", "direction"),
		misses:     desc("misses_total", "Packets that took the overlay's way, by cause.", "direction", "cause"),
		learnt:     desc("learnt_total", "Packets from which the cache learnt.", "direction"),
		notLearnt:  desc("not_learnt_total", "Packets from which it did not learn, by cause.", "direction", "cause"),
		evictions:  desc("evictions_total", "Changes after which entries were evicted, by cause.", "cause"),
		evicted:    desc("evicted_entries_total", "Entries that were evicted one by one."),
		entries:    desc("entries", "Entries of the cache.", "table"),
		containers: desc("containers", "Containers that use the cache."),
		excluded:   desc("excluded_containers", "Containers that do not use the cache."),
		active:     desc("active", "1 while packets use the cache, 0 while it is paused."),
	}
}

func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.hits, c.misses, c.learnt, c.notLearnt, c.evictions, c.evicted, c.entries, c.containers, c.excluded, c.active,
	} {
		to <- d
	}
}

func (c collector) Collect(to chan<- prometheus.Metric) {
	s, err := c.status()
	if err != nil {
		to <- prometheus.NewInvalidMetric(c.active, err)
		return
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	for direction, h := range map[string]DirectionStatus{"egress": s.Egress, "ingress": s.Ingress} {
		counter(c.hits, h.Hits, direction)
		counter(c.learnt, h.Learnt, direction)
		for cause, n := range h.Misses {
			counter(c.misses, n, direction, cause)
		}
		for cause, n := range h.NotLearnt {
			counter(c.notLearnt, n, direction, cause)
		}
	}
	counter(c.evicted, s.Evicted)
	for _, cause := range causes {
		counter(c.evictions, s.Evictions[cause], cause)
	}
	for table, n := range map[string]int{
		"flows": s.Entries.Flows, "remote": s.Entries.Remote, "vteps": s.Entries.VTEPs, "local": s.Entries.Local,
	} {
		gauge(c.entries, n, table)
	}
	gauge(c.containers, len(s.Containers.Devices))
	gauge(c.excluded, len(s.Containers.Excluded))
	active := 0
	if s.InUse {
		active = 1
	}
	gauge(c.active, active)
}

// observe serves metrics and health.
func (d *daemon) observe(ctx context.Context) http.Handler {
	status := func() (s Status, err error) {
		err = d.call(ctx, ctx, func() (err error) { s, err = d.status(); return err })
		return s, err
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(
		newCollector(status),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch s, err := status(); {
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		case !s.InUse:
			why := cmp.Or(strings.Join(s.Problems, "; "), "paused by an operator")
			http.Error(w, "packets do not use the cache: "+why, http.StatusServiceUnavailable)
		}
	})
	return mux
}
